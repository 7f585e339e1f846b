"""Single decisions of placement, of few-bit weights and of the NPU's arithmetic, each asked on both sides."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.test_asked_directly import named, planned
from tests.onnx_flow.test_rules_directly import constant

from quark.config.job import Job
from quark.config.options import Options
from quark.config.overrides import Override
from quark.config.plan import NodePlan, Plan, TensorPlan
from quark.config.rules import Decision, Rules
from quark.config.tensor import LayerSpec, TensorSpec
from quark.ir import runtime_faults
from quark.ir.surgery import Names
from quark.numerics.granularity import Channel, Group, Tensor
from quark.onnx.npu import fixed_point, rules
from quark.onnx.qdq import dynamic, fuse, nbits_algorithms, overrides, own_inputs, parameters, place, tables
from quark.onnx.qdq.index_paths import computes_shapes, of_coordinates
from quark.onnx.qdq.op_rules import GENERIC, OP_RULES


def placement_of(plan: Plan, options: Options, rank: int) -> place.Placement:
    """Of a graph in which the node "n1" is decided with a rank."""
    job = Job(Rules(LayerSpec(None, None, None, None)), options)
    return place.Placement(
        ir.Model(ir.Graph([], [], nodes=[]), ir_version=10), job, {"n1": Decision(None, "", rank)}, plan
    )


def test_the_last_entry_of_the_highest_rank_decides_at_a_shared_tensor() -> None:
    placement, first = placement_of(Plan(), Options(), 0), placement_of(Plan(), Options(), 0)
    value = ir.Value(name="x", shape=ir.Shape([2]))
    for rank, format in ((2, "int8"), (1, "int16"), (2, "uint8"), (3, "uint16"), (2, "int16")):
        placement.add(value, TensorSpec(format, symmetric=format[0] == "i"), format, rank)
    assert placement.plan.tensors["x"].spec.format == placement.plan.tensors["x"].reason == "uint16"
    for rank, format in ((2, "int8"), (1, "int16"), (2, "uint8")):
        first.add(value, TensorSpec(format, symmetric=format[0] == "i"), format, rank)
    assert first.plan.tensors["x"].spec.format == "int8"


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("own", [True, False])
def test_a_pair_of_its_own_is_for_a_layer_that_reads_what_others_read(readers: int, own: bool) -> None:
    model = named("g (float[2] x) => (float[2] y, float[2] z) { h = Abs (x) y = Sqrt (h) z = Exp (h) }")
    layer = LayerSpec(TensorSpec("int16"), None, None, None)
    placement = placement_of(Plan(), Options(), 0)
    placement.decisions["n2"] = Decision(layer, "because", 2, own_inputs=own)  # type: ignore[index]
    placement.plan.nodes["n2"] = NodePlan("n2", "Sqrt", True, "because")
    if readers == 1:
        model.graph[2].replace_input_with(0, model.graph.inputs[0])
    place._quantize_node(model.graph[1], OP_RULES.get("Sqrt", GENERIC), layer, placement)
    apart = own and readers == 2
    assert [one.value.name for one in placement.apart] == ["h"] * apart
    assert ("h" in placement.plan.tensors) is not apart


@pytest.mark.parametrize("asked, format, joined", [
    (None, None, True), (5, "int16", False), (5, "int8", True), (3, "int16", True), (1, "int16", True),
])  # fmt: skip
def test_what_a_layout_operator_writes_shares_the_parameters_of_what_it_reads(
    asked: int | None, format: str | None, joined: bool
) -> None:
    """Unless a later entry of the configuration has given a reader of the result another type."""
    node = named("g (float[2, 3] x) => (float[3, 2] y) { y = Transpose (x) }").graph[0]
    plan = Plan()
    plan.nodes["n1"] = NodePlan("n1", "Transpose", True, "default")
    plan.put(planned("x"))
    placement = placement_of(plan, Options(), 3)
    placement.ranks["x"] = 3
    if format is not None and asked is not None:
        plan.put(TensorPlan("y", "activation", TensorSpec(format), "told", "y"))
        placement.ranks["y"] = asked
    place._pass_through(node, LayerSpec(TensorSpec("int8"), None, None, None), placement)
    found = plan.tensors["y"]
    assert (found.group, found.observed) == (("x", False) if joined else ("y", True))
    assert found.spec.format == ("int8" if joined else "int16")


@pytest.mark.parametrize("masked", [True, False])
def test_what_carries_a_mask_stays_float_behind_a_layout_operator(masked: bool) -> None:
    node = named("g (float[2, 3] x) => (float[3, 2] y) { y = Transpose (x) }").graph[0]
    plan = Plan()
    plan.nodes["n1"] = NodePlan("n1", "Transpose", True, "default")
    plan.put(planned("x"))
    placement = placement_of(plan, Options(), 0)
    placement.masked |= {node.outputs[0]} if masked else set()
    place._pass_through(node, LayerSpec(TensorSpec("int8"), None, None, None), placement)
    assert ("y" in plan.tensors) is not masked


@pytest.mark.parametrize("inputs, alone, known, told", [
    (True, False, True, None), (False, False, True, "weights only"), (True, True, True, "weights only"),
    (True, False, False, "its input is not quantized"),
])  # fmt: skip
def test_layout_operators_that_stay_float(inputs: bool, alone: bool, known: bool, told: str | None) -> None:
    node = named("g (float[2, 3] x) => (float[3, 2] y) { y = Transpose (x) }").graph[0]
    plan = Plan()
    plan.nodes["n1"] = NodePlan("n1", "Transpose", True, "default")
    if known:
        plan.put(planned("x"))
    placement = placement_of(plan, Options(WeightsOnly=alone), 0)
    place._pass_through(node, LayerSpec(TensorSpec("int8") if inputs else None, None, None, None), placement)
    assert plan.nodes["n1"].quantized is (told is None) and plan.nodes["n1"].reason == (told or "default")


@pytest.mark.parametrize("given, granularity", [
    ({}, Channel(1)), ({"axis": 0}, Channel(0)), ({"axis": -1}, Channel(1)), ({"format": "int16"}, Tensor()),
    ({"range": ((-1.0,), (1.0,))}, Tensor()), ({"parameters": ((1.0,), (0,))}, Tensor()),
    ({"range": ((-1.0,), (1.0,)), "axis": 0}, Channel(0)), ({"symmetric": False}, Channel(1)),
])  # fmt: skip
def test_how_many_scales_an_overridden_tensor_has(given: dict[str, Any], granularity: Any) -> None:
    spec = TensorSpec("int8", granularity=Channel(1))
    found = overrides._spec(spec, Override(**given), constant(2, 3))
    assert found.granularity == granularity and found.format == given.get("format", "int8")
    assert found.symmetric is given.get("symmetric", True)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_groups_take_the_better_of_two_scales(bits: int) -> None:
    """The extreme on the lowest code, or its magnitude on the highest."""
    x = models.normal(6, 5, 16)
    codes, scales = nbits_algorithms._symmetric(x, bits)
    half = 1 << (bits - 1)
    for row in np.ndindex(6, 5):
        group = x[row].astype(float)
        extreme = group[np.abs(group).argmax()]
        tried = [np.float32(-extreme / half)] + ([np.float32(abs(extreme) / (half - 1))] if half > 1 else [])
        errors = [((np.clip(np.rint(group / one), -half, half - 1) * float(one) - group) ** 2).sum() for one in tried]
        assert float(scales[row]) == pytest.approx(float(tried[int(np.argmin(errors))]), rel=1e-6)
        assert (codes[row] == np.clip(np.rint(group / scales[row]), -half, half - 1) + half).mean() > 0.9


@pytest.mark.parametrize("body, expected", [
    ("h = HardSigmoid (x) y = Mul (x, h)", True), ("h = HardSigmoid (x) y = Mul (h, x)", True),
    ("h = HardSigmoid (z) y = Mul (x, h)", False), ("h = Sigmoid (x) y = Mul (x, h)", False),
    ("g = HardSigmoid (x) h = Mul (g, k) y = Mul (x, h)", True),
])  # fmt: skip
def test_what_is_one_instruction_of_the_device(body: str, expected: bool) -> None:
    weights = {"k": np.array(1.0001, np.float32)} if "k" in body else {}
    model = named(f"g (float[4] x, float[4] z) => (float[4] y) {{ {body} }}", weights)
    assert rules._is_swish(model.graph[-1]) is expected


LOOKUPS: dict[str, tuple[dict[str, Any], bool]] = {
    "rows": ({}, True),
    "one scale": ({"granularity": Tensor()}, True),
    "columns": ({"granularity": Channel(1)}, False),
    "groups": ({"granularity": Group(1, 2)}, False),
    "zero points": ({"zero_point": [0, 0, 1, 0]}, False),
    "one zero point": ({"zero_point": [3, 3, 3, 3]}, True),
    "a custom type": ({"format": "int3"}, False),
    "pairs on weights": ({"pairs": True}, False),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_which_readers_take_rows_of_codes(name: str) -> None:
    given, expected = LOOKUPS[name]
    node = ir.node("Gather", [constant(4, 6), ir.Value(name="i")])
    spec = TensorSpec(given.get("format", "int8"), granularity=given.get("granularity", Channel(0)))
    tensor = TensorPlan("w", "weight", spec, "", "w", scale=np.ones(4), zero_point=np.array(given.get("zero_point", 0)))
    item: Any = SimpleNamespace(tensor=tensor, options=Options(AddQDQPairToWeight="pairs" in given))
    assert tables.is_lookup(item, SimpleNamespace(node=node, idx=0)) == expected
    assert not tables.is_lookup(item, SimpleNamespace(node=node, idx=1))


@pytest.mark.parametrize("body, expected", [
    ("a = Neg (w) y = Add (x, a)", True), ("a = Neg (x) y = Add (x, a)", False),
    ("a = Mul (w, x) y = Add (x, a)", False),
    ("q = QuantizeLinear (w, s) a = DequantizeLinear (q, s) y = Add (x, a)", False),
    ("a = Clip (w, , w) y = Add (x, a)", True),
])  # fmt: skip
def test_what_onnx_runtime_computes_before_it_runs(body: str, expected: bool) -> None:
    weights = {"w": np.array(2.0, np.float32)} | ({"s": np.array(0.5, np.float32)} if "s)" in body else {})
    model = named(f"g (float[4] x) => (float[4] y) {{ {body} }}", weights)
    assert runtime_faults._is_fixed(model.graph[-1].inputs[1]) is expected


@pytest.mark.parametrize("factor, added", [(1.0, False), (0.999, True)])
def test_a_factor_other_than_one_is_a_node(factor: float, added: bool) -> None:
    model = named("g (float[4] x) => (float[4] y) { y = Relu (x) }")
    assert fixed_point.multiply(model.graph[0], factor, Names(model)) is added
    assert [node.op_type for node in model.graph] == (["Relu", "Mul"] if added else ["Relu"])
    assert str(model.graph.outputs[0].name) == "y"


@pytest.mark.parametrize("shape, axes, expected", [
    ([2, 3, 4], [1, 2], 12), ([2, 3, 4], None, 24), ([2, 3, 4], [-1], 4),
    ([2, 1, 4], [1], 1), ([2, 0, 4], [1], None), ([2, "n"], [0], 2),
    ([2, "n"], [1], None), (None, [1], None),
])  # fmt: skip
def test_how_many_values_a_mean_is_of(shape: Any, axes: list[int] | None, expected: int | None) -> None:
    value = ir.Value(name="x", shape=None if shape is None else ir.Shape(shape))
    node = ir.node("ReduceMean", [value], attributes={} if axes is None else {"axes": axes})
    assert fixed_point.reduced(node) == expected


ONE, TWO = (
    ["Abs", "Ceil", "Floor", "Neg", "Reciprocal", "Round", "Sqrt"],
    ["Add", "Div", "Max", "Min", "Mod", "Mul", "Pow", "Sub"],
)
PLACES = {op: f"{op} (x)" for op in ONE} | {op: f"{op} (x, x)" for op in TWO} | {
    "Clip": "Clip (x)", "Concat": "Concat<axis = 0> (x, x)", "Where": "Where (c, x, x)", "Range": "Range (s, s, s)",
    "Reshape": "Reshape (x, h)", "Mod": "Mod<fmod = 1> (x, x)",
}  # fmt: skip


@pytest.mark.parametrize("op_type", PLACES)
def test_float_arithmetic_that_ends_in_an_index(op_type: str) -> None:
    """What moves values and what computes with numbers of places belongs to the index; functions are data."""
    model = named(
        f"g (float[2] x, float s, bool[2] c, int64[1] h) => (float[n, 4] y) {{ f = {PLACES[op_type]} "
        "i = Cast<to = 7> (f) y = Gather (t, i) }", {"t": models.normal(9, 4)},
    )  # fmt: skip
    found = {node.op_type for node in computes_shapes(model)}
    assert found == ({"Cast"} if op_type in ("Exp", "Sigmoid", "Relu") else {"Cast", op_type})


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 49, 64, 65, 1000])
def test_the_mean_of_the_device_is_the_nearest_that_it_has(count: int) -> None:
    """1/n as K / 2^s with s up to 6 + ceil(log2 n); the exact mean is off by n K / 2^s."""
    longest = 6 + (count - 1).bit_length()
    found = [Fraction(round(Fraction(2**s, count)), 2**s) for s in range(longest + 1)] if count > 1 else [Fraction(1)]
    best = min(abs(one - Fraction(1, count)) for one in found)
    factor = Fraction(fixed_point.mean_factor(count))
    assert abs(factor / count - Fraction(1, count)) <= best + Fraction(1, 10**15)
    if count & (count - 1) == 0:
        assert factor == 1


@pytest.mark.parametrize(("shape", "expected"), [
    (["N", 4], True), (["N", 5], False), (["N", 2, 3], True), ([3], True), ([3, "N"], False), ([3, 64], False),
    (None, False), ([], False),
])  # fmt: skip
def test_products_of_few_numbers_are_of_coordinates(shape: list[Any] | None, expected: bool) -> None:
    """The last axis counts, however long the others are."""
    data = ir.Value(name="x", shape=None if shape is None else ir.Shape(shape))
    node = ir.node("MatMul", [data, ir.Value(name="w")])
    assert of_coordinates(node) is expected
    assert not of_coordinates(ir.node("Add", [data, ir.Value(name="w")]))


def test_two_activations_are_multiplied_without_a_weight() -> None:
    model = named("g (float[2, 4] x, float[4, 3] z) => (float[2, 3] y) { y = MatMul (x, z) }")
    plan = Plan()
    layer = LayerSpec(TensorSpec("uint8"), TensorSpec("int8"), None, None)
    dynamic._add(model.graph[0], layer, "because", plan, model)
    assert {tensor.name: tensor.role for tensor in plan} == {"x": "activation", "z": "activation"}


def test_a_tensor_of_unknown_shape_has_no_axes() -> None:
    node = ir.node("Gemm", [ir.Value(name="x"), ir.Value(name="w", shape=ir.Shape([4, 3])), None])
    assert [dynamic._rank(node, position) for position in range(4)] == [0, 2, 0, 0]


@pytest.mark.parametrize("kind, expected", [("float", None), ("float16", "it computes on other types than float32")])
def test_the_dynamic_flow_is_one_of_float32(kind: str, expected: str | None) -> None:
    weight = models.normal(4, 3).astype(np.float16 if kind == "float16" else np.float32)
    node = named(f"g ({kind}[2, 4] x) => ({kind}[2, 3] y) {{ y = MatMul (x, w) }}", {"w": weight}).graph[0]
    job: Any = SimpleNamespace(options=Options())
    layer = LayerSpec(TensorSpec("uint8"), TensorSpec("int8"), None, None)
    assert dynamic._why_float(node, layer, job, None) == expected
    assert dynamic._why_float(node, LayerSpec(TensorSpec("uint8"), None, None, None), job, None) is not None


@pytest.mark.parametrize("side, factor", [
    (3, 9 * 7 / 2**6), (5, 25 * 10 / 2**8), (6, 36 * 7 / 2**8), (7, 49 * 21 / 2**10), (14, 196 * 21 / 2**12),
    (256, 1.0), (300, 1.0), (2, 1.0), (4, 1.0), (16, 1.0),
])  # fmt: skip
def test_kernels_that_the_device_has_constants_for(side: int, factor: float) -> None:
    node = ir.node("AveragePool", [ir.Value(name="x")], attributes={"kernel_shape": [side, side]})
    assert fixed_point.of_pool(node) == factor


@pytest.mark.parametrize(("granularity", "shape", "expected"), [
    (Tensor(), (0, 3), (1,)), (Channel(0), (3, 0), (3,)), (Channel(1), (0, 2), (2,)),
])  # fmt: skip
def test_a_constant_without_numbers_has_ranges_of_zero(
    granularity: Any, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    lo, hi = parameters.weight_range(np.empty(shape, np.float32), TensorSpec("int8", granularity=granularity), "w")
    for side in (lo, hi):
        assert side.shape == expected and not side.any()


@pytest.mark.parametrize(("body", "symmetric", "known", "expected"), [
    ("y = Relu (x)", False, True, True), ("y = Relu (x)", True, True, False), ("y = Relu (x)", False, False, False),
    ("y = Clip (x, zero, six)", False, True, True), ("y = Clip (x, one, six)", False, True, False),
    ("y = Clip (x)", False, True, None), ("y = Exp (x)", False, True, False),
    ("y = Clip (x, below, six)", False, True, None), ("y = Clip (x, below, zero)", False, True, None),
    ("y = Clip (x, below, lower)", False, True, False), ("y = Clip (x, below, six)", True, True, False),
])  # fmt: skip
def test_codes_that_reach_zero_clip_as_a_clip_does(
    body: str, symmetric: bool, known: bool, expected: bool | None
) -> None:
    """None: where a pass drops the Clip, since the runtime does not."""
    numbers = {"zero": 0.0, "one": 1.0, "six": 6.0, "below": -2.0, "lower": -1.0}
    weights = {name: np.array(value, np.float32) for name, value in numbers.items() if name in body}
    node = named(f"g (float[4] x) => (float[4] y) {{ {body} }}", weights).graph[0]
    plan = Plan()
    if known:
        plan.put(TensorPlan("y", "activation", TensorSpec("uint8", symmetric=symmetric), "", "y"))
    for dropped in (True, False):
        assert fuse._codes_do_the_clipping(node, plan, dropped) is (dropped if expected is None else expected)


@pytest.mark.parametrize("readers", [None, frozenset(["n2"])])
@pytest.mark.parametrize("format", ["int8", "int16", None])
def test_layers_that_read_a_shared_tensor_in_their_own_type(readers: frozenset[str] | None, format: str | None) -> None:
    """Where it has that type already, they are readers of it; where it is float, they are its only ones."""
    model, plan = named("g (float[2] x) => (float[2] y, float[2] z) { y = Relu (x) z = Sqrt (x) }"), Plan()
    if format is not None:
        plan.put(TensorPlan("x", "activation", TensorSpec(format), "", "x", readers=readers))
    apart = own_inputs.Apart(model.graph[0], model.graph.inputs[0], TensorSpec("int8"), "because")
    own_inputs.separate(model, plan, [apart])
    found = {name: (tensor.spec.format, tensor.readers) for name, tensor in plan.tensors.items()}
    if format is None:
        assert found == {"x": ("int8", {"n1"})}
    elif format == "int8":
        assert found == {"x": ("int8", None if readers is None else {"n1", "n2"})}
    else:
        assert found["x"][0] == "int16" and {spec for spec, _ in found.values()} == {"int8", "int16"}
