"""Conditions of several parts in the ONNX rules: what happens where only one of them holds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.test_asked_directly import named, planned
from tests.onnx_flow.test_rules_directly import constant

from quark.config.options import Options
from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import LayerSpec, TensorSpec
from quark.errors import ConfigError
from quark.ir import runtime_faults
from quark.ir.surgery import Names
from quark.numerics.granularity import Channel, Group, Tensor
from quark.onnx import QConfig, counted
from quark.onnx.graph.model import load
from quark.onnx.npu import adapt, limits, rules, softmax
from quark.onnx.npu.positions import Positions
from quark.onnx.pipeline import prepare
from quark.onnx.qdq import (
    activation_nodes,
    align,
    biases,
    divisors,
    dynamic,
    emit,
    float_biases,
    floats,
    isolated,
    masks,
    nbits,
    op_type_names,
    outputs,
    parameters,
    place,
    recurrent,
    slots,
    tables,
)
from quark.onnx.qdq.op_rules import OP_RULES
from quark.operators import OPERATORS


@pytest.mark.parametrize(("fill", "expected"), [
    (-1e9, True), (0.0, False), (None, False), (np.int64(-(10**9)), False),
])  # fmt: skip
def test_a_tensor_filled_with_one_number_is_a_mask_where_that_is_far_out(fill: Any, expected: bool) -> None:
    attributes = {}
    if fill is not None:
        kind = np.int64 if isinstance(fill, np.int64) else np.float32
        attributes = {"value": ir.tensor(np.array([fill], kind))}
    node = ir.node("ConstantOfShape", [ir.Value(name="s")], attributes=attributes)
    node.outputs[0].type = ir.TensorType(ir.DataType.INT64 if isinstance(fill, np.int64) else ir.DataType.FLOAT)
    assert masks.reads_mask(ir.node("Add", [ir.Value(name="x"), node.outputs[0]])) is expected


@pytest.mark.parametrize("suited", [(True, True), (True, False), (False, False)])
def test_a_recurrent_layer_computes_in_integers_where_both_weights_suit(
    suited: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = named("g (float[4, 1, 2] x) => (float[4, 1, 1, 3] y) { y = LSTM<hidden_size = 3> (x, w, r) }",
                  {"w": models.normal(1, 12, 2), "r": models.normal(1, 12, 3)})  # fmt: skip
    monkeypatch.setattr(recurrent, "_suits", lambda tensor, node: dict(zip("wr", suited, strict=True))[tensor.name])
    plan = Plan()
    assert recurrent.dynamic_nodes(model, plan) == []
    plan.put(planned("w", "weight"))
    assert recurrent.dynamic_nodes(model, plan) == []
    plan.put(planned("r", "weight"))
    assert len(recurrent.dynamic_nodes(model, plan)) == all(suited)


@pytest.mark.parametrize("given", ["OpTypesToQuantize", "NodesToQuantize"])
def test_recurrent_layers_stay_where_others_are_asked_for(given: str) -> None:
    options = SimpleNamespace(**{"OpTypesToQuantize": [], "NodesToQuantize": [], given: ["Conv"]})
    job: Any = SimpleNamespace(options=options)
    recurrent.store_weights(None, None, job, {})  # type: ignore[arg-type]  # nothing is looked at


@pytest.mark.parametrize(("op_type", "npu", "wide", "expected"), [
    ("MatMul", False, False, True), ("MatMul", True, False, True), ("Abs", False, False, None),
    ("Abs", True, False, None), ("NoSuchOp", True, True, False),
])  # fmt: skip
def test_operators_that_are_quantized_unasked(
    op_type: str, npu: bool, wide: bool, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the extended set only for devices and in other widths than eight bits."""
    monkeypatch.setattr(place, "_in_eight_bits", lambda job: not wide)
    extended = next(name for name, rule in place.OP_RULES.items() if rule.op_set == "extended")
    options = SimpleNamespace(
        QuantizeAllOpTypes=False, ExtraOpTypesToQuantize=[], OpTypesToQuantize=[], EnableNPUTransformer=False
    )
    job: Any = SimpleNamespace(options=options, npu=npu)
    name, expected = (extended, npu or wide) if expected is None else (op_type, expected)
    assert place._in_op_set(name, job) is expected
    assert place._in_op_set(extended, SimpleNamespace(options=options, npu=False)) is wide  # type: ignore[arg-type]


@pytest.mark.parametrize(("range", "zero"), [
    ((0.0, 0.0), True), ((0.0, 3.0), False), ((-1.0, 0.0), False), (None, False),
])  # fmt: skip
def test_a_tensor_is_always_zero_where_both_ends_are(range: Any, zero: bool) -> None:
    plan = Plan()
    plan.put(planned("x", range=range))
    assert Positions(plan).always_zero("x") is zero


@pytest.mark.parametrize("missing", [0, 1, 2, 3, None])
def test_shifts_are_of_layers_whose_tensors_all_have_positions(missing: int | None) -> None:
    """Input, weight, bias and output; of a sum all operands."""
    names = [None if k == missing else name for k, name in enumerate(("x", "w", "b", "y"))]
    at: Any = SimpleNamespace(always_zero=lambda name: False, written=lambda node: names[3])
    at.read = lambda node, slot, channels=False: names[slot]
    at.of = {"x": 5, "w": 30, "b": 40, "y": 3}.get
    conv = ir.node("Conv", [ir.Value(name=str(k)) for k in range(3)])
    assert len(list(rules.shift_bias(conv, at))) == (missing is None)
    assert len(list(rules.shift_cut(conv, at))) == (missing not in (0, 1, 3))
    add = ir.node("Add", [ir.Value(name=str(k)) for k in range(2)])
    assert len(list(rules.shift_read(add, at))) == (missing not in (0, 1))
    assert list(rules.shift_read(ir.node("Add", [ir.Value(name="0")]), at)) == []


@pytest.mark.parametrize(("version", "closed"), [(20, False), (21, True), (22, True)])
def test_pairs_are_closed_from_opset_21_on(version: int, closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for name in ("_close_pairs", "_put_copies"):
        monkeypatch.setattr(runtime_faults, name, lambda model, names, name=name: seen.append(name))
    runtime_faults.work_around_faults(named("g (float[2] x) => (float[2] y) { y = Relu (x) }", opset=version))
    assert ("_close_pairs" in seen) is closed


@pytest.mark.parametrize(("body", "expected"), [
    ("q = QuantizeLinear (a, s)", True), ("b = Relu (a) q = QuantizeLinear (b, s)", True),
    ("b = Relu (a) c = Relu (b) q = QuantizeLinear (c, s)", False), ("b = Neg (a) q = QuantizeLinear (b, s)", False),
])  # fmt: skip
def test_one_relu_between_a_node_and_its_codes(body: str, expected: bool) -> None:
    model = named(f"g (float[2] x) => (uint8[2] q) {{ a = Abs (x) {body} }}", {"s": np.array(0.5, np.float32)})
    assert runtime_faults._is_quantized(model.graph[0]) is expected


@pytest.mark.parametrize(("op_type", "domain", "fine", "expected"), [
    ("GlobalAveragePool", "", 1.0, True), ("GlobalAveragePool", "", 0.9, False),
    ("GlobalAveragePool", "own", 1.0, False), ("Abs", "", 1.0, False),
])  # fmt: skip
def test_averages_whose_scale_the_runtime_refuses(
    op_type: str, domain: str, fine: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale 256 times finer than that of what is averaged."""
    read, made = constant(), constant()
    read.const_value = ir.tensor(np.array(0.5 * fine, np.float32))
    made.const_value = ir.tensor(np.array(0.5 / 256, np.float32))
    origin = ir.node("DequantizeLinear", [ir.Value(name="c"), read])
    node = ir.node(op_type, [origin.outputs[0]], domain=domain)
    ir.Graph([], [], nodes=[origin, node, ir.node("QuantizeLinear", [node.outputs[0], made])])
    monkeypatch.setattr(runtime_faults, "_origin", lambda source: origin)
    assert runtime_faults._is_much_finer(node, origin) is expected


@pytest.mark.parametrize("why", ["_overflows", "_is_dilated", "_is_much_finer", None])
def test_one_reason_is_enough_to_read_a_copy(why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the pair and the readers that one of the reasons names; others read on as they did."""
    model = named("""g (int8[2] c, float s) => (float[2] y, float[2] z) {
        x = DequantizeLinear (c, s) y = Softmax (x) z = Sqrt (x) }""")
    for name in ("_overflows", "_is_dilated", "_is_much_finer"):
        own = lambda node, *more, told=name == why: told and node.op_type == "Softmax"  # noqa: E731
        monkeypatch.setattr(runtime_faults, name, own)
    runtime_faults._spare_float(model, Names(model))
    read = {node.op_type: node.inputs[0].name for node in model.graph}  # type: ignore[union-attr]
    assert read == {"DequantizeLinear": "c", "Softmax": "x", "Sqrt": "x"} | (
        {"Max": "x", "Softmax": "x_copy"} if why else {}
    )


@pytest.mark.parametrize(("length", "expected"), [(1, True), (2, True), (3, False)])
def test_softmax_over_two_entries_or_one(length: int, expected: bool) -> None:
    model = named(f"g (float[{length}] x) => (float[{length}] y) {{ y = Softmax (x) }}")
    step = constant()
    step.const_value = ir.tensor(np.array(1.0, np.float32))
    model.graph.append(ir.node("QuantizeLinear", [model.graph[0].outputs[0], step]))
    assert runtime_faults._overflows(model.graph[0], 17) is expected


@pytest.mark.parametrize(("npu", "asked"), [(True, True), (True, False), (False, True), (False, False)])
def test_limits_of_the_device_hold_where_they_are_asked_for(
    npu: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapt, "simulate", lambda model, plan, job: [])
    monkeypatch.setattr(adapt, "limit", lambda model, plan, rules, rounds: "limited")
    monkeypatch.setattr(adapt, "set_biases", lambda model, plan: None)
    job: Any = SimpleNamespace(npu=npu, options=SimpleNamespace(NPULimitationCheck=asked, MaxLoopNum=1))
    for rule in rules.RULES:
        setattr(job.options, rule.option, None)
    assert adapt.adapt(None, None, job) == (["limited"] if npu and asked else [])  # type: ignore[arg-type]


@pytest.mark.parametrize("why", ["power_of_two", "ForceQuantizeNoInputCheck", "EnableVaimlBF16"])
def test_outputs_stay_quantized_where_one_reason_asks_for_it(why: str) -> None:
    flags = dict.fromkeys(("ForceQuantizeNoInputCheck", "EnableVaimlBF16"), False) | {"FloatOutputs": None}
    job: Any = SimpleNamespace(power_of_two=why == "power_of_two", target="npu", options=SimpleNamespace(**flags))
    if why != "power_of_two":
        setattr(job.options, why, True)
    outputs.leave_float(None, None, job)  # type: ignore[arg-type]  # nothing is looked at


@pytest.mark.parametrize(("dtype", "asked", "expected"), [
    ("FLOAT16", True, True), ("FLOAT16", False, False), ("FLOAT16", None, False), ("FLOAT", True, False),
])  # fmt: skip
def test_float16_is_quantized_in_float32_where_that_is_asked_for(
    dtype: str, asked: bool | None, expected: bool
) -> None:
    value = ir.Value(name="x", type=ir.TensorType(ir.DataType[dtype]))
    item: Any = SimpleNamespace(value=value, options=SimpleNamespace(UseFP32Scale=asked))
    assert emit._is_wide(item) is expected


@pytest.mark.parametrize(("scales", "told"), [
    ([1.0, 1.0], None), ([1.0, 1.2], "2"), ([0.85, 1.0], "1"), ([1.05, 0.95], None),
])  # fmt: skip
def test_one_scale_that_16_bits_do_not_hold_is_refused(scales: list[float], told: str | None) -> None:
    exact = np.array([1e-6, 2e-6])
    if told is None:
        parameters._check_int16(np.array(scales) * exact, exact)
        return
    with pytest.raises(ConfigError, match=f"Int16Scale cannot represent the scale {told}e-06"):
        parameters._check_int16(np.array(scales) * exact, exact)


def test_reasons_are_given_to_float_tensors_that_have_none() -> None:
    model, plan = named("g (float[2] x) => (float[2] y) { a = Relu (x) b = Exp (a) y = Abs (b) }"), Plan()
    plan.put(planned("a"))
    plan.floats["b"] = "told before"
    floats.note_floats(model, plan)
    assert set(plan.floats) == {"x", "b", "y"} and plan.floats["b"] == "told before"


@pytest.mark.parametrize(("asked", "format", "clipped"), [
    (True, "bfloat16", True), (False, "bfloat16", False), (True, "float16", False), (False, "float16", False),
])  # fmt: skip
def test_bfloat16_is_clipped_where_that_is_asked_for(asked: bool, format: str, clipped: bool) -> None:
    value = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    tensor = TensorPlan("x", "activation", TensorSpec(format), "", "x")
    made: list[tuple[str, float]] = []

    def bounds(name: str, largest: float) -> list[ir.Value]:
        made.append((name, largest))
        return [ir.Value(name="lo"), ir.Value(name="hi")]

    item: Any = SimpleNamespace(value=value, tensor=tensor, name="x", options=SimpleNamespace(BF16WithClip=asked))
    item.node = lambda op, inputs, attributes, kind: ir.node(op, inputs)
    item.parameters = SimpleNamespace(bounds=bounds, names=SimpleNamespace(fresh=lambda name: name))
    found, source = activation_nodes._clipped(item)
    assert [node.op_type for node in found] == (["Clip"] if clipped else [])
    assert source is (found[0].outputs[0] if clipped else value)
    assert made == ([("bfloat16", float.fromhex("0x1.fep127"))] if clipped else [])


@pytest.mark.parametrize("scale", [None, 1.0, 4.0])
@pytest.mark.parametrize("clip", [True, False])
def test_a_cast_divides_before_and_multiplies_after_where_there_is_a_scale(scale: float | None, clip: bool) -> None:
    value = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    tensor = TensorPlan("x", "activation", TensorSpec("bfloat16"), "", "x")
    tensor = replace(tensor, scale=None if scale is None else np.float32(scale))
    item: Any = SimpleNamespace(value=value, tensor=tensor, name="x", options=SimpleNamespace(BF16WithClip=clip))
    item.node = lambda op, inputs, attributes, kind="", dtype=None: ir.node(op, inputs, attributes)
    own, bounds = ir.Value(name="scale"), [ir.Value(name="lo"), ir.Value(name="hi")]
    item.parameters = SimpleNamespace(of=lambda given: (own, None), bounds=lambda *given: bounds)
    found = activation_nodes._cast(item)
    scaled = scale not in (None, 1.0)
    kinds = ["Clip"] * clip + ["Div"] * scaled + ["Cast", "Cast"] + ["Mul"] * scaled
    assert [node.op_type for node in found] == kinds
    assert [node.inputs[0] for node in found] == [value, *(node.outputs[0] for node in found[:-1])]
    assert all(node.inputs[1] is own for node in found if node.op_type in ("Div", "Mul"))
    types = [node.attributes["to"].as_int() for node in found if node.op_type == "Cast"]
    assert types == [int(ir.DataType.BFLOAT16), int(ir.DataType.FLOAT)]


@pytest.mark.parametrize(("op_type", "shape", "axis"), [
    ("Conv", (), 0), ("Conv", (8,), 0), ("Conv", (4, 8), 1), ("Conv", (4, 8, 3, 3), 1), ("MatMul", (8,), 0),
    ("MatMul", (8, 4), 0), ("MatMul", (2, 8, 4), 1), ("Gemm", (8, 4), 0),
])  # fmt: skip
def test_blocks_of_a_weight_run_along_what_is_summed(op_type: str, shape: tuple[int, ...], axis: int) -> None:
    weight = ir.Value(name="w", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node(op_type, [ir.Value(name="x"), weight])
    found = place._for_weight(TensorSpec("bfp16"), node, OP_RULES[op_type], weight, None)  # type: ignore[arg-type]
    assert found.granularity == Group(axis, 8)


@pytest.mark.parametrize(("kind", "constant_", "expected"), [
    ("FLOAT", True, True), ("FLOAT", False, False), ("INT32", True, False), ("INT32", False, False),
])  # fmt: skip
def test_a_bias_is_a_float_constant(kind: str, constant_: bool, expected: bool) -> None:
    bias = constant(2) if constant_ else ir.Value(name="b", shape=ir.Shape([2]))
    bias.type = ir.TensorType(ir.DataType[kind])
    node = ir.node("Conv", [ir.Value(name="x"), ir.Value(name="w"), bias])
    assert (slots.bias_input(node, OP_RULES["Conv"]) is bias) is expected


@pytest.mark.parametrize(("npu", "checked"), [(True, True), (True, False), (False, False)])
def test_operators_are_aligned_for_other_targets_that_ask_for_it(npu: bool, checked: bool) -> None:
    job: Any = SimpleNamespace(npu=npu, options=SimpleNamespace(NPULimitationCheck=checked))
    align.align(None, None, job)  # type: ignore[arg-type]  # nothing is looked at


@pytest.mark.parametrize(("wanted", "pairs"), [(False, False), (True, True), (False, True)])
def test_tables_stay_float_unasked_or_beside_pairs_on_weights(wanted: bool, pairs: bool) -> None:
    job: Any = SimpleNamespace(options=SimpleNamespace(QuantizeEmbeddings=wanted, AddQDQPairToWeight=pairs))
    tables.store_tables(None, None, job, {}, [])  # type: ignore[arg-type]  # nothing is looked at


def test_only_float_constants_are_tables() -> None:
    spec = TensorSpec("int8", granularity=Channel(0))
    computed = ir.Value(name="t", shape=ir.Shape([2048, 32]), type=ir.TensorType(ir.DataType.FLOAT))
    numbers = constant(2048, 32)
    numbers.type = ir.TensorType(ir.DataType.INT64)
    for table in (computed, numbers):
        ir.node("Gather", [table, ir.Value(name="i")])
        assert not tables._suits(table, Plan(), spec)


@pytest.mark.parametrize("kind", ["float", "float16"])
def test_the_steps_of_a_softmax_end_in_its_type(kind: str) -> None:
    model = named(f"g ({kind}[2, 3] x) => ({kind}[2, 3] y) {{ y = Softmax (x) }}")
    node = model.graph[0]
    softmax.rewrite(node, node, Names(model))
    last = model.graph.outputs[0].producer()
    assert last is not None and last.op_type == "Cast"
    assert last.attributes["to"].as_int() == int(ir.DataType.FLOAT16 if kind == "float16" else ir.DataType.FLOAT)


@pytest.mark.parametrize("missing", [None, "inputs", "weight", "plan"])
def test_a_bias_has_the_product_of_two_scales_where_there_are_two(missing: str | None) -> None:
    node = named("g (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y) { y = Conv (x, w, b) }",
                 {"w": models.normal(4, 4, 1, 1), "b": models.normal(4)}).graph[0]  # fmt: skip
    plan = Plan()
    for name, role in (("x", "activation"), ("w", "weight")):
        if not (missing == "plan" and name == "w"):
            plan.put(planned(name, role))
    spec = TensorSpec("int8")
    layer = LayerSpec(None if missing == "inputs" else spec, None if missing == "weight" else spec, None, None)
    bias = node.inputs[2]
    assert bias is not None
    found = biases.shared_scale(node, layer, bias, plan)
    assert (None if found is None else found.name) == ("w" if missing is None else None)


def test_a_dynamic_plan_knows_its_nodes_by_name() -> None:
    text = "g (float[3, 6] x) => (float[3, 6] z) { y = MatMul (x, w) z = MatMul (y, v) }"
    weights = {"w": models.normal(6, 6), "v": models.normal(6, 6, seed=1)}
    job = QConfig.get_default_config("UINT8_DYNAMIC_QUANT").compile()
    prepared = prepare(load(models.model(text, weights, 17)), job)
    plan = dynamic.place_dynamic(prepared.model, prepared.job)
    names = [str(node.name) for node in prepared.model.graph]
    assert [(name, node.name, node.quantized) for name, node in plan.nodes.items()] == [(n, n, True) for n in names]
    readers = {tensor.name: tensor.readers for tensor in plan if tensor.readers is not None}
    assert readers == {"x": {names[0]}, "w": {names[0]}, "y": {names[1]}, "v": {names[1]}}


@pytest.mark.parametrize(("scaled", "scale"), [(False, 1.0), (True, 1.5)])
def test_floats_that_need_no_scale_have_one_where_the_device_wants_it(scaled: bool, scale: float) -> None:
    """bfloat16 is reduced to -2..2 there: the larger side of -3..1 lies at 2."""
    plan = Plan()
    tensor = TensorPlan("w", "weight", TensorSpec("bfloat16"), "", "w")
    parameters._set_weight(plan, tensor, np.array([-3.0, 1.0], np.float32), scaled, None)
    found = plan.tensors["w"]
    assert float(np.asarray(found.scale)) == scale and int(np.asarray(found.zero_point)) == 0
    assert (found.range is not None) is scaled


@pytest.mark.parametrize(("format", "told"), [(None, True), ("int32", True), ("int8", False)])
def test_biases_that_the_runtime_sees_as_float(format: str | None, told: bool) -> None:
    """Those that stay float, and 32-bit codes at a scale of their own."""
    model = named("g (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y) { y = Conv (x, w, b) }",
                  {"w": models.normal(4, 4, 1, 1), "b": models.normal(4)})  # fmt: skip
    plan = Plan()
    plan.put(planned("x"))
    plan.put(planned("w", "weight"))
    if format is not None:
        plan.put(TensorPlan("b", "weight", TensorSpec(format), "", "b"))
    found = [(one.name, one.role, one.bias_of) for one in float_biases.float_biases(model, plan)]
    assert found == ([("b", "bias", ("x", "w"))] if told else [])


SHIFTS = {
    "sum": (rules.write_add, -7, 25, min),
    "product": (rules.write_mul, 0, 32, sum),
    "swish": (rules.shift_swish, 0, 15, sum),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_results_stay_within_the_shifter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every distance of the result from its operands, up to the first that is too far on either side."""
    rule, low, high, total_of = SHIFTS[name]
    places = {"a": 5, "b": 4}
    monkeypatch.setattr(rules, "_inputs", lambda node, at: ["a", "b"])
    monkeypatch.setattr(rules, "_is_swish", lambda node: True)
    monkeypatch.setattr(rules, "_at", lambda at, name: places[name])
    at: Any = SimpleNamespace(written=lambda node: "y")
    total = total_of(places[one] for one in ("a", "b"))
    for shift in range(low - 3, high + 4):
        places["y"] = total - shift
        expected = total - (low if shift < low else high if shift > high else shift)
        assert list(rule(None, at)) == [("y", expected)]  # type: ignore[arg-type]


@pytest.mark.parametrize("count", range(6))
def test_tensors_on_which_rules_disagree_are_told_three_of_them(count: int) -> None:
    rule: Any = SimpleNamespace(name="r")
    told = limits._unsettled([limits.MovedTensor(rule, f"t{k}", k) for k in range(count)])
    assert len(told) == (count > 0)
    for note in told:
        shown = [f"t{k}" for k in range(min(count, 3))] + ["…"] * (count > 3)
        assert f"{count} tensors ({', '.join(shown)})" in note


def test_counted_samples_are_complete_once() -> None:
    saved: list[bool] = []
    found: Any = SimpleNamespace(_journal=True, complete=False)
    found._save = lambda: saved.append(found.complete)
    for _ in range(2):
        counted.CountedSamples.close(found)
    found._journal, found.complete = False, False
    counted.CountedSamples.close(found)
    assert saved == [True] and not found.complete


def test_a_softmax_in_no_graph_stays() -> None:
    node = ir.node("Softmax", [ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))])
    assert softmax.rewrite(node, node, None) is False  # type: ignore[arg-type]
    model = named("g (float[2] x) => (float[2] y) { y = Softmax (x) }", {})
    assert softmax.rewrite(model.graph[0], model.graph[0], Names(model)) is True


def test_operators_that_exist_are_those_of_onnx_of_its_runtime_and_ours() -> None:
    found = op_type_names.existing_types()
    assert {schema.name for schema in onnx.defs.get_all_schemas()} <= found
    assert op_type_names.runtime_types() <= found and set(OPERATORS) <= found
    assert "FusedConv" in found and "Conv" in found and "Convolution" not in found


@pytest.mark.parametrize(("rule", "method"), [("float32", "minmax"), ("power_of_two", "mse")])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
def test_a_constant_operand_is_searched_on_its_values(rule: Any, method: str, own: bool, aligned: bool) -> None:
    """With its own settings, not with those of another method, which nothing would read."""
    settings = (("mode", "All"),)
    inputs = TensorSpec("uint8", scale_rule=rule, method=method if own else "percentile", settings=settings)
    weight = replace(inputs, format="int8", granularity=Channel(0))
    job: Any = SimpleNamespace(options=SimpleNamespace(AlignEltwiseQuantType=aligned))
    found = place._for_operand(LayerSpec(inputs=inputs, weight=weight), job)
    assert (found.format, found.granularity) == (("uint8", inputs.granularity) if aligned else ("int8", Tensor()))
    assert found.method == method and found.settings == (settings if own else ())


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_nodes_that_an_earlier_run_left_are_left_unless_they_are_asked_for(
    chosen: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = named("g (float[2] x) => (float[2] y) { y = Relu (x) }", {})
    node, left = model.graph[0], list[Any]()
    monkeypatch.setattr(place, "_asked_for", lambda node, placement: asked)
    monkeypatch.setattr(place, "_leave", lambda node, *others: left.append(node))
    placement: Any = SimpleNamespace(model=model)
    entry: Any = (OP_RULES["Relu"], LayerSpec())
    place._leave_tuned([node.name or ""], {node: entry if chosen else None}, placement)
    assert left == ([node] if chosen and not asked else [])


@pytest.mark.parametrize("exponents", [[-2.0], [0.0], [2.0], [2.0, -1.0], [0.0, 3.0]])
def test_a_negative_power_divides(exponents: list[float]) -> None:
    model = named("g (float[2] x) => (float[2] y) { y = Pow (x, e) }", {"e": np.array(exponents, np.float32)})
    found = divisors._divisor(model.graph[0])
    assert found is (model.graph.inputs[0] if min(exponents) < 0 else None)


@pytest.mark.parametrize("version", [11, 12, 13, 17])
@pytest.mark.parametrize(("axis", "newer", "older"), [(None, 1, 300), (1, 300, 300), (2, 1, 1), (0, 5, 1500)])
def test_what_a_softmax_sums(axis: int | None, newer: int, older: int, version: int) -> None:
    """One axis, the last unasked; before opset 13 all from an axis on, the second unasked."""
    told = "" if axis is None else f"<axis = {axis}>"
    model = named(f"g (float[5, 300, 1] x) => (float[5, 300, 1] y) {{ y = Softmax{told} (x) }}")
    step = constant()
    step.const_value = ir.tensor(np.array(1.0, np.float32))
    model.graph.append(ir.node("QuantizeLinear", [model.graph[0].outputs[0], step]))
    summed = newer if version >= 13 else older
    assert runtime_faults._overflows(model.graph[0], version) is (summed <= 2)


@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_a_plain_gemm_alone_is_a_product_of_blocks(turned: int, alpha: float, beta: float) -> None:
    told = f"<transA = {turned}, alpha = {alpha}, beta = {beta}>"
    model = named(f"g (float[8, 8] x) => (float[8, 8] y) {{ y = Gemm{told} (x, w) }}", {"w": models.normal(8, 8)})
    why = nbits._why_float(model.graph[0], nbits.NBits(), Options(), None)
    assert (why is None) is (not turned and alpha == beta == 1.0)


@pytest.mark.parametrize("missing", [None, 0, 1])
@pytest.mark.parametrize("sixth", [False, True])
def test_the_table_of_the_device_needs_both_positions_and_its_slope(
    missing: int | None, sixth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "is_sixth", lambda node: sixth)
    monkeypatch.setattr(rules, "_at", lambda at, name: {"x": 20, "y": 2}[name])
    at: Any = SimpleNamespace(
        read=lambda node, slot: None if missing == 0 else "x", written=lambda node: None if missing == 1 else "y"
    )
    found = list(rules.hard_sigmoid(None, at))  # type: ignore[arg-type]
    assert found == ([("x", 15), ("y", 7)] if missing is None and sixth else [])


def test_neighbours_are_beside_float_values_that_are_there() -> None:
    model = named("""g (float[4] x, int64[4] i) => (float[4] y, int64[4] j) { a = Relu (x) k = Neg (i)
        b = Clip (a, , high) y = Gather (b, k) j = Abs (k) }""", {"high": np.array(6, np.float32)})  # fmt: skip
    nodes = {node.op_type: node for node in model.graph}
    for name, beside in {"Clip": "Relu Gather", "Gather": "Clip", "Relu": "Clip", "Neg": "", "Abs": ""}.items():
        assert [node.op_type for node in isolated._neighbours(nodes[name])] == beside.split()


IF = "If (c) <then_branch = t () => (float[2] a) {a = Relu (x)}, else_branch = e () => (float[2] b) {b = Neg (x)}>"


@pytest.mark.parametrize("domain", ["", "own"])
@pytest.mark.parametrize("text", [IF, "Relu (x)"])
def test_there_are_no_rules_for_other_domains_and_for_bodies(domain: str, text: str) -> None:
    node = named(f"g (float[2] x, bool c) => (float[2] y) {{ y = {text} }}").graph[-1]
    node.domain, node.meta[slots.STAYS_FLOAT] = domain, "added"
    decisions = {node.name or "": SimpleNamespace(layer=LayerSpec(), reason="asked")}
    placement: Any = SimpleNamespace(job=SimpleNamespace(options=Options()), decisions=decisions)
    why = str(place._why_float(node, placement))
    assert why.startswith("no rule") if domain or text == IF else why == "added"


@pytest.mark.parametrize("dtype", [ir.DataType.INT8, ir.DataType.UINT8])
@pytest.mark.parametrize("known", [False, True])
def test_codes_with_a_sign_that_are_no_constant_are_computed(
    dtype: ir.DataType, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = ir.Value(name="v", type=ir.TensorType(dtype))
    monkeypatch.setattr(runtime_faults, "is_constant", lambda value: known)
    assert runtime_faults._is_computed_int8(value) is (dtype == ir.DataType.INT8 and not known)
    assert not runtime_faults._is_computed_int8(None)
