"""Every option of the NPU group: what it changes in a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.onnx import ModelQuantizer, QConfig, QLayerConfig, QuantGranularity, XInt8Spec
from quark.onnx.flow import Result
from quark.onnx.npu.simulate import SIMULATIONS, asked

W = models.normal(4, 4, 1, 1, seed=1)


def run(
    graph: str, weights: dict[str, np.ndarray], scale: float = 1.0, granularity: Any = None, **options: Any
) -> Result:
    proto = models.model(graph, weights)
    weight = XInt8Spec() if granularity is None else XInt8Spec(quant_granularity=granularity)
    config = QConfig(
        QLayerConfig(input_tensors=XInt8Spec(), weight=weight),
        extra_options={"ForceQuantizeNoInputCheck": True, "PrintSummary": False, **options},
    )
    feed = {name: array * np.float32(scale) for name, array in models.feeds(proto).items()}
    result = ModelQuantizer(config).run(proto, None, [feed])
    assert result.proto is not None
    onnx.checker.check_model(result.proto, full_check=True)
    answer = models.session(result.proto).run(None, feed)[0]
    assert np.isfinite(answer).all()
    return result


def node(result: Result, op_type: str) -> dict[str, Any]:
    """Attributes of the only node of a type."""
    assert result.proto is not None
    [found] = [node for node in result.proto.graph.node if node.op_type == op_type]
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in found.attribute}


def types(result: Result) -> list[str]:
    assert result.proto is not None
    return [node.op_type for node in result.proto.graph.node if not node.op_type.endswith("Linear")]


def constants(result: Result) -> dict[str, np.ndarray]:
    assert result.proto is not None
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in result.proto.graph.initializer}


def at(result: Result, name: str) -> int:
    return int(-np.log2(float(np.asarray(result.plan.tensors[name].scale).max())))


UNARY = "g (float[1,4,6,6] x) => (float[1,4,6,6] y) {{ a = Conv(x, w) y = {} }}"


# ---- the device's operators ------------------------------------------------------------------------------------------


def test_leaky_relu_has_a_slope_in_256ths() -> None:
    graph = UNARY.format("LeakyRelu<alpha = 0.1>(a)")
    assert node(run(graph, {"w": W}), "LeakyRelu")["alpha"] == np.float32(26 / 256)
    assert node(run(graph, {"w": W}, ConvertLeakyReluToDPUVersion=False), "LeakyRelu")["alpha"] == np.float32(0.1)
    assert node(run(graph, {"w": W}, SimulateDPU=False), "LeakyRelu")["alpha"] == np.float32(0.1)


def test_sigmoid_becomes_a_hard_sigmoid_with_the_devices_sixth() -> None:
    graph = UNARY.format("Sigmoid(a)")
    whole = run(graph, {"w": W})
    assert types(whole) == ["Conv", "HardSigmoid", "Mul"]
    assert node(whole, "HardSigmoid") == {"alpha": np.float32(1 / 6), "beta": 0.5}
    assert constants(whole)["y_Scale"] == np.float32(6 * 2731 / 2**14)
    assert types(run(graph, {"w": W}, ConvertSigmoidToHardSigmoid=False)) == ["Conv", "Sigmoid"]
    assert types(run(graph, {"w": W}, ConvertHardSigmoidToDPUVersion=False)) == ["Conv", "HardSigmoid"]


class Once:
    """Gives every sample once, in one array that it fills again."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self.left, self.shown = list(arrays), np.empty_like(arrays[0])

    def get_next(self) -> dict[str, np.ndarray] | None:
        if not self.left:
            return None
        self.shown[:] = self.left.pop(0)
        return {"x": self.shown}


@pytest.mark.parametrize("once", [False, True])
def test_the_report_says_what_the_devices_function_costs_alone(once: bool) -> None:
    eye = np.eye(4, dtype=np.float32)[..., None, None]
    x = [models.normal(1, 4, 6, 6, seed=seed) * 3 for seed in range(6)]
    sigmoid, hard = (
        np.concatenate([f(a.astype(np.float64)) for a in x[:4]])
        for f in (lambda a: 1 / (1 + np.exp(-a)), lambda a: np.clip(a / 6 + 0.5, 0, 1))
    )
    expected = 10 * np.log10((sigmoid**2).sum() / ((sigmoid - hard) ** 2).sum())

    def told(**options: Any) -> list[str]:
        layer = QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec())
        config = QConfig(layer, extra_options={"PrintSummary": False, **options})
        reader = Once(x) if once else [{"x": a} for a in x]
        plan = ModelQuantizer(config).run(models.model(UNARY.format("Sigmoid(a)"), {"w": eye}), None, reader).plan
        return [one for one in plan.proposals if "HardSigmoid" in one]

    [sentence] = told()
    assert "HardSigmoid for Sigmoid in 1 places" in sentence and f"leaves 'y' at {expected:.1f} dB" in sentence
    assert told(ConvertSigmoidToHardSigmoid=False) == told(SimulateDPU=False) == []


def test_a_hard_sigmoid_of_another_slope_is_not_corrected() -> None:
    assert types(run(UNARY.format("HardSigmoid(a)"), {"w": W})) == ["Conv", "HardSigmoid"]


def test_a_node_that_stays_float_is_not_simulated() -> None:
    graph = UNARY.format("Sigmoid(a)")
    assert types(run(graph, {"w": W}, OpTypesToQuantize=["Conv"])) == ["Conv", "Sigmoid"]


POOL = "g (float[1,4,{n},{n}] x) => (float[1,4,M,N] y) {{ a = Conv(x, w) y = {op}(a) }}"


@pytest.mark.parametrize(
    ("side", "factor"), [(3, 63 / 64), (5, 250 / 256), (6, 252 / 256), (7, 1029 / 1024), (14, 4116 / 4096)]
)
def test_average_pools_have_the_devices_factors(side: int, factor: float) -> None:
    graph = POOL.format(n=16, op=f"AveragePool<kernel_shape = [{side},{side}]>")
    assert constants(run(graph, {"w": W}))["y_Scale"] == np.float32(factor)
    assert types(run(graph, {"w": W}, ConvertAvgPoolToDPUVersion=False)) == ["Conv", "AveragePool"]


def test_the_factor_of_other_pools_is_the_best_multiplier_of_few_bits() -> None:
    # 1 / 81 with shifts up to 7 + ceil(log2 81) - 1 = 13: the least |K / 2^n - 1 / 81| is 101 / 2^13
    graph = POOL.format(n=9, op="GlobalAveragePool")
    assert constants(run(graph, {"w": W}))["y_Scale"] == np.float32(81 * 101 / 2**13)


def test_pools_that_are_not_square_are_reported() -> None:
    result = run(POOL.format(n=9, op="AveragePool<kernel_shape = [3,1]>"), {"w": W})
    report = next(report for report in result.passes if report.name == "dpu_average_pool")
    assert report.fired == 0 and "not square" in report.refused[0]


def test_reduce_mean_has_the_devices_factor() -> None:
    # 1 / 24: shifts up to 7 + 5 - 1 = 11; the first n with the least error is 2^11, K = 85
    graph = "g (float[1,4,6,6] x) => (float[1,1,1,6] y) { a = Conv(x, w) y = ReduceMean<axes = [1,2]>(a) }"
    assert constants(run(graph, {"w": W}))["y_Scale"] == np.float32(24 * 85 / 2**11)
    assert types(run(graph, {"w": W}, ConvertReduceMeanToDPUVersion=False)) == ["Conv", "ReduceMean"]


def test_clip_has_whole_bounds_within_a_byte() -> None:
    graph = UNARY.format("Clip(a, lo, hi)")
    weights = {"w": W, "lo": np.float32(-0.6), "hi": np.float32(300)}
    bounds = constants(run(graph, weights, ConvertClipToDPUVersion=True))
    assert (bounds["y_min"], bounds["y_max"]) == (-1, 127)
    open_ended = constants(run(UNARY.format("Clip(a)"), {"w": W}, ConvertClipToDPUVersion=True))
    assert (open_ended["y_min"], open_ended["y_max"]) == (-128, 127)
    assert constants(run(graph, weights))["lo"] == np.float32(-0.6)


def test_softmax_is_a_bfloat16_polynomial_close_to_the_exact_one() -> None:
    graph = "g (float[1,4,6,6] x) => (float[1,4,6,6] y) { a = Conv(x, w) y = Softmax<axis = 1>(a) }"
    exact, ours = run(graph, {"w": W}), run(graph, {"w": W}, ConvertSoftmaxToDPUVersion=True)
    assert "Softmax" in types(exact) and "Softmax" not in types(ours)
    feed = models.feeds(models.model(graph, {"w": W}))
    x, y = (models.session(result.proto).run(None, feed)[0] for result in (exact, ours))
    assert 0 < np.abs(x - y).max() < 0.02  # bfloat16 has 8 bits; the sum is of few of them
    np.testing.assert_allclose(y.sum(1), 1, atol=0.02)


def test_instance_normalization_is_the_devices_operator_and_runs() -> None:
    graph = UNARY.format("InstanceNormalization(a, s, b)")
    weights = {"w": W, "s": models.normal(4, seed=2), "b": models.normal(4, seed=3)}
    result = run(graph, weights, ConvertInstanceNormToDPUVersion=True)
    assert result.proto is not None and "ExtendedInstanceNormalization" in types(result)
    feed = models.feeds(models.model(graph, weights))
    plain = models.session(run(graph, weights).proto).run(None, feed)[0]
    np.testing.assert_array_equal(models.session(result.proto).run(None, feed)[0], plain)


# ---- limits of positions ---------------------------------------------------------------------------------------------

ADD = "g (float[1,4,6,6] x) => (float[1,4,6,6] y) { a = Conv(x, w) b = Conv(x, v) y = Add(a, b) }"
TINY = {"w": W, "v": W * np.float32(2**-12)}


def test_shift_read_brings_operands_within_seven() -> None:
    free, near = run(ADD, TINY, AdjustShiftRead=False), run(ADD, TINY)
    assert at(free, "b") - at(free, "a") == 12
    assert at(near, "b") - at(near, "a") == 7


def test_shift_cut_moves_a_weight_and_rounds_it_again() -> None:
    graph = "g (float[1,4,6,6] x) => (float[1,4,6,6] y) { y = Conv(x, w, b) }"
    weights = {"w": W * np.float32(2**-16), "b": models.normal(4, seed=5)}  # the bias alone decides about the output
    free, cut = run(graph, weights, AdjustShiftCut=False), run(graph, weights)
    assert at(free, "w") + at(free, "x") - at(free, "y") > 16
    assert at(cut, "w") + at(cut, "x") - at(cut, "y") == 16
    codes = constants(cut)["w_quantized"]
    np.testing.assert_array_equal(codes, np.clip(np.rint(weights["w"] * 2.0 ** at(cut, "w")), -127, 127))
    assert "shift_cut" in cut.plan.explain("w")


def test_shift_bias_keeps_a_small_bias_on_the_accumulator() -> None:
    graph = "g (float[1,4,6,6] x) => (float[1,4,6,6] y) { y = Conv(x, w, b) }"
    weights = {"w": W * np.float32(2**-6), "b": models.normal(4, seed=5) * np.float32(2**10)}
    free, held = run(graph, weights, AdjustShiftBias=False), run(graph, weights)
    assert at(free, "w") + at(free, "x") - at(free, "b") > 15
    assert at(held, "w") + at(held, "x") - at(held, "b") == 15
    codes = constants(held)["b_quantized"]
    np.testing.assert_array_equal(codes, np.clip(np.rint(weights["b"] * 2.0 ** at(held, "b")), -127, 127))


def test_shift_swish_and_shift_write_move_the_product() -> None:
    graph = UNARY.format("Mul(a, s)").replace("y =", "s = HardSigmoid<alpha = 0.16666667>(a) y =")
    weights = {"w": W * np.float32(2**-10)}

    def shift(result: Result) -> int:
        return at(result, "a") + at(result, "s") - at(result, "y")

    assert 0 <= shift(run(graph, weights)) <= 15

    square = ADD.replace("float[1,4,6,6] y)", "float[1,4,6,6] y, float[1,4,6,6] z)").replace(" }", " z = Mul(b, b) }")
    free, held = run(square, TINY, AdjustShiftWrite=False), run(square, TINY)
    assert (
        2 * at(free, "b") - at(free, "z") < 0
    )  # the Add has moved b, and the square has a finer scale than its factors
    assert 2 * at(held, "b") - at(held, "z") == 0


def test_hard_sigmoid_reads_at_most_fifteen_and_writes_at_least_seven_bits() -> None:
    graph = UNARY.format("HardSigmoid<alpha = 0.16666667>(a)")
    weights = {"w": W * np.float32(2**-16)}
    free, held = run(graph, weights, AdjustHardSigmoid=False), run(graph, weights)
    assert at(free, "a") > 15 and at(held, "a") == 15
    assert at(held, "y") >= 7


@pytest.mark.parametrize(
    ("option", "graph", "slots"),
    [
        (
            "AlignConcat",
            "g (float[1,4,6,6] x) => (float[1,8,6,6] y) { a = Conv(x, w) b = Conv(x, v) y = Concat<axis = 1>(a, b) }",
            ("a", "b", "y"),
        ),
        (
            "AlignPool",
            "g (float[1,4,6,6] x) => (float[1,4,1,1] y) { a = Conv(x, w) y = GlobalAveragePool(a) }",
            ("a", "y"),
        ),
    ],
)
def test_aligned_operators_have_one_position(option: str, graph: str, slots: tuple[str, ...]) -> None:
    weights = {"w": W, "v": TINY["v"]} if "v" in graph.split("{")[1] else {"w": W}
    free, aligned = run(graph, weights, **{option: False}), run(graph, weights)
    assert len({at(free, name) for name in slots}) > 1
    assert {at(aligned, name) for name in slots} == {min(at(free, name) for name in slots)}


def test_without_the_check_no_rule_acts() -> None:
    result = run(ADD, TINY, NPULimitationCheck=False)
    assert at(result, "b") - at(result, "a") == 12
    assert not any(tensor.changes for tensor in result.plan)


def test_rounds_are_limited() -> None:
    graph = """g (float[1,4,6,6] x) => (float[1,8,6,6] y, float[1,4,6,6] s) {
        a = Conv(x, w) b = Conv(x, v) c = Conv(x, u) s = Add(a, b) y = Concat<axis = 1>(b, c) }"""
    weights = {**TINY, "u": TINY["v"]}
    once, more = run(graph, weights, MaxLoopNum=1), run(graph, weights)
    assert at(once, "b") < at(once, "c")  # the Concat comes first; the Add has moved its operand after that
    assert at(more, "b") == at(more, "c") == at(more, "y")


def test_per_channel_weights_stay_within_the_limits_channel_by_channel() -> None:
    weights = {"w": W * np.float32([2.0**-30, 1, 1, 1]).reshape(4, 1, 1, 1)}
    graph = UNARY.format("Relu(a)")
    result = run(graph, weights, granularity=QuantGranularity.Channel)
    position = -np.log2(np.asarray(result.plan.tensors["w"].scale))
    assert position.shape == (4,)
    shift = position + at(result, "x") - at(result, "y")
    assert (shift >= 0).all() and (shift <= 16).all() and shift.max() == 16


#: What the option table of the interface says happens without being asked for (``docs/options.md``).
UNASKED = {
    "ConvertLeakyReluToDPUVersion": True,
    "ConvertSigmoidToHardSigmoid": True,
    "ConvertHardSigmoidToDPUVersion": True,
    "ConvertAvgPoolToDPUVersion": True,
    "ConvertReduceMeanToDPUVersion": True,
    "ConvertSoftmaxToDPUVersion": False,
    "ConvertInstanceNormToDPUVersion": False,
    "ConvertClipToDPUVersion": False,
}


@pytest.mark.parametrize("option", list(UNASKED))
def test_what_the_device_computes_is_put_in_where_it_is_the_default(option: str) -> None:
    layer = QLayerConfig(XInt8Spec(), weight=XInt8Spec())
    [row] = [row for row in SIMULATIONS if row.option == option]
    assert {row.option for row in SIMULATIONS} == UNASKED.keys()
    assert asked(row, QConfig(layer).compile()) == UNASKED[option]
    for wish in (True, False):
        assert asked(row, QConfig(layer, extra_options={option: wish}).compile()) == wish
