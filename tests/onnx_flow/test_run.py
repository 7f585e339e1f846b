"""Inner tensors of a model against an unoptimized session, and the errors of loading and running."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper
from tests.onnx_flow import models

from quark.errors import ConfigError, DataError, ModelError
from quark.onnx.graph import run
from quark.onnx.graph.model import load
from quark.onnx.graph.run import Runner
from quark.onnx.graph.session import Runtime
from quark.report.process import present

INNER = ["c1", "r1", "p1", "a2", "r2"]


def reference(proto: onnx.ModelProto, feed: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
    """The same tensors from an unoptimized session."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(proto)
    del exposed.graph.output[:]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(exposed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, feed), strict=True))


def typed(graph: str, **others: object) -> ir.Model:
    """A model with inferred types, as the flow hands it over."""
    return ir.from_proto(onnx.shape_inference.infer_shapes(models.model(graph, **others)))


@pytest.fixture
def network() -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(models.cnn())


def test_tensors_are_those_of_the_unoptimized_graph(network: onnx.ModelProto) -> None:
    feed = models.feeds(network)
    found = Runner(ir.from_proto(network), INNER).run(feed)
    expected = reference(network, feed, INNER)
    assert list(found.values) == INNER and not found.extremes
    models.assert_close(list(found.values.values()), list(expected.values()), 1e-5)


def test_extremes_are_those_of_the_tensors(network: onnx.ModelProto) -> None:
    feed = models.feeds(network)
    found = Runner(ir.from_proto(network), ["r1"], INNER).run(feed)
    expected = reference(network, feed, INNER)
    assert list(found.values) == ["r1"], "a tensor that is wanted whole is not reduced as well"
    for name in set(INNER) - {"r1"}:
        got = found.extremes[name]
        np.testing.assert_allclose([got.lo, got.hi], [expected[name].min(), expected[name].max()], atol=1e-4)
        assert not got.has_nan


def test_graph_inputs_come_from_the_feed_and_need_no_session(network: onnx.ModelProto) -> None:
    feed = models.feeds(network)
    whole = Runner(ir.from_proto(network), ["x"]).run(feed)
    assert whole.values["x"] is feed["x"]
    extremes = Runner(ir.from_proto(network), extremes=["x", "r1"]).run(feed).extremes
    assert (extremes["x"].lo, extremes["x"].hi) == (feed["x"].min(), feed["x"].max())
    assert extremes["r1"].lo == 0


def test_the_model_comes_back_unchanged(network: onnx.ModelProto) -> None:
    model = ir.from_proto(network)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    Runner(model, ["r1"], ["c1"]).run(models.feeds(network))
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_what_nobody_asked_for_is_not_computed() -> None:
    model = typed("g (float[2] x) => (float[2] y) { r = Relu (x)  i = Cast <to = 7> (r)  y = Gather (r, i) }")
    found = Runner(model, ["r"]).run({"x": np.float32([5, 5])})
    assert found.values["r"].tolist() == [5, 5], "the Gather behind it would be out of bounds"


def test_an_input_that_no_observed_tensor_needs_may_still_be_fed() -> None:
    model = typed("g (float[2] x, float[2] z) => (float[2] y) { r = Relu (x)  y = Add (r, z) }")
    feed = {"x": np.float32([-1, 2]), "z": np.float32([0, 0])}
    assert Runner(model, ["r"]).run(feed).values["r"].tolist() == [0, 2]


@pytest.mark.parametrize("kind", ["float16", "double", "float"])
def test_extremes_of_other_float_types(kind: str) -> None:
    model = typed(f"g ({kind}[N] x) => ({kind}[N] y) {{ y = Neg (x) }}")
    x = np.array([1.5, -2.5], {"float16": np.float16, "double": np.float64, "float": np.float32}[kind])
    got = Runner(model, extremes=["y"]).run({"x": x}).extremes["y"]
    assert (got.lo, got.hi) == (-1.5, 2.5)


@pytest.mark.parametrize("place", [0, 5, 17, 99])
def test_a_nan_is_seen_wherever_it_is(place: int) -> None:
    model = typed("g (float[N] x) => (float[N] y) { y = Sqrt (x) }")
    x = np.arange(100, dtype=np.float32)
    x[place] = -1
    assert Runner(model, extremes=["y"]).run({"x": x}).extremes["y"].has_nan
    assert not Runner(model, extremes=["y"]).run({"x": np.abs(x)}).extremes["y"].has_nan


def test_an_empty_tensor_has_no_extremes() -> None:
    model = typed("g (float[N] x) => (float[N] y) { y = Relu (x) }")
    got = Runner(model, extremes=["y"]).run({"x": np.empty(0, np.float32)}).extremes["y"]
    assert got.lo > got.hi and not got.has_nan


def test_operator_sets_without_isnan_are_reduced_here() -> None:
    model = typed("g (float[N] x) => (float[N] y) { y = Sqrt (x) }", opset=7, ir_version=3)
    runner = Runner(model, extremes=["y"])
    got = runner.run({"x": np.float32([4, 9])})
    assert (got.extremes["y"].lo, got.extremes["y"].hi) == (2, 3) and not got.values
    assert runner.run({"x": np.float32([4, -9])}).extremes["y"].has_nan


def test_names_that_are_taken_already_do_not_clash() -> None:
    model = typed("g (float[N] x) => (float[N] y_ReduceMin) { y = Neg (x)  y_ReduceMin = Relu (y) }")
    found = Runner(model, ["y_ReduceMin"], ["y"]).run({"x": np.float32([-1, 2])})
    assert found.values["y_ReduceMin"].tolist() == [1, 0]
    assert (found.extremes["y"].lo, found.extremes["y"].hi) == (-2, 1)


def test_weights_in_external_data_are_found_large_and_small(network: onnx.ModelProto, tmp_path: Path) -> None:
    feed = models.feeds(network)
    expected = reference(network, feed, INNER)
    onnx.save(network, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    found = Runner(load(tmp_path / "m.onnx"), INNER).run(feed)
    models.assert_close(list(found.values.values()), list(expected.values()), 1e-5)


# ---- errors ----------------------------------------------------------------------------------------------------------


def custom(domain: str) -> ir.Model:
    """Relu, then an operator that nobody defines."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Blend", ["r"], ["y"], name="blend_7", domain=domain),
    ]
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", sides[:1], sides[1:])
    imports = [helper.make_opsetid("", 13), helper.make_opsetid(domain, 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=imports, ir_version=8))


def test_an_unknown_operator_is_named_with_the_remedy() -> None:
    message = r"'blend_7' .*operator 'Blend' of the domain 'my\.ops'.*does not have.*UserCustomOpLibPath"
    with pytest.raises(ModelError, match=message):
        Runner(custom("my.ops"), ["y"])


def test_an_unknown_operator_of_a_known_domain_has_the_reason_on_one_line() -> None:
    with pytest.raises(ModelError, match=r"Blend") as caught:
        Runner(custom("com.microsoft"), ["y"])
    assert "\n" not in str(caught.value) and "[ONNXRuntimeError]" not in str(caught.value)


def test_a_custom_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"UserCustomOpLibPath: there is no '.*libops\.so'"):
        Runner(custom("my.ops"), ["y"], runtime=Runtime(libraries="nowhere/libops.so"))
    (tmp_path / "libops.so").write_bytes(b"no library")
    with pytest.raises(ModelError, match=r"UserCustomOpLibPath: '.*libops\.so' cannot be loaded"):
        Runner(custom("my.ops"), ["y"], runtime=Runtime(libraries=str(tmp_path / "libops.so")))


def test_a_model_that_the_runtime_refuses_has_its_reason_on_one_line() -> None:
    model = ir.from_proto(models.model("g (float[2] x) => (float[2] y) { y = Concat (x, x) }"))
    with pytest.raises(ModelError, match="axis") as caught:
        Runner(model, ["y"])
    assert "\n" not in str(caught.value)


def test_tensors_that_do_not_exist_are_named(network: onnx.ModelProto) -> None:
    with pytest.raises(ModelError, match=r"no tensor 'c_1' in its main graph\. Did you mean 'c1'\?"):
        Runner(ir.from_proto(network), ["c_1"])
    with pytest.raises(ModelError, match="the tensor 'w1' is a constant"):
        Runner(ir.from_proto(network), extremes=["w1"])


def test_an_unknown_provider_is_named(network: onnx.ModelProto) -> None:
    with pytest.raises(ConfigError, match=r"'CPUExecutionProvder'\. Did you mean 'CPUExecutionProvider'"):
        Runner(ir.from_proto(network), ["r1"], runtime=Runtime(["CPUExecutionProvder"]))


def test_a_sample_that_the_model_cannot_run_on_is_a_data_error() -> None:
    model = typed("g (float[A] x, float[B] z) => (float[C] y) { y = Add (x, z) }")
    with pytest.raises(DataError, match=r"'x' float32 \[2\], 'z' float32 \[3\]\): ") as caught:
        Runner(model, ["y"]).run({"x": np.zeros(2, np.float32), "z": np.zeros(3, np.float32)})
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not present() or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs Linux with glibc")
def test_what_is_freed_goes_back_to_the_system_once_there_is_much_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks between blocks that stay, which glibc keeps; a small model does not wait until the heap is walked."""
    blocks = [np.ones(1 << 13, np.uint8) for _ in range(8192)]
    monkeypatch.setitem(run._trimmed, "size", 0)
    before = present()
    del blocks[:-1:2], blocks[:-1:2]
    run.trim_heap()
    assert present() < before - (1 << 24)
    monkeypatch.setattr(run.ctypes, "CDLL", lambda _: pytest.fail("the heap is walked"))
    more = np.ones(run.GROWTH // 2, np.uint8)
    run.trim_heap()
    assert more.all()


def test_the_log_stays_silent(capfd: pytest.CaptureFixture[str]) -> None:
    make: list[Callable[[], object]] = [lambda: Runner(custom("my.ops"), ["y"])]
    model = typed("g (float[A] x, float[B] z) => (float[C] y) { y = Add (x, z) }")
    make.append(lambda: Runner(model, ["y"]).run({"x": np.zeros(2, np.float32), "z": np.zeros(3, np.float32)}))
    for action in make:
        with pytest.raises((ModelError, DataError)):
            action()
    assert capfd.readouterr() == ("", "")


def test_weights_that_are_to_stay_as_they_are_do() -> None:
    """ONNX Runtime rounds float weights between DequantizeLinear and QuantizeLinear to int8 where nobody stops it."""
    graph = """
    net (float[1, 3, 6, 6] x) => (float[1, 4, 4, 4] y) {
        q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z)
        c = Conv <kernel_shape = [3, 3]> (d, w) r = Relu (c)
        p = QuantizeLinear (r, t, z) y = DequantizeLinear (p, t, z)
    }"""
    weights = {"w": models.normal(4, 3, 3, 3), "s": np.float32(0.02), "t": np.float32(1e-3), "z": np.int8(0)}
    weights["w"][0] *= 50
    proto = models.model(graph, weights)
    feed = {"x": models.normal(1, 3, 6, 6, seed=3)}
    found = Runner(ir.from_proto(proto), ["y"], runtime=Runtime(as_given=True)).run(feed).values["y"]
    np.testing.assert_allclose(found, reference(proto, feed, ["y"])["y"], atol=1.1e-3)
