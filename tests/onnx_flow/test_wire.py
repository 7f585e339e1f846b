"""Whatever is in a file, reading it without its weights gives what the parser gives, or the same refusal; writing gives
what the serializer writes."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper
from tests.onnx_flow import models

from quark.errors import ModelError
from quark.ir.in_file import InFile
from quark.ir.surgery import tensor_alias
from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.graph import wire
from quark.onnx.graph.model import data_files, load, save, to_proto
from quark.onnx.graph.run import Runner
from quark.onnx.graph.session import open_session

BROKEN = (DecodeError, ValueError, ModelError)


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LARGE_FILE", 0)
    monkeypatch.setattr(wire, "LARGE", 16)


def outcome(source: Path | onnx.ModelProto) -> bytes | str:
    """The model as it is loaded, or why it is not."""
    try:
        return bytes(to_proto(load(source)).SerializeToString(deterministic=True))
    except ModelError as error:
        return str(error).replace(f"{str(source)!r}", "the given ModelProto")


def test_weights_are_passed_over_and_come_back(tmp_path: Path) -> None:
    proto = models.cnn()
    onnx.save(proto, tmp_path / "m.onnx")
    light, weights = wire.read(tmp_path / "m.onnx")
    assert weights is not None and light.ByteSize() < proto.ByteSize() / 2
    assert outcome(tmp_path / "m.onnx") == outcome(proto)
    assert data_files(tmp_path / "m.onnx") == []  # the file itself is no external data of its own


@pytest.mark.parametrize("kind", [TensorProto.BFLOAT16, TensorProto.INT4, TensorProto.BOOL, TensorProto.DOUBLE])
def test_every_type_is_read_as_the_parser_reads_it(tmp_path: Path, kind: int) -> None:
    proto = models.cnn()
    proto.graph.initializer.append(helper.make_tensor("other", kind, [64], np.arange(64) % 2))
    onnx.save(proto, tmp_path / "m.onnx")
    assert outcome(tmp_path / "m.onnx") == outcome(proto)


def everywhere(kind: int, store: str) -> onnx.ModelProto:
    """A weight as an initializer, in a node, in a branch, in a node of it, and in a node of a function."""
    text = """<ir_version: 10, opset_import: ["" : 17, "own" : 1]>
        g (double[64] x, bool c) => (double[64] y) { k = Constant () a = Cast <to = 11> (k) b = own.f (x)
            d = If (c) <then_branch = t () => (double[64] u) { m = Constant () u = Cast <to = 11> (m) },
                        else_branch = e () => (double[64] v) { v = Cast <to = 11> (w) }> y = Sum (a, b, d) }
        <domain: "own", opset_import: ["" : 17]>
        f (x) => (y) { n = Constant () l = Cast <to = 11> (n) y = Add (x, l) }"""
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(kind)

    def weight(name: str) -> TensorProto:
        tensor = helper.make_tensor(name, kind, [64], rng.integers(0, 2, 64), raw=False)
        if store != "typed":
            tensor = numpy_helper.from_array(numpy_helper.to_array(tensor), name)
        if store == "raw, said to be inside":
            tensor.data_location = TensorProto.DEFAULT
        return tensor

    branches = {attr.name: attr.g for attr in proto.graph.node[3].attribute}
    branches["else_branch"].initializer.append(weight("w"))
    nodes = (proto.graph.node[0], branches["then_branch"].node[0], proto.functions[0].node[0])
    for number, node in enumerate(nodes):
        node.attribute.append(helper.make_attribute("value", weight(f"c{number}")))
    return proto


@pytest.mark.parametrize("store", ["raw", "raw, said to be inside", "typed"])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT64])
def test_weights_are_passed_over_wherever_they_are(kind: int, store: str, tmp_path: Path) -> None:
    proto, path = everywhere(kind, store), tmp_path / "m.onnx"
    onnx.save(proto, path)
    light, weights = wire.read(path)
    assert weights is not None and outcome(path) == outcome(proto) and isinstance(outcome(path), bytes)
    passed = light.SerializeToString().count(weights.token.encode())
    packed = store != "typed" or kind in (TensorProto.FLOAT, TensorProto.DOUBLE)
    assert passed == (4 if packed else 0)


def test_data_that_do_not_fit_are_refused_as_ever(tmp_path: Path) -> None:
    proto = models.cnn()
    tensor = numpy_helper.from_array(np.zeros(64, np.float32), "other")
    tensor.raw_data = tensor.raw_data[:-4]
    proto.graph.initializer.append(tensor)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    assert "63" in outcome(tmp_path / "m.onnx") or "252" in outcome(tmp_path / "m.onnx")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(models.cnn(), path)
    light, weights = wire.read(path)
    path.write_bytes(path.read_bytes() + b"\0")
    stated = next(one for one in light.graph.initializer if one.data_location == TensorProto.EXTERNAL)
    with pytest.raises(ModelError, match="changed while it was read"):
        weights.read(ir.serde.deserialize_tensor(stated), "w")


def file_of_a_model(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    onnx.save(models.cnn(), path)
    return path


def test_a_weight_that_stays_in_the_file_is_read_anew_and_aligned(tmp_path: Path) -> None:
    path = file_of_a_model(tmp_path)
    whole, left = load(path), load(path, in_place=True)
    kept = [value for value in left.graph.initializers.values() if isinstance(value.const_value, InFile)]
    assert len(kept) > 1
    for value in kept:
        tensor, expected = value.const_value, whole.graph.initializers[str(value.name)].const_value
        first, second = tensor.numpy(), tensor.numpy()
        assert first.tobytes() == expected.tobytes() == tensor.tobytes() and first.dtype == expected.numpy().dtype
        assert first.flags.aligned and first.base is None and not first.flags.writeable
        assert not np.shares_memory(first, second)
        with (tmp_path / "out").open("w+b") as file:
            tensor.tofile(file)
            assert file.seek(0) == 0 and file.read() == expected.tobytes()
        other = tensor_alias(tensor, "other")
        assert isinstance(other, InFile) and other.name == "other" and other.tobytes() == expected.tobytes()


def first_kept(model: ir.Model) -> ir.TensorProtocol:
    tensors = (one.const_value for one in model.graph.initializers.values())
    return next(one for one in tensors if isinstance(one, InFile))


def rewrite(path: Path) -> None:
    """The same length, other weights, as if somebody had trained on."""
    before = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes().replace(b"\x3d", b"\x3e"))
    os.utime(path, ns=(before + 1, before + 1))


@pytest.mark.skipif(os.name == "nt", reason="a file that is mapped cannot be replaced there")
@pytest.mark.parametrize("change", [rewrite, Path.unlink])
@pytest.mark.parametrize("what", ["values", "session", "inference"])
def test_a_file_that_changes_later_is_refused_as_well(
    tmp_path: Path, what: str, change: Callable[[Path], None]
) -> None:
    path = file_of_a_model(tmp_path)
    model, feed = load(path, in_place=True), models.feeds(models.cnn())
    runner = Runner(model, [str(model.graph.outputs[0].name)])
    runner.run(feed)
    change(path)
    with pytest.raises(ModelError, match="changed while it was read"):
        if what == "values":
            next(
                one for one in model.graph.initializers.values() if isinstance(one.const_value, InFile)
            ).const_value.numpy()
        elif what == "session":
            open_session(model)
        else:
            runner.run(feed)


def test_a_file_that_gets_another_number_is_the_same_one(tmp_path: Path) -> None:
    """As on some mounts of remote storage, minutes later."""
    path = file_of_a_model(tmp_path)
    tensor = first_kept(load(path, in_place=True))
    before, number = tensor.tobytes(), path.stat().st_ino
    shutil.copy2(path, tmp_path / "copy")
    os.replace(tmp_path / "copy", path)
    assert path.stat().st_ino != number and tensor.tobytes() == before


def test_a_process_may_go_to_another_folder_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of_a_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = load(Path(path.name), in_place=True)
    monkeypatch.chdir("/")
    assert first_kept(model).tobytes() == first_kept(load(path, in_place=True)).tobytes()
    Runner(model, [str(model.graph.outputs[0].name)]).run(models.feeds(models.cnn()))


@pytest.mark.skipif(os.name == "nt", reason="a file that is mapped cannot be replaced there")
@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "U16S8_AAWS"])
def test_a_job_of_a_file_that_changes_writes_nothing(tmp_path: Path, preset: str) -> None:
    path = file_of_a_model(tmp_path)

    def samples() -> Iterator[dict[str, np.ndarray]]:
        yield models.feeds(models.cnn())
        rewrite(path)
        yield models.feeds(models.cnn())

    with pytest.raises(ModelError, match="changed while it was read"):
        ModelQuantizer(QConfig.get_default_config(preset)).quantize_model(path, tmp_path / "q.onnx", samples())
    assert sorted(one.name for one in tmp_path.iterdir()) == ["m.onnx"]


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "BF16", "INT8_CNN_DEFAULT", "U16S8_AAWS", "UINT8_DYNAMIC_QUANT"])
def test_a_job_reads_a_weight_a_few_times(tmp_path: Path, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only asks whether there is a weight, or for its shape, reads nothing: passes ask that often."""
    text = "g (float[1,32,8,8] x) => (float[1,64] y) { a = Conv <pads = [1,1,1,1]> (x, w) b = Relu (a)" + (
        "c = Conv (b, v) d = Relu (c) e = GlobalAveragePool (d) f = Flatten (e) y = Gemm <transB = 1> (f, u) }"
    )
    weights = {"w": models.normal(64, 32, 3, 3), "v": models.normal(64, 64, 1, 1), "u": models.normal(64, 64)}
    proto, path, reads = models.model(text, weights), tmp_path / "m.onnx", Counter[str]()
    onnx.save(proto, path)
    array = wire.Weights.array

    def counted(self: wire.Weights, tensor: ir.ExternalTensor) -> np.ndarray:
        reads[str(tensor.name)] += 1
        return array(self, tensor)

    monkeypatch.setattr(wire.Weights, "array", counted)
    data = (models.feeds(proto) for _ in range(2))
    ModelQuantizer(QConfig.get_default_config(preset)).quantize_model(path, tmp_path / "q.onnx", data)
    assert set(reads) == set(weights) and max(reads.values()) <= 5, reads


def test_damaged_files_end_as_the_parser_says(tmp_path: Path) -> None:
    wholes = [one.SerializeToString() for one in (models.cnn(), everywhere(TensorProto.FLOAT, "typed"))]
    draw = np.random.default_rng(0)
    path, met = tmp_path / "m.onnx", set()
    for turn in range(300):
        whole = wholes[turn % 2]
        data = bytearray(whole if turn % 3 else whole[: draw.integers(1, len(whole))])
        for place in draw.integers(0, len(data), draw.integers(0, 4)):
            data[place] = draw.integers(0, 256)
        path.write_bytes(data)
        try:
            proto = onnx.load_model_from_string(bytes(data))
        except (DecodeError, ValueError):
            met.add("broken")
            with pytest.raises(ModelError):
                load(path)
            continue
        expected = outcome(proto)
        met.add(type(expected).__name__)
        if isinstance(expected, bytes):
            assert outcome(path) == expected
        else:
            with pytest.raises(ModelError):
                load(path)
    assert met == {"broken", "bytes", "str"}


def wide() -> onnx.ModelProto:
    """A model with a large weight of every width."""
    proto = models.cnn()
    for kind in (TensorProto.FLOAT, TensorProto.INT4, TensorProto.FLOAT8E5M2, TensorProto.BFLOAT16, TensorProto.BOOL):
        proto.graph.initializer.append(helper.make_tensor(f"kind{kind}", kind, [3, 1000], np.arange(3000) % 2))
    return proto


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("make", [models.cnn, wide, lambda: everywhere(TensorProto.DOUBLE, "raw")])
def test_a_file_is_what_the_serializer_writes(make: Any, external: bool, lazy: bool, tmp_path: Path) -> None:
    onnx.save(make(), tmp_path / "m.onnx", save_as_external_data=external, location="m.data", size_threshold=100)
    for given in (make(), tmp_path / "m.onnx"):
        model = load(given)
        for value in model.graph.initializers.values() if lazy else ():
            held = value.const_value
            value.const_value = ir.LazyTensor(lambda held=held: held, held.dtype, held.shape, name=held.name)
        for value in model.graph.initializers.values():  # fields before and behind the data
            value.const_value.doc_string, value.const_value.metadata_props["key"] = "said", "more"
        save(model, tmp_path / "written.onnx")
        assert (tmp_path / "written.onnx").read_bytes() == to_proto(model).SerializeToString()


@pytest.mark.parametrize("store", ["typed", "raw"])
def test_weights_of_nodes_and_bodies_run_from_where_they_are(store: str, tmp_path: Path) -> None:
    onnx.save(everywhere(TensorProto.DOUBLE, store), tmp_path / "m.onnx")
    for branch in (True, False):
        feed = {"x": np.arange(64.0), "c": np.array(branch)}
        mine, plain = (Runner(load(tmp_path / "m.onnx", one), ["y"]).run(feed).values["y"] for one in (True, False))
        np.testing.assert_array_equal(mine, plain)


@pytest.mark.parametrize("shift", range(4))
def test_weights_that_stay_in_the_file_are_read_there(shift: int, tmp_path: Path) -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [64, 32], np.random.default_rng(0).standard_normal(2048))
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[2, 64] x) => (float[2, 32] y) { y = MatMul (x, w) }'
    )
    proto.graph.initializer.append(weight)
    proto.producer_name = "p" * (4 + shift)  # moves all that follows
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    model = load(tmp_path / "m.onnx", in_place=True)
    held = model.graph.initializers["w"].const_value
    assert isinstance(held, ir.ExternalTensor) and Path(held.path) == tmp_path / "m.onnx"
    x = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    expected = x @ numpy_helper.to_array(weight)
    np.testing.assert_allclose(Runner(model, ["y"]).run({"x": x}).values["y"], expected, rtol=1e-5, atol=1e-5)


def test_what_a_protobuf_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LIMIT", 5000)
    with pytest.raises(ModelError, match=r"does not fit into one file .*external data"):
        save(load(wide()), tmp_path / "written.onnx")
    assert not list(tmp_path.iterdir())


MANY = {
    "of the graph": "g (float[1] x) => (float[1] y) { ? }",
    "of a branch": """g (float[1] x, bool c) => (float[1] y) { y = If (c)
        <then_branch = a () => (float[1] u) { u = Neg (x) }, else_branch = b () => (float[1] y) { ? }> }""",
    "of a function": "g (float[1] x) => (float[1] y) { y = own.f (x) }",
}


@pytest.mark.parametrize("place", MANY)
def test_nodes_are_counted_before_the_parser_makes_objects_of_them(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they are: beside those of the chain there are up to two others."""
    count = 58
    chain = " ".join(f"t{k} = Relu ({f't{k - 1}' if k else 'x'})" for k in range(count - 1))
    chain += f" y = Relu (t{count - 2})"
    text = f'<ir_version: 8, opset_import: ["" : 17, "own" : 1]> {MANY[place].replace("?", chain)}'
    if place == "of a function":
        text += f' <domain: "own", opset_import: ["" : 17]> f (x) => (y) {{ {chain} }}'
    proto = onnx.parser.parse_model(text)
    onnx.save(proto, tmp_path / "m.onnx")
    most = {"of the graph": count, "of a branch": count + 2, "of a function": count + 1}[place]
    for limit, told in ((most, False), (most - 1, True)):
        monkeypatch.setattr(wire, "NODES", limit)
        with pytest.raises(ModelError, match=f"has more than {limit} nodes") if told else nullcontext():
            wire.read(tmp_path / "m.onnx")
