"""The comparison of two models against distances computed by hand, on a Q/DQ model written by hand."""

from __future__ import annotations

import math
import re
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.onnx_flow import models

from quark.errors import DataError, ModelError
from quark.measure.distance import Distance
from quark.onnx import compare as comparing
from quark.onnx import latency
from quark.onnx.compare import ENDS, Checks, CodeRange, MovedOutput, compare
from quark.onnx.graph import budget
from quark.onnx.latency import FEWEST
from quark.report.verdict import runtime_line

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((6, 5)).astype(np.float32)
SAMPLES = [{"x": RNG.standard_normal((3, 6)).astype(np.float32)} for _ in range(4)]
SCALE, ZERO = 0.01, 10  # of the tensor "h": uint8 codes 0..255 hold -0.1..2.45, which clips


def model(quantized: bool) -> onnx.ModelProto:
    """``y = relu(x @ WEIGHT) * 2``; the quantized form has a Q/DQ pair on ``h``, the output of the Relu."""
    grid = {"s": np.array(SCALE, np.float32), "z": np.array(ZERO, np.uint8)}
    constants = {"w": WEIGHT, "two": np.array(2, np.float32), **grid}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"], "matmul"), helper.make_node("Relu", ["m"], ["h"], "relu")]
    if quantized:
        nodes += [
            helper.make_node("QuantizeLinear", ["h", "s", "z"], ["h_q"]),
            helper.make_node("DequantizeLinear", ["h_q", "s", "z"], ["h_dq"]),
        ]
    nodes.append(helper.make_node("Mul", ["h_dq" if quantized else "h", "two"], ["y"], "double"))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 5])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def hidden() -> tuple[np.ndarray, np.ndarray]:
    """Float and dequantized values of ``h`` over all samples."""
    x = np.maximum(np.concatenate([feed["x"] for feed in SAMPLES]) @ WEIGHT, 0).astype(np.float64)
    codes = np.clip(np.rint(x / SCALE) + ZERO, 0, 255)
    return x, (codes - ZERO) * SCALE


def test_end_to_end() -> None:
    found = compare(model(False), model(True), SAMPLES)
    x, y = hidden()
    output = found.outputs["y"]
    assert found.samples == 4
    assert output.sqnr == pytest.approx(10 * math.log10(np.sum(x**2) / np.sum((x - y) ** 2)), abs=1e-3)
    assert output.cosine == pytest.approx(np.sum(x * y) / math.sqrt(np.sum(x**2) * np.sum(y**2)), abs=1e-7)
    assert output.l2 == pytest.approx(2 * math.sqrt(np.sum((x - y) ** 2)), rel=1e-4)
    assert output.psnr == pytest.approx(10 * math.log10(np.max(x) ** 2 / np.mean((x - y) ** 2)), abs=1e-3)


def test_layers_are_compared_behind_the_pair() -> None:
    layers = {layer.name: layer for layer in compare(model(False), model(True), SAMPLES).layers}
    x, y = hidden()
    assert list(layers) == ["matmul", "relu", "double"]
    assert layers["matmul"].sqnr == math.inf
    assert layers["relu"].sqnr == pytest.approx(10 * math.log10(np.sum(x**2) / np.sum((x - y) ** 2)), abs=1e-3)
    assert layers["relu"].op_type == "Relu" and layers["relu"].tensor == "h"


def test_clipping_range_and_share() -> None:
    (view,) = compare(model(False), model(True), SAMPLES).tensors
    x, _ = hidden()
    top = (255 - ZERO) * SCALE
    assert (view.name, view.format) == ("h", "uint8")
    assert (view.low, view.high) == pytest.approx((-ZERO * SCALE, top))
    assert view.clipped == pytest.approx(np.mean(x > top + SCALE / 2), abs=1e-9)
    assert view.clipped > 0
    assert view.counts.sum() == x.size and len(view.edges) == len(view.counts) + 1
    assert (view.edges[0], view.edges[-1]) == pytest.approx((x.min(), x.max()), rel=1e-5)


def test_rounding_to_the_end_of_the_range_is_not_clipping() -> None:
    codes = CodeRange("uint8", 0.0, 10.0, 1.0)
    codes.update(np.array([-0.6, -0.4, 5.0, 10.4, 10.6], np.float32))
    assert codes.view("t").clipped == pytest.approx(2 / 5)


def test_pair_at_a_graph_output() -> None:
    """There the node's own output has another name and the dequantized tensor keeps the output's."""
    float_model, quantized = model(False), model(True)
    for one, name in ((float_model, "h"), (quantized, "h_dq")):
        del one.graph.node[-1]
        one.graph.output[0].name = name
    quantized.graph.node[1].output[0] = quantized.graph.node[2].input[0] = "h_raw"
    quantized.graph.node[-1].output[0] = quantized.graph.output[0].name = "h"
    onnx.checker.check_model(quantized)
    found = compare(float_model, quantized, SAMPLES)
    x, y = hidden()
    assert found.outputs["h"].l2 == pytest.approx(math.sqrt(np.sum((x - y) ** 2)), rel=1e-4)
    assert [view.name for view in found.tensors] == ["h"]


def test_quantized_graph_input_is_a_tensor_but_no_layer() -> None:
    quantized = model(False)
    quantized.graph.initializer.append(numpy_helper.from_array(np.array(ZERO, np.int8), "z8"))
    pair = [
        helper.make_node("QuantizeLinear", ["x", "s", "z8"], ["x_q"]),
        helper.make_node("DequantizeLinear", ["x_q", "s", "z8"], ["x_dq"]),
    ]
    quantized.graph.node[0].input[0] = "x_dq"
    for node in reversed(pair):
        quantized.graph.node.insert(0, node)
    found = compare(model(False), quantized, SAMPLES)
    assert [(view.name, view.format) for view in found.tensors] == [("x", "int8")]
    assert [layer.name for layer in found.layers] == ["matmul", "relu", "double"]


def test_layers_have_the_names_of_the_quantized_model() -> None:
    """A folded node is gone: what can be excluded is the node that now makes the tensor."""
    quantized = model(True)
    quantized.graph.node[1].name = "fused"
    assert [layer.name for layer in compare(model(False), quantized, SAMPLES).layers] == ["matmul", "fused", "double"]


def test_without_layers() -> None:
    found = compare(model(False), model(True), SAMPLES, ENDS)
    assert (found.layers, found.tensors) == ((), ())
    assert found.outputs["y"].sqnr > 15


def test_results_are_those_of_the_file() -> None:
    """End to end, the quantized model runs with its fusions: bit for bit what a session of the file gives."""
    session = onnxruntime.InferenceSession(model(True).SerializeToString())
    reference = onnxruntime.InferenceSession(model(False).SerializeToString())
    distance = Distance()
    for feed in SAMPLES:
        distance.update(reference.run(None, feed)[0], session.run(None, feed)[0])
    assert compare(model(False), model(True), SAMPLES).outputs["y"] == distance


def test_progress_counts_samples() -> None:
    seen: list[int] = []
    compare(model(False), model(True), SAMPLES, progress=seen.append)
    assert seen == [1, 2, 3, 4]


def test_no_samples() -> None:
    with pytest.raises(DataError, match="gave no sample"):
        compare(model(False), model(True), [])


def test_sample_that_does_not_fit() -> None:
    with pytest.raises(DataError, match=r"\[3, 7\] does not fit the input 'x'"):
        compare(model(False), model(True), [{"x": np.zeros((3, 7), np.float32)}])


def test_models_with_other_inputs() -> None:
    other = model(True)
    other.graph.input[0].name = other.graph.node[0].input[0] = "image"
    with pytest.raises(DataError, match=r"different inputs: \['x'\] and \['image'\]"):
        compare(model(False), other, SAMPLES)


def test_masks_of_infinity_agree() -> None:
    distance, infinity = Distance(), float("-inf")
    distance.update(np.array([infinity, 1.0, 2.0]), np.array([infinity, 1.0, 1.0]))
    assert (distance.l2, distance.count) == (1.0, 2)
    distance.update(np.array([infinity]), np.array([0.0]))
    assert not math.isfinite(distance.sqnr)


def test_zero_tensors_agree() -> None:
    distance = Distance()
    distance.update(np.zeros(3, np.float32), np.zeros(3, np.float32))
    assert (distance.cosine, distance.sqnr) == (1.0, math.inf)


def rounded_twice() -> onnx.ModelProto:
    """``model(False)`` with two pairs of unlike scales on its input, which ONNX Runtime makes one of."""
    found = model(False)
    grids = {"s1": np.array(0.05, np.float32), "s2": np.array(0.07, np.float32), "z0": np.array(128, np.uint8)}
    found.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in grids.items())
    chain = [("x", "s1", "a"), ("a", "s2", "b")]
    pairs = [
        node
        for source, scale, target in chain
        for node in (
            helper.make_node("QuantizeLinear", [source, scale, "z0"], [f"{target}_q"]),
            helper.make_node("DequantizeLinear", [f"{target}_q", scale, "z0"], [target]),
        )
    ]
    found.graph.node[0].input[0] = "b"
    nodes = [*pairs, *found.graph.node]
    del found.graph.node[:]
    found.graph.node.extend(nodes)
    return found


def test_what_the_optimizations_of_the_runtime_change_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = SAMPLES[0]

    def moved_most(quantized: onnx.ModelProto) -> MovedOutput | None:
        return compare(model(False), quantized, [feed], Checks(layers=False, moved=True)).moved

    x = feed["x"].astype(np.float64)
    twice = (
        np.clip(np.rint(np.clip(np.rint(x / 0.05) + 128, 0, 255) * 0.05 / 0.07 - 128 * 0.05 / 0.07), -128, 127) * 0.07
    )
    expected = np.maximum(x @ WEIGHT, 0)
    noise = expected - np.maximum(twice @ WEIGHT, 0)
    found = moved_most(rounded_twice())
    assert found is not None and found.name == "y"
    assert found.written == pytest.approx(10 * math.log10(np.sum(expected**2) / np.sum(noise**2)), abs=0.05)
    plain = onnxruntime.InferenceSession(rounded_twice().SerializeToString())
    noise = 2 * expected - plain.run(None, feed)[0]
    assert found.optimized == pytest.approx(10 * math.log10(np.sum(4 * expected**2) / np.sum(noise**2)), abs=1e-3)
    assert moved_most(model(True)) is None
    for exact, told in ((min(found.written, found.optimized) - 0.1, None), (found.written + 0.1, found)):
        monkeypatch.setattr("quark.onnx.compare.EXACT", exact)
        assert moved_most(rounded_twice()) == told
    line = str(runtime_line(found.name, found.optimized, found.written))
    assert f"{found.written:.1f} dB with ONNX Runtime's optimizations off" in line


def test_of_a_slow_model_fewer_samples_are_compared() -> None:
    samples = SAMPLES[:1] * (FEWEST + 2)
    counts = {
        seconds: compare(model(False), model(True), samples, Checks(enough=seconds)).samples
        for seconds in (None, 1e9, 0.0)
    }
    assert counts == {None: FEWEST + 2, 1e9: FEWEST + 2, 0.0: FEWEST}


STATE = "<body = b (int64 i, bool c, float[1] s) => (bool d, float[1] o) { d = Identity (c) o = Relu (s) }>"
ENDLESS = {
    "without a count": (f"y = Loop (, t, x) {STATE}", "without an end"),
    "2^62 times": (f"y = Loop (n, t, x) {STATE}", f"{2**62} times"),
    "in a branch": (
        f"y = If (t) <then_branch = a () => (float[1] u) {{ u = Loop (, t, x) {STATE} }}, "
        "else_branch = e () => (float[1] v) { v = Neg (x) }>",
        "without an end",
    ),
    "three times": (f"y = Loop (three, t, x) {STATE}", None),
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("first", [True, False])
def test_models_that_do_not_end_are_not_run(name: str, first: bool) -> None:
    body, told = ENDLESS[name]
    weights = {"t": np.array(True), "n": np.array(2**62), "three": np.array(3)}
    used = {key: value for key, value in weights.items() if f"({key}" in body or f" {key}," in body}
    looping = models.model(f"g (float[1] x) => (float[1] y) {{ {body} }}", used, 17)
    plain = models.model("g (float[1] x) => (float[1] y) { y = Relu (x) }", {}, 17)
    pair = (looping, plain) if first else (plain, looping)
    with pytest.raises(ModelError, match=f"runs {told}: its condition never changes") if told else nullcontext():
        compare(*pair, [{"x": np.ones(1, np.float32)}])


COMPUTED = """<body = b (int64 i, bool c, float[1] s) => (bool d, float[1] o) {
    o = Relu (s) m = Neg (s) q = Squeeze (m) d = Less (q, one) }>"""
UNENDING = {
    "without a count": (f"y = Loop (, t, x) {COMPUTED}", True),
    "2^62 times": (f"y = Loop (n, t, x) {COMPUTED}", True),
    "in a branch": (
        f"y = If (t) <then_branch = a () => (float[1] u) {{ u = Loop (, t, x) {COMPUTED} }}, "
        "else_branch = e () => (float[1] v) { v = Neg (x) }>",
        True,
    ),
    "until the sum is large": (f"y = Loop (, t, x) {COMPUTED.replace('Relu (s)', 'Sub (s, one)')}", False),
    "three times": (f"y = Loop (three, t, x) {COMPUTED}", False),
}


@pytest.mark.parametrize("name", UNENDING)
def test_loops_whose_condition_stays_true_are_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the file says how often they run: they are given seconds."""
    body, endless = UNENDING[name]
    weights = {"t": np.array(True), "n": np.array(2**62), "three": np.array(3), "one": np.array(1, np.float32)}
    used = {key: value for key, value in weights.items() if re.search(rf"\b{key}\b", body)}
    looping = models.model(f"g (float[1] x) => (float[1] y) {{ {body} }}", used, 17)
    monkeypatch.setattr(budget, "LOOP_SECONDS", 0.2)
    told = r"\(Loop\) does not end: its condition still holds after 0\.2 s"
    with pytest.raises(DataError, match=told) if endless else nullcontext():
        compare(looping, looping, [{"x": np.ones(1, np.float32)}])


@pytest.mark.parametrize(
    ("case", "count", "order"),
    [
        ("slow", FEWEST + 1, "fqfffqqqfq"),  # a sample by both, then a block of each, then the rest
        ("busy machine", FEWEST + 1, "fqfffqqqfq"),
        ("as long as it should", FEWEST, "fqfqfqfq"),
        ("few samples", FEWEST - 1, "fqffqq"),
        ("large outputs", FEWEST, "fqfqfqfq"),
        ("not timed", FEWEST, "fqfqfqfq"),
    ],
)
def test_slow_models_run_once_a_sample(case: str, count: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a comparison time them, where these are enough; what is compared is the same."""
    samples = [{"x": SAMPLES[0]["x"] * (1 + number)} for number in range(count)]
    expected = compare(model(False), model(True), samples, ENDS).outputs
    ran: list[str] = []
    for side, name, wait in (("f", "_said", 0.03), ("q", "_answers", 0.01)):
        whole = getattr(comparing, name)

        def watched(runner: Any, names: list[str], *rest: Any, of: tuple[str, Any, float] = (side, whole, wait)) -> Any:
            if names:  # no layer is compared
                ran.append(of[0])
                time.sleep(of[2])
            return of[1](runner, names, *rest)

        monkeypatch.setattr(comparing, name, watched)
    apart = {"float": 7.0, "quantized": 8.0}
    monkeypatch.setattr(comparing, "pace_of", lambda *_: apart)
    monkeypatch.setattr("quark.onnx.latency.is_restless", lambda _: case == "busy machine")
    monkeypatch.setattr(latency, "HELD", 0 if case == "large outputs" else 1 << 20)
    seconds = {"as long as it should": 1e6, "not timed": None}.get(case, 0.1)
    found = compare(model(False), model(True), samples, Checks(layers=False, timed=seconds))
    assert "".join(ran) == order
    assert found.outputs["y"].sqnr == expected["y"].sqnr and found.samples == count
    if case == "slow":
        assert 0.03 <= found.seconds["float"] < 1 and 0.01 <= found.seconds["quantized"] < found.seconds["float"]
    else:
        assert found.seconds == ({} if seconds is None else apart)


def test_the_models_are_timed_on_a_sample_in_the_middle_and_not_on_one_that_float_is_slow_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """UltraFace takes 3.0 to 5.5 times as long in float as in integers, picture by picture: one of them says little."""
    waits = [0.0, 5.0, 2.0, 1.0, 3.0, 4.0]
    samples = [{"x": np.full((3, 6), number, np.float32)} for number in range(len(waits))]
    said, answers, clock = comparing._said, comparing._answers, [0.0]
    watch = SimpleNamespace(**{**vars(time), "perf_counter": lambda: clock[0]})

    def slow(runner: Any, names: list[str], feed: dict[str, np.ndarray]) -> Any:
        clock[0] += waits[int(feed["x"][0, 0])]
        return said(runner, names, feed)

    def steady(*given: Any) -> Any:
        clock[0] += 1.0
        return answers(*given)

    timed: list[float] = []

    def pace_of(models: Any, *_: Any) -> dict[str, float]:
        timed.extend(float(feed["x"][0, 0]) for *_, feed in models.values())
        return {"float": 1.0, "quantized": 1.0}

    monkeypatch.setattr(latency, "time", watch)
    monkeypatch.setattr(comparing, "_said", slow)
    monkeypatch.setattr(comparing, "_answers", steady)
    monkeypatch.setattr(comparing, "pace_of", pace_of)
    compare(model(False), model(True), samples, Checks(layers=False, timed=1e6))
    assert timed == [4.0, 4.0]
    monkeypatch.setattr(latency, "HELD", 3 * 72)  # bytes of three samples: the middle of the last two
    compare(model(False), model(True), samples, Checks(layers=False, timed=1e6))
    assert timed[2:] == [2.0, 2.0]
