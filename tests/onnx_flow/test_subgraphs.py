"""Bodies of If and Loop are quantized on the data that enters them, and the model still answers alike."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.onnx import Config, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, get_default_config
from quark.onnx.quantization.config.spec import CalibMethod

QUIET = {"PrintSummary": False, "EnableSubgraph": True}


def quantized(proto: onnx.ModelProto, feeds: list[dict[str, np.ndarray]], **options: object) -> onnx.ModelProto:
    spec = Int8Spec(calibration_method=CalibMethod.MinMax)
    config = QConfig(QLayerConfig(input_tensors=spec, weight=spec), extra_options={**QUIET, **options})
    result = ModelQuantizer(config).quantize_model(proto, None, feeds)
    assert result is not None
    onnx.checker.check_model(result, full_check=True)
    return result


def bodies(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    def inside(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    yield attribute.g
                    yield from inside(attribute.g)

    yield from inside(proto.graph)


def kinds(graph: onnx.GraphProto) -> list[str]:
    return [node.op_type for node in graph.node]


def sqnr(reference: np.ndarray, found: np.ndarray) -> float:
    return float(10 * np.log10(max((reference**2).sum(), 1e-20) / max(((reference - found) ** 2).sum(), 1e-30)))


def branch_feeds(flags: list[bool]) -> list[dict[str, np.ndarray]]:
    return [{"x": models.normal(2, 4, seed=k), "flag": np.array(flag)} for k, flag in enumerate(flags)]


def test_both_branches_are_quantized_on_the_samples_that_take_them() -> None:
    proto, feeds = models.branching(), branch_feeds([True, False, True, False])
    result = quantized(proto, feeds)
    then, other = bodies(result)
    for body in (then, other):
        assert "QuantizeLinear" in kinds(body)
        assert any(tensor.data_type == onnx.TensorProto.INT8 for tensor in body.initializer)
    for feed in feeds:
        assert sqnr(models.run(proto, feed)[0], models.run(result, feed)[0]) > 25


def test_bodies_stay_float_without_the_option() -> None:
    proto = models.branching()
    result = quantized(proto, branch_feeds([True, False]), EnableSubgraph=False, ForceQuantizeNoInputCheck=True)
    assert all("QuantizeLinear" not in kinds(body) for body in bodies(result))


def test_a_branch_that_no_sample_takes_stays_float() -> None:
    proto = models.branching()
    result = quantized(proto, branch_feeds([True, True]))
    then, other = bodies(result)
    assert "QuantizeLinear" in kinds(then) and kinds(other) == ["Constant", "MatMul", "Relu"]
    feed = {"x": models.normal(2, 4, seed=9), "flag": np.array(False)}
    assert sqnr(models.run(proto, feed)[0], models.run(result, feed)[0]) > 25


def test_bodies_inside_a_branch_that_no_sample_takes_stay_float() -> None:
    graph = """
    nested (float[2, 4] x, bool flag) => (float[2, 4] y) {
        m = MatMul (x, w)
        y = If (flag) <
            then_branch = then () => (float[2, 4] t) { t = Neg (m) },
            else_branch = other () => (float[2, 4] o) {
                k = MatMul (m, w)
                big = Constant <value = bool {1}> ()
                o = If (big) <
                    then_branch = inner () => (float[2, 4] u) { u = MatMul (k, w) },
                    else_branch = never () => (float[2, 4] v) { v = MatMul (m, w) }
                >
            }
        >
    }"""
    proto = models.model(graph, {"w": models.normal(4, 4)})
    result = quantized(proto, branch_feeds([True, True]))
    assert "QuantizeLinear" in {node.op_type for node in result.graph.node}
    assert all("QuantizeLinear" not in kinds(body) for body in bodies(result))
    feed = {**branch_feeds([True])[0], "flag": np.array(False)}
    assert sqnr(models.run(proto, feed)[0], models.run(result, feed)[0]) > 20


def loop(opset: int = 13) -> onnx.ModelProto:
    """Three iterations of state = tanh(state W + x) with an outer weight and an outer activation; scans the states."""
    graph = """
    loop (float[2, 4] x) => (float[2, 4] y, float[n, 2, 4] states) {
        r = Relu (x)
        y, states = Loop (count, go, x) <
            body = step (int64 i, bool c, float[2, 4] s) => (bool again, float[2, 4] t, float[2, 4] seen) {
                again = Identity (c)
                m = MatMul (s, w)
                a = Add (m, r)
                t = Tanh (a)
                seen = Mul (t, a)
            }
        >
    }"""
    weights = {"w": models.normal(4, 4), "count": np.array(3), "go": np.array(True)}
    return models.model(graph, weights, opset)


def test_a_loop_is_calibrated_on_every_iteration() -> None:
    proto = loop()
    feeds = [{"x": models.normal(2, 4, seed=k)} for k in range(6)]
    result = quantized(proto, feeds)
    (body,) = bodies(result)
    assert "QuantizeLinear" in kinds(body) and "w" not in {tensor.name for tensor in result.graph.initializer}
    for feed in feeds:
        for reference, found in zip(models.run(proto, feed), models.run(result, feed), strict=True):
            assert sqnr(reference, found) > 25


@pytest.mark.parametrize("state", ["float[2, 4] s", "float[k, 4] s", "float[2, 8] s", "float[8] s", "float[2, 2, 2] s"])
@pytest.mark.parametrize("number", ["int64 i", "int64[1] i"])
def test_a_body_may_declare_other_shapes_than_it_gets(number: str, state: str) -> None:
    """Converters write the number of the iteration as int64[1], and shapes of states that few iterations have: ONNX
    Runtime reads what comes."""
    text = """
    loop (float[2, 4] x, int64[n] size) => (float[m, 4] y) {
        first = Reshape (x, size)
        y = Loop (count, go, first) <
            body = step (NUMBER, bool c, STATE) => (bool again, float[p, 4] t) {
                again = Identity (c)
                rows = Reshape (s, four)
                h = MatMul (rows, w)
                a = Tanh (h)
                t = Concat <axis = 0> (a, rows)
            }
        >
    }""".replace("NUMBER", number).replace("STATE", state)
    constants = {"four": np.array([-1, 4]), "count": np.array(3), "go": np.array(True)}
    proto = models.model(text, {"w": models.normal(4, 4), **constants})
    feeds = [{"x": models.normal(2, 4, seed=k), "size": np.array([2, 4])} for k in range(6)]
    result = quantized(proto, feeds)
    (body,) = bodies(result)
    assert "QuantizeLinear" in kinds(body)
    for feed in feeds:
        (reference,), (found,) = models.run(proto, feed), models.run(result, feed)
        assert reference.shape == found.shape == (16, 4) and sqnr(reference, found) > 25


SCANS = {"forwards": "", "backwards": ", scan_input_directions = [1, 0]", "last axis": ", scan_input_axes = [2, 0]"}


@pytest.mark.parametrize("preset", ["A8W8", "A8W8_CPU", "XINT8", "UINT8_DYNAMIC_QUANT"])
@pytest.mark.parametrize("way", SCANS)
def test_a_scan_is_calibrated_on_every_step(way: str, preset: str) -> None:
    """The steps grow, and each of them is quantized with what it is handed: the way of the Scan decides which."""
    shape = "2, 64, 5" if way == "last axis" else "5, 2, 64"
    graph = f"""
    g (float[{shape}] x, float[5, 2, 64] z) => (float[2, 64] last, float[5, 2, 64] y) {{
        r = Relu (z)
        last, y = Scan <num_scan_inputs = 2{SCANS[way]},
            body = step (float[2, 64] s, float[2, 64] one, float[2, 64] other) => (float[2, 64] t, float[2, 64] seen) {{
                m = MatMul (s, w)
                n = MatMul (one, v)
                a = Add (m, n)
                b = Add (a, other)
                t = Tanh (b)
                seen = MatMul (t, w)
            }}
        > (start, x, r)
    }}"""
    weights = {
        "w": models.normal(64, 64, scale=0.1),
        "v": models.normal(64, 64, seed=1),
        "start": np.zeros((2, 64), np.float32),
    }
    proto = models.model(graph, weights, 17)
    steps = np.arange(5, dtype=np.float32).reshape((1, 1, 5) if way == "last axis" else (5, 1, 1))
    sizes = [int(size) for size in shape.split(",")]
    feeds = [
        {"x": steps * models.normal(*sizes, seed=k) / 10, "z": models.normal(5, 2, 64, seed=k + 9)} for k in range(4)
    ]
    config = get_default_config(preset)
    config.extra_options.update(PrintSummary=False, FloatWhereFaster=False)
    made = ModelQuantizer(Config(global_quant_config=config)).run(proto, None, feeds).proto
    assert made is not None and made.ByteSize() < proto.ByteSize() / 2
    for reference, found in zip(models.run(proto, feeds[0]), models.run(made, feeds[0]), strict=True):
        assert sqnr(reference, found) > 20


@pytest.mark.parametrize("one", ["float[2, 4] one", "float[4, 2] one", "float[8] one", "float[k, 4] one"])
def test_a_scan_may_declare_other_shapes_than_it_gets(one: str) -> None:
    text = """
    scan (float[5, 2, 4] x, int64[n] size) => (float[2, 4] last, float[5, 2, 4] y) {
        steps = Reshape (x, size)
        last, y = Scan <num_scan_inputs = 1,
            body = step (float[2, 4] s, ONE) => (float[2, 4] t, float[2, 4] seen) {
                rows = Reshape (one, four)
                h = MatMul (rows, w)
                a = Add (h, s)
                t = Tanh (a)
                seen = Identity (a)
            }
        > (start, steps)
    }""".replace("ONE", one)
    constants = {"four": np.array([-1, 4]), "start": np.zeros((2, 4), np.float32)}
    proto = models.model(text, {"w": models.normal(4, 4), **constants}, 17)
    feeds = [{"x": models.normal(5, 2, 4, seed=k), "size": np.array([5, 2, 4])} for k in range(4)]
    result = quantized(proto, feeds)
    (body,) = bodies(result)
    assert "QuantizeLinear" in kinds(body)
    for reference, found in zip(models.run(proto, feeds[0]), models.run(result, feeds[0]), strict=True):
        assert sqnr(reference, found) > 20


def test_a_body_inside_a_body() -> None:
    graph = """
    nested (float[2, 4] x, bool flag) => (float[2, 4] y) {
        y = If (flag) <
            then_branch = then () => (float[2, 4] t) {
                k = MatMul (x, w)
                big = Constant <value = bool {1}> ()
                t = If (big) <
                    then_branch = inner () => (float[2, 4] u) { u = MatMul (k, w) },
                    else_branch = never () => (float[2, 4] v) { v = Neg (k) }
                >
            },
            else_branch = other () => (float[2, 4] o) { o = Neg (x) }
        >
    }"""
    proto, feeds = models.model(graph, {"w": models.normal(4, 4)}), branch_feeds([True, False, True])
    result = quantized(proto, feeds)
    inner = next(body for body in bodies(result) if "MatMul" in kinds(body) and "If" not in kinds(body))
    assert "QuantizeLinear" in kinds(inner)
    for feed in feeds:
        assert sqnr(models.run(proto, feed)[0], models.run(result, feed)[0]) > 25


def test_rules_name_nodes_of_bodies() -> None:
    spec = Int8Spec(calibration_method=CalibMethod.MinMax)
    config = QConfig(QLayerConfig(input_tensors=spec, weight=spec), exclude=["t"], extra_options=QUIET)
    result = ModelQuantizer(config).quantize_model(models.branching(), None, branch_feeds([True, False]))
    then, other = bodies(result)
    assert "QuantizeLinear" not in kinds(then) and "QuantizeLinear" in kinds(other)


@pytest.mark.parametrize(("tensor", "place"), [("r", "main"), ("t", "then_branch"), ("o", "else_branch")])
def test_overrides_name_tensors_of_bodies_and_around_them(tensor: str, place: str) -> None:
    options = {**QUIET, "TensorQuantOverrides": {tensor: [{"quant_type": "QInt16"}]}, "ForceQuantizeNoInputCheck": True}
    config = QConfig(extra_options=options)
    plan = ModelQuantizer(config).run(models.branching(21), None, branch_feeds([True, False])).plan
    wide = [name for name, one in plan.tensors.items() if one.spec.format == "int16"]
    assert {name.split("/")[-1] for name in wide} == {tensor}
    assert any((f"/{place}/" if place != "main" else tensor) in name for name in wide)


def test_modes_without_data_quantize_bodies_too() -> None:
    proto = models.branching()
    config = get_default_config("UINT8_DYNAMIC_QUANT")
    config.extra_options.update(PrintSummary=False)
    result = ModelQuantizer(Config(config)).quantize_model(proto, None)
    assert all("MatMulInteger" in kinds(body) for body in bodies(result))
    for feed in branch_feeds([True, False]):
        assert sqnr(models.run(proto, feed)[0], models.run(result, feed)[0]) > 25


def test_bodies_with_layers_are_quantized_unasked() -> None:
    """The whole network may be in an If."""
    proto, feeds = models.branching(), branch_feeds([True, False])
    config = QConfig(extra_options={"PrintSummary": False})
    result = ModelQuantizer(config).quantize_model(proto, None, feeds)
    assert all("QuantizeLinear" in kinds(body) for body in bodies(result))


def test_formats_that_travel_as_functions() -> None:
    config = get_default_config("BFP16")
    config.extra_options.update(QUIET)
    proto, feeds = models.branching(), branch_feeds([True, False])
    result = ModelQuantizer(Config(config)).quantize_model(proto, None, feeds)
    assert all("BFPQuantizeDequantize" in kinds(body) for body in bodies(result))
    for feed in feeds:
        assert sqnr(models.run(proto, feed)[0], models.run(result, feed)[0]) > 25


def test_voice_activity_detection() -> None:
    path = models.REAL_MODELS / "silero_vad_16k_op15.onnx"
    if not path.exists():
        pytest.skip("no shared models beside the repository")
    proto = onnx.load(path)
    feeds = [models.real_feeds("silero_vad_16k_op15", proto)]
    plain, result = quantized(proto, feeds, EnableSubgraph=False), quantized(proto, feeds)
    assert 2 * result.ByteSize() < proto.ByteSize() and 1.5 * result.ByteSize() < plain.ByteSize()
    for reference, found in zip(models.run(plain, feeds[0]), models.run(result, feeds[0]), strict=True):
        assert sqnr(reference, found) > 30  # the LSTM in a body has weights in 8 bits and computes in float
