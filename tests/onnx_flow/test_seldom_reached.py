"""Rules that few models reach, asked directly; what is expected is computed from what the rules are said to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.test_asked_directly import named, planned

from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import TensorSpec
from quark.errors import ConfigError
from quark.ir import runtime_faults
from quark.ir.surgery import Names
from quark.numerics.granularity import Channel, Group
from quark.onnx.npu import softmax
from quark.onnx.qdq import align, channel_axes, divisors, float_biases, fuse, parameters, passthrough, slower, store
from quark.onnx.qdq.op_rules import OP_RULES


@pytest.mark.parametrize(("lo", "hi"), [(-3.0, 1.0), (-1.0, 3.0), (0.5, 2.0), (-2.0, -1.0)])
@pytest.mark.parametrize(("format", "symmetric", "first", "last"), [
    ("int8", False, -64, 64), ("int8", True, -64, 64), ("uint8", False, 0, 127), ("int16", False, -(2**14), 2**14),
    ("uint16", False, 0, 2**15 - 1),
])  # fmt: skip
def test_a_reduced_range_uses_half_of_the_codes(
    format: str, symmetric: bool, first: int, last: int, lo: float, hi: float
) -> None:
    """The range with zero goes onto ``first``..``last``; of a symmetric one the larger side onto ``last``."""
    spec = TensorSpec(format, symmetric=symmetric)
    low, high = (float(side) for side in parameters._halved(spec, lo, hi))
    least, most = min(lo, 0.0), max(hi, 0.0)
    if symmetric:
        assert low == -high and high == pytest.approx(max(-least, most) * 127 / 64)
        return
    scale = (high - low) / (spec.row.max - spec.row.min)
    codes = [(side - low) / scale + spec.row.min for side in (least, most)]
    assert codes == pytest.approx([first, last], abs=1e-6)


@pytest.mark.parametrize(("scales", "told"), [((2.0**-10, 1.0), False), ((1.0, 2.0**-11), True), ((1.0,), False)])
def test_products_of_scales_that_float16_holds(scales: tuple[float, ...], told: bool) -> None:
    """The smallest normal number is 2^-14; the input's scale is 2^-4, and the least of the weight counts."""
    plan = Plan()
    spec = TensorSpec("int8", scale_rule="float16")
    plan.put(TensorPlan("x", "activation", spec, "", "x", scale=np.float32(2.0**-4)))
    plan.put(TensorPlan("w", "weight", spec, "", "w", scale=np.array(scales, np.float32)))
    bias = planned("b", "bias", bias_of=("x", "w"))
    if told:
        with pytest.raises(ConfigError, match=r"UseFP32Scale=False: the scales of .x. and .w. multiply to 3\.1e-05"):
            float_biases.check_half(plan, bias)
    else:
        float_biases.check_half(plan, bias)


@pytest.mark.parametrize(("attributes", "between", "expected"), [
    ("", True, False), ("dilations = [1, 1],", True, False), ("dilations = [1, 2],", True, True),
    ("dilations = [2, 2],", True, True), ("dilations = [2, 2],", False, False),
])  # fmt: skip
def test_pools_that_leave_out_entries(
    attributes: str, between: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"y = AveragePool<{attributes} kernel_shape = [2, 2]> (x)"
    node = named(f"g (float[1, 1, 8, 8] x) => (float[1, 1, n, m] y) {{ {body} }}", opset=19).graph[0]
    monkeypatch.setattr(runtime_faults, "_is_quantized", lambda node: between)
    assert runtime_faults._is_dilated(node) is expected


@pytest.mark.parametrize(("op_type", "shape", "position", "axis", "format", "expected"), [
    ("MatMul", (4, 3), 1, 1, "int8", False), ("MatMul", (4, 3), 1, -1, "int8", False),
    ("MatMul", (4, 3), 1, 0, "int8", True), ("MatMul", (4,), 1, 0, "int8", True),
    ("MatMul", (4,), 1, 0, "fp8_e4m3", True), ("MatMul", (2, 4, 3), 1, 2, "int8", True),
    ("MatMul", (2, 4, 3), 1, 0, "fp8_e4m3", False), ("MatMul", (4, 3), 0, 1, "int8", True),
    ("MatMul", (), 1, 0, "int8", True), ("Conv", (8, 4, 3, 3), 1, 0, "int8", False),
    ("Conv", (8, 4, 3, 3), 1, 1, "int8", True), ("Conv", (8,), 2, 0, "int32", False),
])  # fmt: skip
def test_scales_on_an_axis_that_no_kernel_has(
    op_type: str, shape: tuple[int, ...], position: int, axis: int, format: str, expected: bool
) -> None:
    value = ir.Value(name="w", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    inputs = [ir.Value(name=f"i{k}") for k in range(3 if op_type == "Conv" else 2)]
    inputs[position] = value
    spec = TensorSpec(format, granularity=Channel(axis))
    node = ir.node(op_type, inputs)
    assert channel_axes._is_off(node, OP_RULES[op_type], position, value, spec) is expected


@pytest.mark.parametrize(("body", "formats", "expected"), [
    ("y = Transpose (x)", {"y": "mxfp8_e4m3"}, True), ("y = Relu (x)", {"y": "mxfp8_e4m3"}, True),
    ("y = Transpose (x)", {"y": "int8"}, False), ("y = Transpose (x)", {}, False),
    ("y = Exp (x)", {"y": "mxfp8_e4m3"}, False),
    ("y, z = Split (x)", {"y": "mxfp8_e4m3"}, True), ("y, z = Split (x) v = Neg (z)", {"y": "mxfp8_e4m3"}, False),
    ("y, z = Split (x) v = Neg (z)", {"y": "mxfp8_e4m3", "z": "mxfp8_e4m3"}, True),
])  # fmt: skip
def test_what_only_moves_values_to_where_they_are_rounded_to_blocks(
    body: str, formats: dict[str, str], expected: bool
) -> None:
    """All results that somebody sees are rounded to blocks."""
    outputs = "float[n, m] y, float[n, m] v" if "v =" in body else "float[n, m] y"
    node = named(f"g (float[64, 64] x) => ({outputs}) {{ {body} }}", opset=11).graph[0]
    plan = Plan()
    for name, format in formats.items():
        granularity = {"granularity": Group(-1, 32)} if format.startswith("mx") else {}
        plan.put(TensorPlan(name, "activation", TensorSpec(format, **granularity), "", name))
    assert fuse._moves(node, plan) is expected


def test_a_group_that_passes_on_a_range_has_that_of_its_source() -> None:
    plan = Plan()
    plan.put(TensorPlan("x", "activation", TensorSpec("uint8", symmetric=False), "first", "x"))
    plan.put(TensorPlan("y", "activation", TensorSpec("int8"), "second", "y", fixed_range=(0.0, 1.0)))
    plan.put(TensorPlan("z", "activation", TensorSpec("int8"), "third", "y", observed=False))
    passthrough._join(plan, plan.tensors["y"], plan.tensors["x"])
    told = "second passes on the range of 'x' (CalibPassthroughOpTypes)"
    assert [(t.name, t.group, t.spec.format, t.observed, t.fixed_range, t.reason) for t in plan] == [
        ("x", "x", "uint8", True, None, "first"), ("y", "x", "uint8", False, None, told),
        ("z", "x", "uint8", False, None, "third"),
    ]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), [
    ("y = Mul (x, z)", True), ("y = Mul (x, x)", False), ("y = Mul (x, c)", False), ("y = Mul (c, x)", False),
    ("y = Div (x, z)", False),
])  # fmt: skip
def test_a_product_is_one_of_two_tensors(body: str, expected: bool) -> None:
    weights = {"c": models.normal(2)} if "c" in body.split("(")[1] else {}
    node = named(f"g (float[2] x, float[2] z) => (float[2] y) {{ {body} }}", weights).graph[0]
    assert divisors._is_product(node) is expected


def test_a_group_that_lost_its_tensor_is_observed_at_the_first_that_is_left() -> None:
    plan = Plan()
    for name in ("y", "z"):
        plan.put(TensorPlan(name, "activation", TensorSpec("int8"), "", "gone", observed=False))
    plan.put(TensorPlan("x", "activation", TensorSpec("int8"), "", "x"))
    align.settle(plan)
    assert [(t.name, t.group, t.observed) for t in plan] == [("y", "y", True), ("z", "y", False), ("x", "x", True)]


# ---- how long a node takes -------------------------------------------------------------------------------------------


def test_a_transposed_convolution_is_the_float_one_between_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products: every number of the input times the weights of its channel."""
    asked = []

    def time(kind: str, form: str, elements: float, products: float = 0.0) -> float:
        asked.append((kind, form, elements, products))
        return {("Conv", "float"): 100.0, ("Conv", "integer"): 7.0, ("other", "integer"): 5.0}.get((kind, form), 2.0)

    monkeypatch.setattr(slower, "_time", time)
    monkeypatch.setattr(slower, "_OTHER", "other")
    node = named("g (float[1, 4, 5, 5] x) => (float[1, 3, 10, 10] y) { y = ConvTranspose<strides = [2, 2]> (x, w) }",
                 {"w": models.normal(4, 3, 2, 2)}).graph[0]  # fmt: skip
    assert slower._node_times(node) == (100.0, 103.0)
    assert {(kind, elements, products) for kind, _, elements, products in asked if kind == "Conv"} == {
        ("Conv", 300, 100.0 * 12)
    }


@pytest.mark.parametrize(("shape", "times", "kind", "cells"), [
    ([5, 2, 3], (3.0, 2.0), "LSTM batch", 10), ([5, 1, 3], (2.0, 2.0), "LSTM", 5), ([5, 1, 3], (2.0, 3.0), "LSTM", 5),
    (["n", "b", 3], (3.0, 2.0), "LSTM", 1), (None, (3.0, 2.0), "LSTM", 1),
])  # fmt: skip
def test_what_a_recurrent_layer_computes(
    shape: Any, times: tuple[float, float], kind: str, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two directions of 16 gate rows (4 of each): products with 3 inputs and 4 states for each row."""
    asked = []

    def time(*given: Any) -> float:
        asked.append(given)
        return times[given[1] == "integer"]

    monkeypatch.setattr(slower, "_time", time)
    x = ir.Value(name="x", shape=None if shape is None else ir.Shape(shape))
    w = ir.Value(name="w", shape=ir.Shape([2, 16, 3]))
    assert slower.dynamic_is_faster(ir.node("LSTM", [x, w])) is (times[1] < times[0])
    rows = cells * 2 * 16
    assert asked == [(kind, form, rows, rows * 7.0) for form in ("float", "integer")]


# ---- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [1, -1, 0])
def test_parameters_of_groups_are_gathered(axis: int) -> None:
    added: list[np.ndarray] = []
    spec = TensorSpec("int8", granularity=Group(axis, 2))
    value = ir.Value(name="w")
    value.const_value = ir.tensor(models.normal(4, 6))
    item: Any = SimpleNamespace(name="w", value=value, tensor=TensorPlan("w", "weight", spec, "", "w"))
    item.parameters = SimpleNamespace(add=lambda array, name: added.append(array) or name)
    item.node = lambda op, inputs, attributes, kind: SimpleNamespace(op=op, attributes=attributes, outputs=["out"])
    shape = (2, 6) if axis == 0 else (4, 3)
    grid = np.arange(12.0).reshape(shape)
    ((node,), result) = store._beside(item, grid.reshape(-1), "Mul")
    index, kept = added
    assert (node.op, node.attributes, result) == ("Gather", {"axis": axis % 2}, "out")
    spread = np.take(kept.reshape(shape), index, axis=axis)
    assert np.array_equal(spread, np.repeat(grid, 2, axis=axis))


@pytest.mark.parametrize("axis", [-1, 1])
def test_softmax_in_steps_of_bfloat16(axis: int) -> None:
    """n = floor(x log2 e), r = x - n ln 2, ((0.21875 r + 0.486328125) r + 1) r + 1 times 2^n, over its sum."""
    model = named(f"g (float[2, 3, 4] x) => (float[2, 3, 4] y) {{ y = Softmax<axis = {axis}> (x) }}")
    node = model.graph[0]
    assert softmax.rewrite(node, node, Names(model))
    x = np.float32(4) * models.normal(2, 3, 4)

    def rounded(value: Any) -> np.ndarray:
        return np.asarray(value, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)

    given = rounded(x)
    n = rounded(np.floor(rounded(given * np.float32(1.4426950408889634))))
    r = rounded(given - rounded(n * np.float32(0.6931471805599453)))
    p = np.float32(0.21875)
    for coefficient in (0.486328125, 1.0, 1.0):
        p = rounded(rounded(p * r) + np.float32(coefficient))
    e = rounded(np.exp2(n) * p)
    expected = rounded(e / rounded(e.sum(axis, keepdims=True)))
    found = models.run(ir.to_proto(model), {"x": x})[0]
    np.testing.assert_allclose(found, expected, rtol=2**-7)
    assert (found == expected).mean() > 0.8
    kinds = {value.dtype for made in model.graph for value in made.outputs if made.op_type == "Cast"}
    assert kinds == {ir.DataType.FLOAT, ir.DataType.BFLOAT16}
