"""Small decisions of placement and of what comes with it, each at its boundaries: masks, settings, bounds, rounding.

One table per question; what is expected is written down, or computed here in another way.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper
from tests.onnx_flow import models

from quark.config.nbits import NBits
from quark.config.options import Options
from quark.config.plan import TensorPlan
from quark.config.tensor import TensorSpec
from quark.errors import ModelError
from quark.ir import runtime_faults, surgery
from quark.numerics.granularity import Channel, Group, Tensor
from quark.onnx import CalibMethod, Int8Spec, Int16Spec, QConfig, QLayerConfig, UInt8Spec, XInt8Spec
from quark.onnx.graph.model import load
from quark.onnx.pipeline import prepare
from quark.onnx.qdq import masks, nbits_algorithms, op_type_names, parameters, settings, slots
from quark.onnx.qdq.place import _for_output, place

F32 = np.float32
MINMAX = CalibMethod.MinMax


# ---- masks -----------------------------------------------------------------------------------------------------------


def known(proto: onnx.ModelProto) -> ir.Model:
    """With the types of all tensors."""
    return load(onnx.shape_inference.infer_shapes(proto))


MASKS: dict[str, tuple[Any, bool]] = {
    "zero and far below": ([0.0, -1000.0], True),
    "far below alone": ([-1000.0, -1000.0], True),
    "not far enough below": ([0.0, -999.0], False),
    "far below and something else": ([0.0, -1.0, -1000.0], False),
    "1023 times the rest": ([0.0, 1.0, -1023.0], False),
    "1024 times the rest": ([0.0, 1.0, -1024.0], True),
    "a bias under a mask": ([-1.5, 2.5, -1e4 + 2.5], True),
    "a bias under the least number": ([-1.5, 2.5, -3.4e38], True),
    "two numbers, both far": ([0.0, -1000.0, -2000.0], False),
    "zero and far above": ([0.0, 1e6], True),
    "far above alone": ([1e6, 1e6], True),
    "not far enough above": ([0.0, 999999.0], False),
    "far above and small": ([-1.0, 1.0, 1e6], True),
    "far above and not small": ([0.0, 1000.0, 1e6], False),
    "one infinity": ([1.0, 2.0, -np.inf], True),
    "bounds of both signs": ([-1e6, 1e6], True),
    "bounds of both signs and zero": ([-1e6, 0.0, 1e6], True),
    "bounds and something small": ([-1e6, 1.0, 1e6], True),
    "bounds and something else": ([-1e6, 1000.0, 1e6], False),
    "bounds of two sizes": ([-1e6, 2e6], False),
    "bounds that are not far out": ([-999999.0, 999999.0], False),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_zero_and_one_very_large_number(name: str) -> None:
    values, expected = MASKS[name]
    text = "g (float[1, 3] x) => (float[1, 3] y) { s = Add (x, m) y = Softmax (s) }"
    model = known(models.model(text, {"m": np.array([values + [values[-1]] * (3 - len(values))], F32)}, 17))
    assert masks.reads_mask(model.graph[0]) == expected
    nodes, values_found = masks.masked_tensors(model)
    assert {node.op_type for node in nodes} == ({"Add", "Softmax"} if expected else set())
    assert {value.name for value in values_found} == ({"s"} if expected else set())


MADE = {
    "moved": ("m = Unsqueeze (k, axes) s = Add (x, m) y = Softmax (s)", True),
    "filled": ("m = ConstantOfShape <value = float[1] {-10000.0}> (three) s = Add (x, m) y = Softmax (s)", True),
    "filled with little": (
        "m = ConstantOfShape <value = float[1] {-10.0}> (three) s = Add (x, m) y = Softmax (s)",
        False,
    ),
    "filled with nothing": ("m = ConstantOfShape (three) s = Add (x, m) y = Exp (s)", False),
    "computed": ("m = Sqrt (x) s = Add (x, m) y = Softmax (s)", False),
    "an input": ("s = Add (x, x) y = Softmax (s)", False),
    "divided by": ("m = Unsqueeze (k, axes) s = Div (x, m) y = Softmax (s)", False),
}


@pytest.mark.parametrize("name", MADE)
def test_a_mask_may_be_made_by_moves(name: str) -> None:
    body, expected = MADE[name]
    weights = {"k": np.full(3, -1e4, F32), "axes": np.array([0]), "three": np.array([3])}
    used = {key: value for key, value in weights.items() if key in body}
    model = known(models.model(f"g (float[1, 3] x) => (float[1, 3] y) {{ {body} }}", used, 17))
    assert bool(masks.masked_tensors(model)[0]) == expected


# ---- settings --------------------------------------------------------------------------------------------------------


def asked(method: str, rule: str = "float32", symmetric: bool = True, **options: Any) -> Any:
    return settings.request_of(
        TensorSpec("int8", symmetric=symmetric, scale_rule=rule, method=method), Options(**options)
    )


@pytest.mark.parametrize(
    ("method", "rule", "options", "expected"),
    [
        ("minmax", "float32", {}, "minmax"),
        ("minmax", "power_of_two", {}, "non_overflow"),
        ("minmax", "float32", {"CalibMovingAverage": True}, "moving_minmax"),
        ("minmax", "power_of_two", {"CalibMovingAverage": True}, "moving_non_overflow"),
        ("mse", "float32", {"MinMSEModePof2Scale": "MostCommon"}, "mse"),
        ("mse", "power_of_two", {}, "mse"),
        ("mse", "power_of_two", {"MinMSEModePof2Scale": "MostCommon"}, "mse_most_common"),
        ("mse", "power_of_two", {"MinMSEModePof2Scale": "Percentile"}, "mse_percentile"),
        ("percentile", "power_of_two", {"CalibMovingAverage": True}, "percentile"),
    ],
)
def test_the_search_of_a_spec(method: str, rule: str, options: dict[str, Any], expected: str) -> None:
    found = asked(method, rule, **options)
    assert found.method == expected
    if "moving" in expected:
        assert found.settings["constant"] == Options(**options).CalibMovingAverageConstant
    else:
        assert "constant" not in found.settings


@pytest.mark.parametrize("given", [None, True, False])
def test_symmetric_ranges_are_asked_for_only_where_somebody_does(given: bool | None) -> None:
    for method in ("minmax", "percentile", "entropy", "mse"):
        found = asked(method, symmetric=False, CalibTensorRangeSymmetric=given)
        takes = "symmetric" in settings.SEARCHES[found.method].settings
        assert found.settings.get("symmetric", "absent") == (given if takes and given is not None else "absent")
        assert found.symmetric == (given is True) if hasattr(found, "symmetric") else True


@pytest.mark.parametrize("method", ["percentile", "layerwise_percentile", "minmax"])
def test_only_percentiles_get_one(method: str) -> None:
    found = asked(method, Percentile=99.5, LWPMetric="mae", PercentileCandidates=[99.0, 100.0])
    assert found.settings.get("percentile") == (99.5 if method == "percentile" else None)
    layerwise = method == "layerwise_percentile"
    assert found.settings.get("metric") == ("mae" if layerwise else None)
    assert found.settings.get("candidates") == ((99.0, 100.0) if layerwise else None)


# ---- bounds, pads, resizes -------------------------------------------------------------------------------------------


def node_of(text: str, weights: dict[str, np.ndarray], opset: int = 17) -> ir.Node:
    return load(models.model(text, weights, opset)).graph[0]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("x, low, high", (0.5, 6.0)),
        ("x, low", (0.5, np.inf)),
        ('x, "", high', (-np.inf, 6.0)),
        ("x", (-np.inf, np.inf)),
        ("x, low, z", None),
    ],
)
def test_bounds_of_a_clip(inputs: str, expected: tuple[float, float] | None) -> None:
    weights = {"low": np.array(0.5, F32), "high": np.array(6.0, F32)}
    text = f"g (float[3] x, float z) => (float[3] y) {{ y = Clip ({inputs.replace(chr(34) * 2, '')}) }}"
    proto = models.model(text.replace("(x, , high)", "(x, low, high)"), weights, 17)
    if '""' in inputs:
        proto.graph.node[0].input[1] = ""
    assert surgery.clip_bounds(load(proto).graph[0]) == expected


@pytest.mark.parametrize(
    ("attributes", "value", "expected"),
    [
        ("", None, True),
        ("", 0.0, True),
        ("", 0.5, False),
        ('<mode = "edge">', 0.5, True),
        ('<mode = "reflect">', None, True),
        ('<mode = "constant">', -1.0, False),
    ],
)
def test_what_a_pad_adds(attributes: str, value: float | None, expected: bool) -> None:
    weights = {"pads": np.array([1, 1])} | ({} if value is None else {"v": np.array(value, F32)})
    node = node_of(
        f"g (float[4] x) => (float[6] y) {{ y = Pad {attributes} (x, pads{'' if value is None else ', v'}) }}", weights
    )
    assert slots.pads_with_zero(node) == expected
    assert (slots.leaves_range(node) is None) == expected


def test_a_pad_with_a_value_that_is_computed_may_leave_the_range() -> None:
    node = node_of("g (float[4] x, float v) => (float[6] y) { y = Pad (x, pads, v) }", {"pads": np.array([1, 1])})
    assert not slots.pads_with_zero(node)


@pytest.mark.parametrize(
    ("attributes", "stays"),
    [
        ("", True),
        ('<mode = "linear">', True),
        ('<mode = "cubic">', False),
        ('<coordinate_transformation_mode = "asymmetric">', True),
        ('<coordinate_transformation_mode = "tf_crop_and_resize">', False),
    ],
)
def test_what_a_resize_may_write(attributes: str, stays: bool) -> None:
    node = node_of(
        f"g (float[1, 4] x, float[0] r, float[2] s) => (float[1, 8] y) {{ y = Resize {attributes} (x, r, s) }}", {}
    )
    assert (slots.leaves_range(node) is None) == stays


def test_other_layout_operators_stay_within() -> None:
    node = node_of("g (float[4, 2] x) => (float[2, 4] y) { y = Transpose (x) }", {})
    assert slots.leaves_range(node) is None


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ([2, 3], ir.DataType.FLOAT, True),
        ([2, 3], ir.DataType.FLOAT16, True),
        ([2, 3], ir.DataType.DOUBLE, False),
        ([2, 3], ir.DataType.INT64, False),
        ([2, 0], ir.DataType.FLOAT, False),
        (["N", 3], ir.DataType.FLOAT, True),
        ([], ir.DataType.FLOAT, True),
        (None, ir.DataType.FLOAT, True),
    ],
)
def test_what_is_a_float_tensor(shape: Any, dtype: ir.DataType, expected: bool) -> None:
    value = ir.Value(name="v", shape=None if shape is None else ir.Shape(shape), type=ir.TensorType(dtype))
    assert slots.is_float(value) == expected
    sequence = ir.Value(name="s", type=ir.SequenceType(ir.TensorType(dtype)))
    assert not slots.is_float(sequence) and not slots.is_float(None)


# ---- operator types --------------------------------------------------------------------------------------------------


def test_types_that_the_model_has_not_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        op_type_names.tell_absent({"A": ["Conv", "Gemm", "Gemm"], "B": ["Conv"]}, ["Conv"])
    assert [record.getMessage() for record in caplog.records] == ["A: the model has no Gemm"]


# ---- 4-bit matrix products -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_are_rounded_to_nearest(bits: int, symmetric: bool) -> None:
    weight = models.normal(5, 70)
    weight[2, :32] = 0
    weight[3] = np.abs(weight[3])
    weight[4] = -np.abs(weight[4])
    found = nbits_algorithms.nearest(weight, NBits(Bits=bits, GroupSize=32, Symmetric=symmetric))
    top = 2**bits - 1
    padded = np.pad(weight, [(0, 0), (0, 26)]).reshape(5, 3, 32).astype(np.float64)
    assert found.codes.shape == (5, 3, 32) and found.scales.shape == (5, 3)
    assert found.codes.max() <= top and np.isfinite(found.scales).all() and (found.scales != 0).all()
    zeros = 2 ** (bits - 1) if found.zero_points is None else found.zero_points.astype(np.float64)[..., None]
    values = (found.codes - np.asarray(zeros, np.float64)) * found.scales[..., None]
    low, high = (0 - zeros) * found.scales[..., None].astype(np.float64), (top - zeros) * found.scales[..., None]
    inside = np.clip(padded, np.minimum(low, high), np.maximum(low, high))
    assert np.abs(values - inside).max() <= np.abs(found.scales).max() * 0.5001
    assert (np.abs(values - inside) <= np.abs(found.scales[..., None]) * 0.5001).all()
    assert (values[2, 0] == 0).all() and found.scales[2, 0] == 1
    np.testing.assert_allclose(nbits_algorithms.values_of(found, bits, 70), values.reshape(5, -1)[:, :70], rtol=1e-6)


# ---- ranges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("granularity", "shape"), [(Tensor(), ()), (Channel(0), (3,)), (Group(1, 4), (3, 0))], ids=str)
def test_a_weight_without_elements_has_the_range_zero(granularity: Any, shape: tuple[int, ...]) -> None:
    found = parameters.weight_range(np.zeros((3, 0), F32), TensorSpec("int8", granularity=granularity), "w")
    for side in found:
        assert (np.asarray(side) == 0).all()


@pytest.mark.parametrize("side", ["data", "weight"])
def test_a_bias_needs_both_scales(side: str) -> None:
    from quark.config.plan import Plan

    plan = Plan()
    spec = TensorSpec("int8")
    for name, role in (("data", "activation"), ("weight", "weight")):
        scale = None if name == side else np.float32(0.5)
        plan.tensors[name] = TensorPlan(name, role, spec, "", name, scale=scale)
    bias = TensorPlan("b", "bias", TensorSpec("int32"), "", "b", bias_of=("data", "weight"))
    with pytest.raises(ModelError, match="the bias 'b' has an input or a weight without a scale"):
        parameters._make_room(plan, bias, np.ones(3, F32))


def test_a_bias_that_fits_16_bits_keeps_the_product_of_scales() -> None:
    scale = np.array([1.0, 1.0, 1.0, 0.5], F32)
    bias = np.array([32767.0, 32767.5, 65534.0, 0.0], F32)
    np.testing.assert_array_equal(parameters._shifted(scale, bias), [1.0, 2.0, 2.0, 0.5])
    np.testing.assert_array_equal(parameters._shifted(np.float32(1.0), bias[:1] * 5), 8.0)


@pytest.mark.parametrize("rule", ["float32", "power_of_two"])
def test_scales_grow_to_what_biases_need(rule: str) -> None:
    spec = TensorSpec("int8", scale_rule=rule, granularity=Channel(0))
    weight = TensorPlan("w", "weight", spec, "", "w", scale=np.array([1.0, 2.0], F32))
    needed = np.array([0.5, 5.0, 3.0, 1.0])  # two groups of the same two channels
    expected = [3.0, 5.0] if rule == "float32" else [4.0, 8.0]
    np.testing.assert_array_equal(parameters._grown(weight, needed), expected)
    one = TensorPlan("w", "weight", spec, "", "w", scale=np.array(1.0, F32))
    assert parameters._grown(one, needed) == (5.0 if rule == "float32" else 8.0)
    np.testing.assert_array_equal(parameters._per_channel(weight.scale, needed), [1.0, 2.0, 1.0, 2.0])


@pytest.mark.parametrize("format", ["int8", "uint8", "int16"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_reduced_range_lies_on_half_of_the_codes(format: str, symmetric: bool) -> None:
    if format == "uint8" and symmetric:
        return
    bits = 16 if format == "int16" else 8
    spec = TensorSpec(format, symmetric=symmetric, reduced=True)
    scale, zero = parameters.from_range(spec, -1.0, 3.0, False)
    codes = np.rint(np.array([-1.0, 3.0]) / float(scale)) + int(zero)
    half = 2 ** (bits - 2)
    if format == "uint8":
        assert codes.tolist() == [0, 2 * half - 1]
    elif symmetric:
        assert codes.tolist() == [round(-half / 3), half]
    else:
        assert codes.tolist() == [-half, half]


# ---- runtime_faults ----------------------------------------------------------------------------------------


def softmax(shape: str, dtype: str, attributes: str = "", opset: int = 17) -> ir.Node:
    zero = np.array(0, np.uint8 if dtype == "uint8" else np.int8)
    text = f"g ({shape} x) => ({dtype}[1] q) {{ s = Softmax {attributes} (x) q = QuantizeLinear (s, scale, zero) }}"
    proto = models.model(text, {"scale": np.array(0.1, F32), "zero": zero}, opset)
    del proto.graph.output[:]
    proto.graph.output.append(helper.make_tensor_value_info("q", 2 if dtype == "uint8" else 3, None))
    return ir.from_proto(proto).graph[0]


@pytest.mark.parametrize(
    ("shape", "dtype", "attributes", "opset", "expected"),
    [
        ("float[4, 2]", "int8", "", 17, True),
        ("float[4, 3]", "int8", "", 17, False),
        ("float[2, 3]", "int8", "<axis = 0>", 17, True),
        ("float[1, 2, 1]", "int8", "", 11, True),
        ("float[1, 2, 2]", "int8", "", 11, False),
        ("float[1, 2, 2]", "int8", "", 13, True),
        ("float[2, 3]", "int8", "<axis = 0>", 13, True),
        ("float[2, 3]", "int8", "<axis = 0>", 11, False),
        ("float[1, 2, 2]", "int8", "<axis = 2>", 11, True),
        ("float[4, N]", "uint8", "", 17, True),
        ("float[4, N]", "int8", "", 17, False),
        ("float[N, 2]", "int8", "", 17, True),
    ],
)
def test_a_softmax_over_two_entries_gets_a_copy(
    shape: str, dtype: str, attributes: str, opset: int, expected: bool
) -> None:
    assert runtime_faults._overflows(softmax(shape, dtype, attributes, opset), opset) == expected


@pytest.mark.parametrize("dtype", ["uint8", "int8", "none"])
def test_a_softmax_of_unknown_rank(dtype: str) -> None:
    node = softmax("float[4, 9]", "uint8" if dtype == "none" else dtype)
    node.inputs[0].shape = None
    if dtype == "none":
        next(iter(node.outputs[0].uses())).node.resize_inputs(2)
    assert runtime_faults._overflows(node, 17) == (dtype != "int8")


@pytest.mark.parametrize(
    ("dilations", "expected"), [("", False), ("<dilations = [1, 1]>", False), ("<dilations = [1, 2]>", True)]
)
def test_a_dilated_average(dilations: str, expected: bool) -> None:
    attributes = dilations.replace("<", "<kernel_shape = [2, 2], ") or "<kernel_shape = [2, 2]>"
    body = f"s = AveragePool {attributes} (x) q = QuantizeLinear (s, scale, zero)"
    text = f"g (float[1, 1, 8, 8] x) => (uint8[1] q) {{ {body} }}"
    proto = models.model(text, {"scale": np.array(0.1, F32), "zero": np.array(0, np.uint8)}, 19)
    assert runtime_faults._is_dilated(ir.from_proto(proto).graph[0]) == expected


# ---- placement -------------------------------------------------------------------------------------------------------


def plan_of(text: str, weights: dict[str, np.ndarray], config: QConfig) -> Any:
    prepared = prepare(load(models.model(text, weights, 17)), config.compile())
    return place(prepared.model, prepared.job)


ACTIVATIONS = {
    "Relu": ("y = Relu (c)", True),
    "Clip at zero": ("y = Clip (c, zero, six)", True),
    "Clip below": ("y = Clip (c, below, six)", False),
    "Clip computed": ("m = ReduceMin <keepdims = 0> (x) y = Clip (c, m)", False),
    "Tanh": ("y = Tanh (c)", False),
    "Sigmoid": ("y = Sigmoid (c)", None),
    "Softmax": ("y = Softmax (c)", None),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("target", ["cpu", None])
@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_never_negative_may_take_unsigned_codes(name: str, target: str | None, wanted: bool) -> None:
    body, positive = ACTIVATIONS[name]
    positive = target == "cpu" if positive is None else positive
    bounds = {"zero": np.array(0, F32), "six": np.array(6, F32), "below": np.array(-1, F32)}
    weights = {key: value for key, value in bounds.items() if key in body}
    node = load(models.model(f"g (float[1, 4] c, float x) => (float[1, 4] y) {{ {body} }}", weights, 17)).graph[-1]
    job: Any = SimpleNamespace(target=target, options=Options(UseUnsignedReLU=wanted))
    for spec, twin in (
        (TensorSpec("int8"), "uint8"),
        (TensorSpec("int16"), "uint16"),
        (TensorSpec("int8", symmetric=False), None),
        (TensorSpec("fp8_e4m3"), None),
    ):
        found = _for_output(spec, node, job)
        taken = positive and wanted and twin is not None
        assert (found.format, found.symmetric) == ((twin, False) if taken else (spec.format, spec.symmetric))


EXCLUDED = "g (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] z) { c = Conv (x, w) y = Sigmoid (c) z = Conv (y, w) }"


@pytest.mark.parametrize(
    ("option", "given", "told"),
    [
        ("OpTypesToExcludeOutputQuantization", "Sigmoid", "OpTypesToExcludeOutputQuantization: Sigmoid"),
        ("NodesToExcludeOutputQuantization", "middle", "NodesToExcludeOutputQuantization: middle"),
    ],
)
def test_an_output_that_is_left_out_says_by_which_option(option: str, given: str, told: str) -> None:
    proto = models.model(EXCLUDED, {"w": models.normal(4, 4, 1, 1)}, 17)
    proto.graph.node[1].name = "middle"
    layer = QLayerConfig(input_tensors=UInt8Spec(calibration_method=MINMAX), weight=Int8Spec(calibration_method=MINMAX))
    prepared = prepare(load(proto), QConfig(layer, extra_options={"PrintSummary": False, option: [given]}).compile())
    plan = place(prepared.model, prepared.job)
    assert "y" not in plan.tensors and "c" in plan.tensors
    assert told in plan.explain("y")


EXTENDED = {"Sub": "y = Sub (c, x)", "Min": "y = Min (c, x)", "HardSigmoid": "y = HardSigmoid (c)"}
EXTRA = {"Exp": "y = Exp (c)", "Elu": "y = Elu (c)"}


@pytest.mark.parametrize("name", [*EXTENDED, *EXTRA])
def test_which_operators_are_quantized_in_which_flow(name: str) -> None:
    body = (EXTENDED | EXTRA)[name]
    text = f"g (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] z) {{ c = Conv (x, w) {body} z = Conv (y, w) }}"
    weights = {"w": models.normal(4, 4, 1, 1)}

    def quantized(spec: Any, weight: Any, **options: Any) -> bool:
        layer = QLayerConfig(input_tensors=spec, weight=weight)
        plan = plan_of(text, weights, QConfig(layer, extra_options={"PrintSummary": False, **options}))
        return any(node.op_type == name and node.quantized for node in plan.nodes.values())

    eight, sixteen = Int8Spec(calibration_method=MINMAX), Int16Spec(calibration_method=MINMAX)
    assert not quantized(eight, eight)
    assert quantized(XInt8Spec(), XInt8Spec()) == (name in EXTENDED)
    assert quantized(sixteen, eight) == (name in EXTENDED)
    assert quantized(eight, sixteen) == (name in EXTENDED)
    assert quantized(eight, eight, ExtraOpTypesToQuantize=[name])
    assert quantized(eight, eight, OpTypesToQuantize=["Conv", name])
    assert not quantized(sixteen, eight, OpTypesToQuantize=["Conv"])
    assert quantized(eight, eight, QuantizeAllOpTypes=True)
    assert not quantized(sixteen, eight, EnableNPUTransformer=True)


def test_layout_operators_that_lead_to_float_layers_stay_float_with_them() -> None:
    """What only such layers read, back through what only moves it to them."""
    from quark.config.plan import Plan
    from quark.onnx.qdq.outputs import leave_inputs

    text = """g (float[2, 8] x) => (float[8, 3] y, float[16] v) {
        a = Relu (x) b = Transpose (a) c = Reshape (b, shape) y = MatMul (c, w) v = Flatten (x) }"""
    proto = models.model(text, {"w": models.normal(2, 3), "shape": np.array([8, 2])}, 17)
    proto.graph.node[1].name = ""
    model = load(proto)
    for number, node in enumerate(model.graph):
        node.name = f"n{number}"

    def left(names: set[str]) -> set[str]:
        plan = Plan()
        for name in "xabc":
            plan.tensors[name] = TensorPlan(name, "activation", TensorSpec("int8"), "", name)
        leave_inputs(model, plan, names)
        return set("xabc") - set(plan.tensors)

    assert left({"n3"}) == {"a", "b", "c"}
    assert left(set()) == set() and left({"n1"}) == {"a"} and left({"n0"}) == set() and left({"n0", "n4"}) == {"x"}


def test_which_nodes_read_inputs_of_the_graph() -> None:
    from quark.onnx.qdq.selection import known_nodes

    text = "g (float[2, 8] x) => (float[2, 3] y) { a = Relu (x) b = Sqrt (a) y = MatMul (b, w) }"
    model = load(models.model(text, {"w": models.normal(8, 3)}, 17))
    found = known_nodes(model)
    assert [node.reads_graph_input for node in found] == [True, False, False]
    assert [len(node.producers) for node in found] == [0, 1, 1]


@pytest.mark.parametrize(("bias", "grows"), [(1.0, False), (1 + 1e-3, True), (0.5, False)])
def test_scales_grow_only_where_a_bias_would_not_fit(bias: float, grows: bool) -> None:
    from quark.config.plan import Plan

    plan = Plan()
    plan.tensors["d"] = TensorPlan("d", "activation", TensorSpec("int8"), "", "d", scale=np.float32(1.0))
    fit = np.float32(1.0 * (1 + 2.0**-20) / 2.0**30)
    plan.tensors["w"] = TensorPlan(
        "w", "weight", TensorSpec("int8"), "", "w", scale=np.float32(fit * np.float32(1.0001))
    )
    tensor = TensorPlan("b", "bias", TensorSpec("int32"), "", "b", bias_of=("d", "w"))
    before = float(np.asarray(plan.tensors["w"].scale))
    parameters._make_room(plan, tensor, np.array([bias, -bias / 2], F32))
    after = float(np.asarray(plan.tensors["w"].scale))
    assert (after > before) == grows
    assert bias / after <= 2**30  # the other half is for the sum of the products
    with pytest.raises(ModelError, match="holds NaN or infinity; such a bias"):
        parameters._make_room(plan, tensor, np.array([np.inf, 1.0], F32))


@pytest.mark.parametrize(
    ("op_type", "inputs", "expected"),
    [
        ("MatMul", ["x", "z"], ["x", "z"]),
        ("MatMul", ["x", "w"], ["x"]),
        ("MatMul", ["w", "x"], ["w", "x"]),
        ("Conv", ["i", "k"], ["i"]),
        ("Add", ["x", "w"], ["x", "w"]),
        ("Add", ["x", "n"], ["x"]),
        ("Where", ["c", "x", "z"], ["x", "z"]),
        ("Relu", ["n"], []),
        ("Clip", ["x", "w"], ["x"]),
    ],
)
def test_the_activations_that_a_node_reads(op_type: str, inputs: list[str], expected: list[str]) -> None:
    from quark.onnx.qdq.op_rules import OP_RULES

    def value(name: str) -> ir.Value:
        dtype = {"n": ir.DataType.INT64, "c": ir.DataType.BOOL}.get(name, ir.DataType.FLOAT)
        made = ir.Value(name=name, shape=ir.Shape([4, 4]), type=ir.TensorType(dtype))
        if name in "wk":
            made.const_value = ir.tensor(models.normal(4, 4))
        return made

    values = [value(name) for name in inputs]
    constants = [one for one in values if one.const_value is not None]
    node = ir.node(op_type, values)
    ir.Graph([one for one in values if one not in constants], node.outputs, nodes=[node], initializers=constants)
    found = slots.data_inputs(node, OP_RULES[op_type])
    assert [one.name for one in found] == expected
    weight = slots.weight_input(node, OP_RULES[op_type])
    weighted = op_type in ("MatMul", "Conv") and inputs[1] in "wk"
    assert (None if weight is None else weight.name) == (inputs[1] if weighted else None)


def test_only_the_copies_of_the_plan_are_taken_out_again() -> None:
    """An Identity of the model's own stays, and so does a node of another type under a copy's name."""
    from quark.config.plan import NodePlan, Plan
    from quark.onnx.qdq import second_type

    text = "g (float[2] x) => (float[2] y) { a = Relu (x) b = Identity (a) y = Sqrt (b) }"
    model, plan = load(models.model(text, {}, 17)), Plan()
    nodes = list(model.graph)
    for number, node in enumerate(nodes):
        node.name = f"n{number}"
    second_type.insert(model, plan, nodes[0].outputs[0], "copy", [nodes[1]])
    plan.nodes["n2"] = NodePlan("n2", "Sqrt", True, second_type.REASON)
    assert [node.op_type for node in model.graph] == ["Relu", "Identity", "Identity", "Sqrt"]
    second_type.drop(model, plan)
    assert [node.name for node in model.graph] == ["n0", "n1", "n2"]
    assert nodes[1].inputs[0] is nodes[0].outputs[0]
