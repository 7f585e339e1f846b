"""Reading and writing models: every failure names its reason, and none of them leaves or takes away a file."""

from __future__ import annotations

import gc
import os
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, external_data_helper, helper
from tests.onnx_flow import models

from quark import garbage
from quark.errors import ModelError, ModelNotFoundError
from quark.files.outputs import check_outputs
from quark.ir.surgery import set_constant
from quark.ir.walk import all_nodes
from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.graph import model as graph_model
from quark.onnx.graph.lift import lift
from quark.onnx.graph.model import load, output_of, readable_ir_version, save, suitable_ir_version, to_proto
from quark.onnx.graph.session import open_session
from quark.onnx.graph.shapes import infer_shapes, static_shape
from quark.onnx.graph.weightless import external_proto, large_initializers, through_proto


def saved_with_external_data(folder: Path) -> Path:
    """The residual CNN as onnx itself writes it with external data."""
    path = folder / "big.onnx"
    external_data_helper.convert_model_to_external_data(proto := models.cnn(), location="big.data", size_threshold=100)
    onnx.save(proto, path)
    return path


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_every_kind_of_input_gives_the_same_model(tmp_path: Path) -> None:
    proto = models.cnn()
    inputs = models.feeds(proto)
    expected = models.run(proto, inputs)
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    for source in (path, str(path), proto, ir.from_proto(proto)):
        models.assert_close(models.run(to_proto(load(source)), inputs), expected, 0)


@pytest.mark.parametrize("kind", ["proto", "ir"])
def test_the_model_of_the_caller_is_never_changed(kind: str) -> None:
    proto = models.cnn(11)
    source = proto if kind == "proto" else ir.from_proto(proto)
    before = (proto if kind == "proto" else ir.to_proto(source)).SerializeToString(deterministic=True)
    model = lift(load(source), 21)
    for value in list(model.graph.initializers.values()):
        set_constant(value, np.zeros(value.const_value.shape.numpy(), np.float32))
        value.name = f"{value.name}_renamed"
    model.graph.inputs[0].name = "other"
    to_proto(model)
    after = (proto if kind == "proto" else ir.to_proto(source)).SerializeToString(deterministic=True)
    assert after == before


def test_reading_takes_one_copy_of_the_weights(tmp_path: Path) -> None:
    """Python's share of the memory; the parser's own, once more the weights, is gone when it returns."""
    weights = {f"w{k}": models.normal(512, 512, 1, 1, seed=k, scale=0.04) for k in range(8)}
    x = "".join(f"x{k + 1} = Conv (x{k}, w{k}) " for k in range(8))
    onnx.save(
        models.model(f"g (float[1, 512, 2, 2] x0) => (float[1, 512, 2, 2] x8) {{ {x} }}", weights, 11), tmp_path / "m"
    )
    tracemalloc.start()
    model = lift(load(tmp_path / "m"), 21)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(model.graph) == 8
    assert kept < 1.1 * 2**23 and peak < 2.2 * 2**23


@pytest.mark.parametrize("much", [0, 1 << 40])
def test_a_large_model_goes_with_its_job(much: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are circles: without a look at everything those of the job wait for Python's next one."""
    monkeypatch.setattr(garbage, "MUCH", much)
    onnx.save(models.cnn(), tmp_path / "m.onnx")
    gc.collect()
    known = {id(one) for one in gc.get_objects() if isinstance(one, ir.Graph)}
    config = get_default_config("XINT8")
    config.extra_options["UseRandomData"] = True
    gc.disable()
    try:
        ModelQuantizer(Config(config)).quantize_model(tmp_path / "m.onnx", tmp_path / "q.onnx")
        left = [one for one in gc.get_objects() if isinstance(one, ir.Graph) and id(one) not in known]
    finally:
        gc.enable()
    assert bool(left) == bool(much)


def test_weights_of_a_protobuf_are_copied_once_and_when_they_are_read() -> None:
    model = load(models.cnn())
    tensor = model.graph.initializers["w1"].const_value
    assert isinstance(tensor, ir.LazyTensor)
    assert tensor.numpy() is tensor.numpy()


def test_renaming_an_initializer_does_not_rename_it_for_the_caller() -> None:
    proto = models.cnn()
    model = load(proto)
    model.graph.initializers["w1"].name = "first_weight"
    assert "first_weight" in {tensor.name for tensor in to_proto(model).graph.initializer}
    assert "w1" in {tensor.name for tensor in proto.graph.initializer}


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"gone\.onnx' does not exist") as caught:
        load(tmp_path / "gone.onnx")
    assert isinstance(caught.value, FileNotFoundError) and isinstance(caught.value, ValueError)


def graph_of(*nodes: onnx.NodeProto, outputs: tuple[str, ...] = ("y",)) -> onnx.ModelProto:
    """A model of float vectors with the input ``x``, valid or not."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", *outputs)]
    return helper.make_model(helper.make_graph(list(nodes), "g", values[:1], values[1:]), ir_version=8)


def newer_than_we_read() -> onnx.ModelProto:
    proto = models.cnn()
    proto.ir_version = onnx.IR_VERSION + 1
    return proto


def sparse() -> onnx.ModelProto:
    proto = models.cnn()
    proto.graph.sparse_initializer.add().values.name = "few"
    return proto


def short_weight() -> onnx.ModelProto:
    proto = models.cnn()
    proto.graph.initializer[0].raw_data = proto.graph.initializer[0].raw_data[:-8]
    return proto


node = helper.make_node
DAMAGED = {
    "empty": (b"", "is empty"),
    "text": (b"This is not a model, it is a letter to a friend.", "not an ONNX model"),
    "cut": (models.cnn().SerializeToString()[:-700], "not an ONNX model or is damaged"),
    "no graph": (onnx.ModelProto(ir_version=8).SerializeToString(), "holds no graph"),
    "reads nothing": (graph_of(node("Relu", ["z"], ["y"], "r")).SerializeToString(), "'r' .Relu. reads 'z'"),
    "makes nothing": (graph_of(node("Relu", ["x"], ["z"])).SerializeToString(), "output 'y' is made by no node"),
    "made twice": (graph_of(*[node("Relu", ["x"], ["y"])] * 2).SerializeToString(), "'y' is redeclared"),
    "future": (newer_than_we_read().SerializeToString(), "Upgrade onnx"),
    "short": (short_weight().SerializeToString(), "the data of the initializer 'w1' do not fit"),
    "sparse": (sparse().SerializeToString(), "sparse initializer 'few'"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(case: str, tmp_path: Path) -> None:
    content, reason = DAMAGED[case]
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"bad\.onnx.*{reason}"):
        load(path)


def test_a_folder_and_a_number_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(ModelError, match="not int"):
        load(3)  # type: ignore[arg-type]


def test_nodes_in_any_order_are_accepted_and_written_sorted() -> None:
    proto = models.cnn()
    expected = models.run(proto, models.feeds(proto))
    shuffled = onnx.ModelProto()
    shuffled.CopyFrom(proto)
    del shuffled.graph.node[:]
    shuffled.graph.node.extend(reversed(proto.graph.node))
    result = to_proto(load(shuffled))
    onnx.checker.check_model(result)
    models.assert_close(models.run(result, models.feeds(proto)), expected, 0)


def test_subgraphs_may_read_what_a_later_node_makes() -> None:
    proto = models.branching()
    proto.graph.node.insert(0, proto.graph.node.pop())  # the If before the Relu that it reads
    result = to_proto(load(proto))
    onnx.checker.check_model(result)
    assert models.op_types(result) == ["Relu", "If"]


def test_every_node_gets_a_name_of_its_own() -> None:
    proto = models.branching()
    for name, node in zip(("twice", "", "twice"), proto.graph.node, strict=False):
        node.name = name
    proto.graph.node.append(helper.make_node("Neg", ["y"], ["z"], name="twice"))
    names = [node.name for node in all_nodes(load(proto))]
    assert names == ["twice", "y", "wt", "t", "we", "m", "o", "twice_1"]
    assert [node.name for node in proto.graph.node] == ["twice", "", "twice"]


def test_a_graph_that_runs_in_a_circle() -> None:
    proto = graph_of(node("Add", ["x", "b"], ["a"]), node("Neg", ["a"], ["b"]), node("Neg", ["b"], ["y"]))
    with pytest.raises(ModelError, match="runs in a circle"):
        load(proto)


def test_the_long_name_of_the_domain_of_onnx() -> None:
    proto = models.cnn(11)
    proto.opset_import[0].domain = "ai.onnx"
    for each in proto.graph.node:
        each.domain = "ai.onnx"
    inputs = models.feeds(proto)
    result = to_proto(lift(load(proto), 17))
    assert [(entry.domain, entry.version) for entry in result.opset_import] == [("", 17)]
    models.assert_close(models.run(result, inputs), models.run(proto, inputs), 1e-6)


# ---- external data ---------------------------------------------------------------------------------------------------


def test_external_data_stays_on_disk_until_it_is_read(tmp_path: Path) -> None:
    model = load(saved_with_external_data(tmp_path))
    tensor = model.graph.initializers["w1"].const_value
    assert isinstance(tensor, ir.ExternalTensor) and tensor.raw is None
    np.testing.assert_array_equal(tensor.numpy(), onnx.numpy_helper.to_array(models.cnn().graph.initializer[0]))


def test_external_data_of_8_gib_loads_without_being_read(tmp_path: Path) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2**31], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="huge.data")
    with open(tmp_path / "huge.data", "wb") as file:
        file.truncate(2**33)  # a hole: it takes no space
    proto = graph_of(node("Mul", ["x", "w"], ["y"]))
    proto.graph.initializer.append(tensor)
    onnx.save(proto, tmp_path / "huge.onnx")
    model = load(tmp_path / "huge.onnx")
    with pytest.raises(ModelError, match=r"8.0 GiB of weights.*give an output path"):
        to_proto(model)


def test_missing_and_short_external_data(tmp_path: Path) -> None:
    path = saved_with_external_data(tmp_path)
    os.truncate(tmp_path / "big.data", 1000)
    with pytest.raises(ModelError, match=r"big\.data' is too short: 1000 bytes"):
        load(path)
    (tmp_path / "big.data").unlink()
    with pytest.raises(ModelError, match=r"big\.onnx'.*big\.data' \(weights of '.*'\) is missing"):
        load(path)


def test_external_data_outside_the_folder_is_refused(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    path = saved_with_external_data(inner)
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../big.data"
    onnx.save(proto, path)
    (inner / "big.data").rename(tmp_path / "big.data")
    with pytest.raises(ModelError, match="outside the model's folder"):
        load(path)


def test_links_to_external_data_are_followed(tmp_path: Path) -> None:
    """The caches of model hubs hold links."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    saved_with_external_data(tmp_path / "blobs")
    for name in ("big.onnx", "big.data"):
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / name)
    inputs = models.feeds(models.cnn())
    result = to_proto(load(tmp_path / "snapshot" / "big.onnx"))
    models.assert_close(models.run(result, inputs), models.run(models.cnn(), inputs), 0)


@pytest.mark.parametrize("way", ["a link", "a link to a folder", "beside a linked model"])
def test_links_out_of_the_folder_are_not(way: str, tmp_path: Path) -> None:
    """Whoever packed the model chose what they point at."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    saved_with_external_data(home)
    (home / "big.data").rename(elsewhere / "big.data")
    path = home / "big.onnx"
    if way == "a link to a folder":
        proto = onnx.load(path, load_external_data=False)
        for entry in (one for tensor in proto.graph.initializer for one in tensor.external_data):
            if entry.key == "location":
                entry.value = "up/big.data"
        onnx.save(proto, path)
        (home / "up").symlink_to(elsewhere, target_is_directory=True)
    else:
        (home / "big.data").symlink_to(elsewhere / "big.data")
    if way == "beside a linked model":
        path = tmp_path / "linked.onnx"
        path.symlink_to(home / "big.onnx")
        (tmp_path / "big.data").symlink_to("/etc/hosts")
    with pytest.raises(ModelError, match=r"outside the model's folder: '.*' is a link to"):
        load(path)


@pytest.mark.parametrize("value", ["1e3", "-1", "", "\x1b", "9" * 30])
@pytest.mark.parametrize("key", ["offset", "length"])
def test_places_of_external_data_that_are_no_numbers_are_told(key: str, value: str, tmp_path: Path) -> None:
    path = saved_with_external_data(tmp_path)
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        kept = {one.key: one.value for one in tensor.external_data if one.key != key}
        del tensor.external_data[:]
        for name, one in {**kept, key: value}.items():
            tensor.external_data.add(key=name, value=one)
    onnx.save(proto, path)
    with pytest.raises(ModelError) as caught:
        load(path)
    assert "argument" not in str(caught.value) and "Traceback" not in str(caught.value)


# ---- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("external", [False, True])
def test_what_is_saved_runs_as_before(external: bool, tmp_path: Path) -> None:
    proto = models.cnn()
    inputs = models.feeds(proto)
    save(load(proto), tmp_path / "out.onnx", external_data=external)
    assert sorted(os.listdir(tmp_path)) == (["out.onnx", "out.onnx.data"] if external else ["out.onnx"])
    models.assert_close(models.run(tmp_path / "out.onnx", inputs), models.run(proto, inputs), 0)


def test_external_becomes_internal_and_back(tmp_path: Path) -> None:
    path = saved_with_external_data(tmp_path)
    inputs = models.feeds(models.cnn())
    expected = models.run(models.cnn(), inputs)
    save(load(path), tmp_path / "inside.onnx")
    os.remove(tmp_path / "big.data")
    save(load(tmp_path / "inside.onnx"), tmp_path / "outside.onnx", external_data=True)
    models.assert_close(models.run(tmp_path / "outside.onnx", inputs), expected, 0)


def test_too_much_for_one_protobuf_goes_to_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_model, "INLINE_LIMIT", 1000)
    save(load(models.cnn()), tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").exists()
    with pytest.raises(ModelError, match="give an output path"):
        to_proto(load(models.cnn()))


def test_a_model_is_saved_over_the_file_and_the_data_it_came_from(tmp_path: Path) -> None:
    proto = models.cnn()
    proto.graph.initializer.insert(0, onnx.numpy_helper.from_array(models.normal(1000), "unread"))
    inputs = models.feeds(proto)
    path = tmp_path / "out.onnx"
    save(load(proto), path, external_data=True)
    model = load(path)
    del model.graph.initializers["unread"]  # so that all other weights move inside the data file
    save(model, path, external_data=True)
    models.assert_close(models.run(path, inputs), models.run(proto, inputs), 0)
    models.assert_close(models.run(to_proto(model), inputs), models.run(proto, inputs), 0)
    assert sorted(os.listdir(tmp_path)) == ["out.onnx", "out.onnx.data"]


def invalid_model() -> ir.Model:
    """What ``onnx.checker`` rejects, and nothing before it."""
    model = load(models.cnn())
    next(iter(model.graph)).op_type = "NoSuchOperator"
    return model


def full_disk(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("failure", ["checker", "disk", "model cannot be moved"])
def test_a_failure_leaves_everything_as_it_was(
    failure: str, external: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.onnx"
    save(load(models.conv_chain(2)), path, external_data=True)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    model = invalid_model() if failure == "checker" else load(models.cnn())
    if failure == "disk":
        monkeypatch.setattr(graph_model, "_check", full_disk)
    if failure == "model cannot be moved":
        move = os.replace
        monkeypatch.setattr(os, "replace", lambda a, b: full_disk() if Path(b) == path else move(a, b))
    reason = "NoSuchOperator" if failure == "checker" else "No space left"
    with pytest.raises(ModelError, match=rf"out\.onnx.*{reason}"):
        save(model, path, external_data=external)
    monkeypatch.undo()
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_a_failure_leaves_no_new_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        save(invalid_model(), tmp_path / "out.onnx")
    assert not os.listdir(tmp_path)


def test_output_paths_are_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"folder '.*missing' does not exist: create it"):
        check_outputs([output_of(tmp_path / "missing" / "out.onnx")])
    with pytest.raises(ModelError, match=r"is a folder: add a file name"):
        check_outputs([output_of(tmp_path)])
    check_outputs([output_of(tmp_path / "out.onnx")])
    assert not os.listdir(tmp_path)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody may write to")
def test_a_folder_that_takes_no_files() -> None:
    with pytest.raises(ModelError, match="is not writable"):
        check_outputs([output_of("/proc/self/out.onnx")])


# ---- what is written loads everywhere --------------------------------------------------------------------------------


def test_the_ir_version_is_one_that_runtimes_load(tmp_path: Path) -> None:
    proto = models.cnn(17)
    proto.ir_version = onnx.IR_VERSION
    save(load(proto), tmp_path / "out.onnx")
    assert onnx.load(tmp_path / "out.onnx").ir_version == 10
    onnxruntime.InferenceSession(tmp_path / "out.onnx", providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(("dtype", "least"), [(ir.DataType.INT4, 10), (ir.DataType.FLOAT8E4M3FN, 9)])
def test_small_types_raise_the_ir_version(dtype: ir.DataType, least: int) -> None:
    model = load(models.cnn(13))
    assert suitable_ir_version(model) == 8
    model.graph.initializers["w1"].const_value = ir.Tensor(np.zeros(3, dtype.numpy()), dtype=dtype)
    assert suitable_ir_version(model) >= least


@pytest.mark.parametrize("build", [models.cnn, models.attention, models.branching, models.two_inputs, models.nhwc])
def test_every_builder_survives_the_round_trip(build: object, tmp_path: Path) -> None:
    proto = build()  # type: ignore[operator]
    inputs = models.feeds(proto)
    save(load(proto), tmp_path / "out.onnx")
    models.assert_close(models.run(tmp_path / "out.onnx", inputs), models.run(proto, inputs), 0)


# ---- without weights -------------------------------------------------------------------------------------------------


def test_through_proto_leaves_the_weights_out_and_puts_them_back() -> None:
    model = load(models.cnn())
    seen: list[onnx.ModelProto] = []
    order = list(model.graph.initializers)
    result = through_proto(model, lambda proto: seen.append(proto) or proto, limit=200)  # type: ignore[func-returns-value]
    names = {tensor.name for tensor in seen[0].graph.initializer}
    assert "w2" not in names and "b2" in names and "w2" in {value.name for value in seen[0].graph.input}
    assert list(model.graph.initializers) == order and [value.name for value in model.graph.inputs] == ["x"]
    assert result.graph.initializers["w2"].const_value is model.graph.initializers["w2"].const_value
    assert [value.name for value in result.graph.inputs] == ["x"]
    inputs = models.feeds(models.cnn())
    models.assert_close(models.run(to_proto(result), inputs), models.run(models.cnn(), inputs), 0)


def test_through_proto_keeps_initializers_that_are_inputs() -> None:
    model = load(models.initializers_as_inputs(models.cnn()))
    result = through_proto(model, lambda proto: proto, limit=200)
    assert [value.name for value in result.graph.inputs] == [value.name for value in model.graph.inputs]
    assert set(result.graph.initializers) == set(model.graph.initializers)


def test_through_proto_restores_the_model_when_the_edit_fails() -> None:
    model = load(models.cnn())
    before = to_proto(model).SerializeToString(deterministic=True)

    def fail(proto: onnx.ModelProto) -> onnx.ModelProto:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        through_proto(model, fail, limit=200)
    assert to_proto(model).SerializeToString(deterministic=True) == before


def test_weights_that_an_edit_no_longer_reads_are_dropped() -> None:
    def cut(proto: onnx.ModelProto) -> onnx.ModelProto:
        del proto.graph.node[1:]
        proto.graph.output[0].name = "c1"
        return proto

    result = through_proto(load(models.cnn()), cut, limit=200)
    assert "w1" in result.graph.initializers and "w2" not in result.graph.initializers


def test_the_external_form_names_what_it_left_out() -> None:
    model = load(models.cnn())
    proto, weights = external_proto(model, limit=200)
    assert set(weights) == set(large_initializers(model, 200)) == {"w1", "w2", "w3"}
    left_out = {tensor.name for tensor in proto.graph.initializer if tensor.data_location == TensorProto.EXTERNAL}
    assert left_out == set(weights) and len(proto.SerializeToString()) < 4000


def test_sessions_share_the_weights_and_keep_them_alive_as_long_as_they_run() -> None:
    proto = models.model("g (float[1, 64] x) => (float[1, 64] y) { y = MatMul (x, w) }", {"w": models.normal(64, 64)})
    inputs = models.feeds(proto)
    model = load(proto)
    set_constant(model.graph.initializers["w"], models.normal(64, 64))
    session = open_session(model)
    weight = weakref.ref(model.graph.initializers["w"].const_value.numpy())
    del model
    gc.collect()
    assert weight() is not None
    models.assert_close(session.run(None, inputs), models.run(proto, inputs), 1e-6)
    del session
    gc.collect()
    assert weight() is None


def test_sessions_accept_types_that_numpy_lacks() -> None:
    graph = "g (float[64] x) => (float[64] y) { c = Cast <to = 1> (w) y = Add (x, c) }"
    proto = models.model(graph, None, 21, ir_version=10)
    values = np.arange(1024, dtype=np.float32)[:64].repeat(16)
    proto.graph.initializer.append(helper.make_tensor("w", TensorProto.BFLOAT16, [1024], values))
    proto.graph.node[0].input[0] = "w64"
    proto.graph.node.insert(0, helper.make_node("Slice", ["w", "zero", "end"], ["w64"]))
    for name, number in (("zero", 0), ("end", 64)):
        proto.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], [number]))
    (got,) = open_session(load(proto)).run(None, {"x": np.zeros(64, np.float32)})
    np.testing.assert_array_equal(got, values[:64])


def test_a_session_that_cannot_be_opened_says_why() -> None:
    with pytest.raises(ModelError, match=r"ONNX Runtime does not accept the model: .*NoSuchOperator"):
        open_session(invalid_model())


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_shapes_are_found_without_weights() -> None:
    model = load(models.cnn())
    assert infer_shapes(model) > 0
    values = {value.name: value for node in model.graph for value in node.outputs}
    assert list(values["a2"].shape)[1:] == [8, 8, 8] and values["a2"].dtype == ir.DataType.FLOAT
    assert static_shape(values["a2"]) is None and static_shape(model.graph.initializers["w3"]) == (10, 8)


def test_shapes_that_are_computed_are_found() -> None:
    graph = """
    g (float[2, 3, 4] x) => (float[a, b] y) {
        s = Shape (x)
        n = Gather (s, zero)
        u = Unsqueeze (n, first)
        t = Concat <axis = 0> (u, rest)
        r = Reshape (x, t)
        y = Relu (r)
    }"""
    weights = {"zero": np.array(0), "first": np.array([0]), "rest": np.array([12])}
    model = load(models.model(graph, weights))
    infer_shapes(model)
    made = {value.name: value for node in model.graph for value in node.outputs}
    assert static_shape(made["r"]) == (2, 12)


def test_outputs_that_are_left_out_do_not_disturb_inference() -> None:
    proto = models.model("g (float[2, 3] x) => (float[2, 3] y) { d = Dropout (x) y = Neg (d) }")
    proto.graph.node[0].output.append("")
    model = load(proto)
    assert infer_shapes(model) == 1


def test_shapes_reach_into_subgraphs() -> None:
    model = load(models.branching())
    infer_shapes(model)
    inner = [value for graph in model.graphs() for node in graph for value in node.outputs if value.name == "m"]
    assert static_shape(inner[0]) == (2, 3)


def test_tensors_that_learn_equal_types_do_not_share_them() -> None:
    model = load(models.model("g (float[2, 3] x) => (float[2, 3] z) { y = Neg (x) z = Neg (y) }"))
    first, second = [node.outputs[0] for node in model.graph]
    first.type = second.type = None
    assert infer_shapes(model) == 2 and first.dtype == second.dtype == ir.DataType.FLOAT
    first.dtype = ir.DataType.FLOAT16
    assert second.dtype == ir.DataType.FLOAT


def test_shapes_of_a_hopeless_model_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    graph = "g (float[2, 3] x) => (float[2, 3] y) { y = own.Thing (x) }"
    assert infer_shapes(load(models.model(graph, domains={"own": 1}))) == 0
    assert not caplog.records


def test_a_session_of_a_model_with_small_external_data(tmp_path: Path) -> None:
    """Every tensor in external data, however small: nothing in memory may point to a file."""
    proto = models.model("g (float[n,4] x) => (float[n,3] y) { y = MatMul(x, w) }", {"w": models.normal(4, 3)})
    feed, path = models.feeds(proto), tmp_path / "m.onnx"
    expected = models.run(proto, feed)
    onnx.save(proto, path, save_as_external_data=True, location="m.data", size_threshold=0)
    models.assert_close(open_session(load(path)).run(None, feed), expected)


def test_a_model_that_is_loaded_ahead_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next load takes it over, once, and only while the file is what it was."""
    path, reads = tmp_path / "model.onnx", []
    onnx.save(models.cnn(), path)
    read = graph_model._read
    monkeypatch.setattr(graph_model, "_read", lambda path: reads.append(path) or read(path))
    ahead = graph_model.load_ahead(path)
    assert load(tmp_path / "." / "model.onnx") is ahead and load(path) is not ahead
    assert len(reads) == 2
    graph_model.load_ahead(path)
    changed = models.cnn()
    changed.producer_name = "somebody else"
    onnx.save(changed, path)
    assert load(path).producer_name == "somebody else"
    with pytest.raises(ModelNotFoundError):
        graph_model.load_ahead(tmp_path / "nowhere.onnx")


def test_a_model_of_the_newest_ir_version_runs() -> None:
    """onnx writes its newest version into a model of any opset, and ONNX Runtime reads that one a release later."""
    proto = onnx.parser.parse_model(
        f'<ir_version: {onnx.IR_VERSION}, opset_import: ["" : 13]> g (float[2] x) => (float[2] y) {{ y = Relu(x) }}'
    )
    before = proto.SerializeToString()
    session = open_session(load(proto))
    assert session.run(None, {"x": np.float32([-1, 2])})[0].tolist() == [0, 2]
    assert proto.SerializeToString() == before
    newest = onnx.defs.onnx_opset_version()
    proto.opset_import[0].version = newest
    assert readable_ir_version(proto) == onnx.helper.find_min_ir_version_for(proto.opset_import)
