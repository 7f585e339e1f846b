"""Conditions of the ONNX rules on both of their sides, with what follows from what they are said to decide."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.test_asked_directly import named, planned
from tests.onnx_flow.test_rules_directly import constant

from quark.config.options import Options
from quark.config.plan import NodePlan, Plan, TensorPlan
from quark.config.tensor import LayerSpec, TensorSpec
from quark.errors import ModelError
from quark.ir import runtime_faults
from quark.numerics.granularity import Channel, Group, Tensor
from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.npu import fixed_point, rules, simulate
from quark.onnx.qdq import biases, dynamic, emit, masks, node_kinds, parameters, place, settings, slower, tables
from quark.onnx.qdq.op_rules import OP_RULES


@pytest.mark.parametrize(("numbers", "expected"), [
    ([0.5, -0.5], False), ([0.0, -1e9], True), (np.array([0, -(10**9)]), False), ([], False),
])  # fmt: skip
def test_a_float_constant_with_one_number_far_out_is_a_mask(numbers: Any, expected: bool) -> None:
    value = constant(2)
    array = numbers if isinstance(numbers, np.ndarray) else np.array(numbers, np.float32)
    value.const_value = ir.tensor(array)
    value.type = ir.TensorType(ir.DataType.INT64 if array.dtype.kind == "i" else ir.DataType.FLOAT)
    assert masks.reads_mask(ir.node("Add", [ir.Value(name="x"), value])) is expected
    assert not masks.reads_mask(ir.node("Relu", [value]))


@pytest.mark.parametrize("beta", [1.0, 0.5])
@pytest.mark.parametrize("biased", [True, False])
def test_a_dynamic_gemm_adds_beta_times_its_bias(beta: float, biased: bool) -> None:
    weights = {"w": models.normal(6, 6)} | ({"b": 30 * models.normal(6)} if biased else {})
    body = f"y = Gemm<beta = {beta}> (x, w{', b' if biased else ''})"
    proto = models.model(f"g (float[3, 6] x) => (float[3, 6] y) {{ {body} }}", weights, 17)
    made = ModelQuantizer(QConfig.get_default_config("UINT8_DYNAMIC_QUANT")).quantize_model(proto, None, None)
    assert made is not None and "MatMulInteger" in {node.op_type for node in made.graph.node}
    x = models.feeds(proto)
    expected = x["x"].astype(float) @ weights["w"] + (beta * weights["b"] if biased else 0)
    assert np.abs(models.run(made, x)[0] - expected).max() < 0.3


@pytest.mark.parametrize(("dropped", "kept"), [((), ["alpha", "beta"]), (("alpha",), ["beta"]), (("gamma",), None)])
def test_attributes_that_a_rewritten_node_keeps(dropped: tuple[str, ...], kept: list[str] | None) -> None:
    node = ir.node("Gemm", [ir.Value(name="x")], attributes={"alpha": 2.0, "beta": 3.0})
    assert [one.name for one in dynamic.kept_attributes(node, dropped)] == (kept or ["alpha", "beta"])


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize(("simulated", "npu", "stated", "given", "expected"), [
    (False, True, True, True, False), (True, True, False, None, True), (True, False, True, None, True),
    (True, False, False, None, False), (True, False, False, True, True), (True, True, True, False, False),
])  # fmt: skip
def test_which_rewrites_of_the_device_a_job_has(
    default: bool, simulated: bool, npu: bool, stated: bool, given: bool | None, expected: bool
) -> None:
    """Its own option decides; without one, NPU flows and those that ask have the rewrites that are on by default."""
    options = SimpleNamespace(SimulateDPU=simulated, Own=given, given={"SimulateDPU"} if stated else set())
    job: Any = SimpleNamespace(options=options, npu=npu)
    row: Any = SimpleNamespace(option="Own", by_default=default)
    assert simulate.asked(row, job) is (expected and (default or given is not None))


@pytest.mark.parametrize(("whole", "some", "expected"), [
    (10.0, True, 1.0), (40.0, True, 2.0), (500.0, True, 25.0), (2000.0, True, 50.0), (20000.0, True, 100.0),
    (10.0, False, 15.0), (20000.0, False, 100.0),
])  # fmt: skip
def test_what_has_to_be_saved(whole: float, some: bool, expected: float) -> None:
    """Half a percent; 50 µs, of small models 5 % but a µs; those of which nothing would stay quantized: 15 µs."""
    assert slower._least(whole, some) == pytest.approx(expected)
    least = 0.005 * whole
    assert slower._least(whole / 10, some, 10) == pytest.approx(max(least, expected) / 10), "the same in ten parts"


@pytest.mark.parametrize(("needed", "steps"), [(0.0, 0), (0.5, 0), (1.0, 0), (1.5, 1), (2.0, 1), (3.0, 2), (8.0, 3)])
@pytest.mark.parametrize("channels", [True, False])
def test_a_bias_of_16_bits_doubles_its_scale_until_it_fits(needed: float, steps: int, channels: bool) -> None:
    """``needed``: the bias over 32767 products of scales."""
    scale = np.array([2.0**-8, 2.0**-8], np.float32) if channels else np.float32(2.0**-8)
    bias = np.array([needed * 32767, -1]) * 2.0**-8
    found = parameters._shifted(np.asarray(scale), bias)
    expected = np.array([2.0**steps, 1.0]) if channels else 2.0**steps
    np.testing.assert_array_equal(found, expected * 2.0**-8)


@pytest.mark.parametrize(("body", "target", "asked", "format"), [
    ("y = Relu (x)", "npu", True, "uint8"), ("y = Relu (x)", "npu", False, "int8"),
    ("y = Clip (x, zero, six)", "npu", True, "uint8"), ("y = Clip (x, one, six)", "npu", True, "int8"),
    ("y = Clip (x)", "npu", True, "int8"), ("y = Sigmoid (x)", "npu", True, "int8"),
    ("y = Sigmoid (x)", "cpu", True, "uint8"), ("y = Tanh (x)", "cpu", True, "int8"),
])  # fmt: skip
def test_results_that_are_never_negative_are_unsigned(body: str, target: str, asked: bool, format: str) -> None:
    numbers = {"zero": 0.0, "one": 1.0, "six": 6.0}
    weights = {name: np.array(value, np.float32) for name, value in numbers.items() if name in body}
    node = named(f"g (float[4] x) => (float[4] y) {{ {body} }}", weights).graph[0]
    job: Any = SimpleNamespace(target=target, options=SimpleNamespace(UseUnsignedReLU=asked))
    found = place._for_output(TensorSpec("int8", symmetric=True), node, job)
    assert (found.format, found.symmetric) == (format, format == "int8")


@pytest.mark.parametrize(("shape", "given", "expected"), [
    ((4, 3), Channel(0), Channel(1)), ((4, 3), Tensor(), Tensor()), ((4,), Channel(0), Tensor()),
    ((4,), Tensor(), Tensor()),
])  # fmt: skip
def test_weights_have_the_channels_of_their_operator(shape: tuple[int, ...], given: Any, expected: Any) -> None:
    node = ir.node("MatMul", [ir.Value(name="x"), constant(*shape)])
    job: Any = SimpleNamespace(options=SimpleNamespace(QDQOpTypePerChannelSupportToAxis={}))
    found = place._for_weight(TensorSpec("int8", granularity=given), node, OP_RULES["MatMul"], constant(*shape), job)
    assert found.granularity == expected


@pytest.mark.parametrize("outputs", [True, False])
def test_what_is_said_about_outputs_holds_behind_the_activation(outputs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = named("g (float[2] x) => (float[2] y) { a = Neg (x) y = Relu (a) }"), Plan()
    plan.put(planned("y"))
    layer = SimpleNamespace(outputs=TensorSpec("int16") if outputs else None)
    decision = SimpleNamespace(outputs=outputs, layer=layer, reason="told", rank=5)
    monkeypatch.setattr(
        place.fuse, "fused_producer", lambda node, plan, job: model.graph[0] if node.op_type == "Relu" else None
    )
    job: Any = SimpleNamespace(target="cpu", options=SimpleNamespace(UseUnsignedReLU=False))
    decisions: Any = {"n1": decision}
    place._carry_outputs(place.Placement(model, job, decisions, plan))
    assert plan.tensors["y"].spec.format == ("int16" if outputs else "int8")


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("off", [True, False])
@pytest.mark.parametrize("format", ["int8", "int32"])
@pytest.mark.parametrize("role", ["weight", "bias"])
def test_constants_that_the_runtime_would_misread_are_folded(
    alone: bool, off: bool, format: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes for one reader, 32-bit codes of a weight, or scales off the output channels: any of them."""
    monkeypatch.setattr(emit, "is_alone", lambda tensor: alone)
    monkeypatch.setattr(emit, "is_off_channel", lambda node, value, spec: off)
    monkeypatch.setattr(emit, "constant_kind", lambda spec, options: "standard")
    item: Any = SimpleNamespace(tensor=TensorPlan("w", role, TensorSpec(format), "", "w"), value=None, options=None)
    assert emit._must_fold(item, [SimpleNamespace(node=None)]) is (
        role == "weight" and (alone or off or format == "int32")
    )


@pytest.mark.parametrize(("bins", "memory", "disk", "expected"), [
    (None, False, False, {"keep"}), (512, False, False, {"bins", "keep"}), (None, True, True, set()),
    (512, True, True, {"bins"}), (None, True, False, {"keep"}), (0, True, True, {"keep"}),
])  # fmt: skip
def test_values_are_kept_for_methods_that_look_twice(bins: Any, memory: bool, disk: bool, expected: set[str]) -> None:
    """Unless both options that save memory are on; without bins the values are all there is."""
    method = settings._LOOK_TWICE[0] if isinstance(settings._LOOK_TWICE, tuple) else next(iter(settings._LOOK_TWICE))
    options: Any = SimpleNamespace(NumBins=bins, CalibOptimizeMem=memory, CalibOptimizeDisk=disk)
    found = settings._statistic(method, options, lambda: None)  # type: ignore[arg-type, return-value]
    assert set(found) == expected and found.get("bins") == (bins or None)


@pytest.mark.parametrize(("known", "written"), [(True, True), (False, True), (True, False)])
def test_branches_without_a_position_move_nothing(known: bool, written: bool) -> None:
    node = ir.node("Concat", [ir.Value(name="a"), ir.Value(name="b")])
    at: Any = SimpleNamespace(
        read=lambda node, slot: ("a", "b" if known else None)[slot], always_zero=lambda name: False
    )
    at.written, at.of = lambda node: "y" if written else None, {"a": 5, "b": 3, "y": 4}.get
    moves = dict(rules.align_concat(node, at))
    assert moves == ({"y": 3, "a": 3, "b": 3} if known and written else {})


@pytest.mark.parametrize("values", [[1.0, 0.0, -2.0], [0.0, 0.0, 0.0]])
def test_the_range_of_a_constant_is_that_of_its_values(values: list[float]) -> None:
    plan = Plan()
    tensor = TensorPlan("w", "weight", TensorSpec("int8"), "", "w")
    parameters._set_weight(plan, tensor, np.array(values, np.float32), False, None)
    assert [float(side) for side in plan.tensors["w"].range or ()] == [min(values), max(values)]
    parameters._set_weight(plan, tensor, np.array(values, np.float32), False, (np.float32(-3), np.float32(3)))
    assert [float(side) for side in plan.tensors["w"].range or ()] == ([-3, 3] if any(values) else [0, 0])


@pytest.mark.parametrize(("scale", "zero", "expected"), [
    (1 / 256, "INT8", False), (1 / 256.5, "INT8", True), (1 / 128, "INT8", False), (1 / 128, "UINT8", True),
    (1 / 128, None, True),
])  # fmt: skip
def test_softmax_over_an_axis_of_unknown_length(scale: float, zero: str | None, expected: bool) -> None:
    """Signed codes from 1 / 256 on are those of devices; others may sum too few entries."""
    model = named("g (float[n] x) => (float[n] y) { y = Softmax (x) }")
    node = model.graph[0]
    node.inputs[0].shape = None  # type: ignore[union-attr]
    step, point = constant(), constant(alone=True)
    step.const_value = ir.tensor(np.array(scale, np.float32))
    point.type = ir.TensorType(ir.DataType[zero or "INT8"])
    model.graph.append(ir.node("QuantizeLinear", [node.outputs[0], step, *([point] if zero else [])]))
    assert runtime_faults._overflows(node, 17) is expected


@pytest.mark.parametrize("quantized", [True, False])
def test_a_node_that_is_left_computes_in_float(quantized: bool) -> None:
    plan = Plan(nodes={"n": NodePlan("n", "Relu", quantized, "chosen")})
    plan.leave_node("n", "slow")
    assert plan.nodes == {"n": NodePlan("n", "Relu", False, "slow")}


@pytest.mark.parametrize(("format", "alone", "grouped"), [
    ("int8", "standard", "cast"), ("uint8", "standard", "cast"), ("int4", "standard", "standard"),
    ("uint16", "standard", "standard"), ("fp8_e4m3", "cast", "cast"), ("uint2", "cast", "cast"),
])  # fmt: skip
def test_constants_of_8_bits_in_groups_are_read_by_a_cast(format: str, alone: str, grouped: str) -> None:
    for granularity, expected in ((Channel(0), alone), (Group(-1, 32), grouped)):
        assert node_kinds.constant_kind(TensorSpec(format, granularity=granularity), Options()) == expected


@pytest.mark.parametrize(("bits", "rank", "one"), [("int8", 2, False), ("int8", 3, True), ("int16", 3, False)])
def test_stacked_matrices_of_integer_kernels_have_one_scale(bits: str, rank: int, one: bool) -> None:
    node = ir.node("MatMul", [ir.Value(name="x"), ir.Value(name="w")])
    weight = ir.Value(name="w", shape=ir.Shape([4] * rank))
    job: Any = SimpleNamespace(options=Options())
    spec = place._for_weight(TensorSpec(bits, granularity=Channel(0)), node, OP_RULES["MatMul"], weight, job)
    assert (spec.granularity == Tensor()) is one


@pytest.mark.parametrize(("number", "expected"), [(None, True), (0, False), (1, False), (2, False)])
def test_a_table_is_stored_as_codes_where_every_row_is_near_them(number: int | None, expected: bool) -> None:
    """Of a small table every row is looked at: in one with a number far out the others are lost."""
    rows = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    if number is not None:
        rows[number], rows[number, 0] = 0.39, 100
    table = constant(3, 64)
    table.const_value = ir.tensor(rows)
    assert tables._is_faithful(table, TensorSpec("int8", granularity=Channel(0))) is expected


@pytest.mark.parametrize(
    ("share", "expected"), [(0.49, True), (0.5, False), (0.51, False), (np.inf, False), (np.nan, False)]
)
def test_codes_reach_half_of_what_float32_does(share: float, expected: bool) -> None:
    table, rows = constant(2, 64), np.zeros((2, 64), np.float32)
    for sign in (1, -1):
        rows[1, 3] = sign * share * np.finfo(np.float32).max
        table.const_value = ir.tensor(rows)
        assert tables._is_faithful(table, TensorSpec("int8", granularity=Channel(0))) is expected


@pytest.mark.parametrize(
    ("side", "factor"),
    [(2, 1.0), (4, 1.0), (7, 49 * 21 / 2**10), (9, 81 * 101 / 2**13), (255, 65025 * 65 / 2**22), (256, 1.0)],
)
def test_what_a_pool_of_the_device_multiplies_by(side: int, factor: float) -> None:
    """The multiple of 2**-s nearest to one over the number of values, of up to six bits more than that has."""
    node = ir.node("AveragePool", [ir.Value(name="x")], attributes={"kernel_shape": [side, side]})
    assert fixed_point.of_pool(node) == factor


@pytest.mark.parametrize("reason", [slower.REASON, slower.TUNED, "it is excluded"])
@pytest.mark.parametrize("left", [True, False])
def test_all_is_float_where_nothing_is_left_that_is_faster_otherwise(reason: str, left: bool) -> None:
    plan = Plan(nodes={"n": NodePlan("n", "Relu", False, reason)})
    if not left:
        plan.put(planned("x"))
    assert slower.all_in_float(plan) is (left and reason != "it is excluded")


@pytest.mark.parametrize("missing", ["inputs", "weight", "second input", "tensor", None])
def test_a_bias_shares_the_scales_of_what_is_quantized(missing: str | None) -> None:
    model = named("g (float[2, 4] x) => (float[2, 4] y) { y = Gemm (x, w, b) }", {
        "w": models.normal(4, 4), "b": models.normal(4)})  # fmt: skip
    node, plan = model.graph[0], Plan()
    specs = {name: None if name == missing else TensorSpec("int8") for name in ("inputs", "weight")}
    if missing != "tensor":
        plan.put(planned("w", "weight"))
    weight, bias = node.inputs[1], node.inputs[2]
    if missing == "second input":
        node.replace_input_with(1, None)
    found = biases.shared_scale(node, LayerSpec(**specs), bias, plan)  # type: ignore[arg-type]
    assert found is (weight if missing is None else None)


@pytest.mark.parametrize("channels", [True, False])
def test_a_bias_has_the_product_of_scales_and_no_zero_point(channels: bool) -> None:
    plan = Plan()
    step = np.array([0.5, 0.25], np.float32) if channels else np.float32(0.5)
    plan.put(planned("x", scale=np.float32(0.5), zero_point=np.int32(3)))
    plan.put(planned("w", "weight", scale=step, zero_point=np.zeros(np.shape(step), np.int32)))
    bias = TensorPlan("b", "bias", TensorSpec("int32"), "", "b", bias_of=("x", "w"))
    parameters._set_bias(plan, bias, np.array([1.0, 2.0], np.float32))
    found = plan.tensors["b"]
    assert np.asarray(found.zero_point).tolist() == np.zeros(np.shape(found.scale)).tolist()
    assert (np.asarray(found.scale) == 0.5 * step).all()


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf, None])
def test_one_number_that_is_none_makes_a_weight_of_4_bits_refused(broken: float | None) -> None:
    weight = models.normal(64, 8)
    if broken is not None:
        weight[40, 3] = broken
    proto = models.model("g (float[2, 64] x) => (float[2, 8] y) { y = MatMul (x, w) }", {"w": weight}, 17)
    config = QConfig.get_default_config("MATMUL_NBITS")
    with nullcontext() if broken is None else pytest.raises(ModelError, match="'w' holds NaN or infinity"):
        ModelQuantizer(config).quantize_model(proto, None, None)


@pytest.mark.parametrize(("size", "expected"), [(3, True), (4, True), (5, False)])
def test_masks_have_a_largest_size(size: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_SIZE_LIMIT", 4)
    value = constant(size)
    value.const_value = ir.tensor(np.array([-1e9] + [0.0] * (size - 1), np.float32))
    assert masks.reads_mask(ir.node("Add", [ir.Value(name="x"), value])) is expected


@pytest.mark.parametrize(("options", "rank", "expected"), [
    ({}, 0, False), ({}, 1, True), ({}, 2, True), ({"QuantizeAllOpTypes": True}, 0, True),
    ({"NodesToQuantize": ["n"]}, 0, True), ({"OpTypesToQuantize": ["Relu"]}, 0, True),
    ({"ExtraOpTypesToQuantize": ["Relu"]}, 0, True), ({"NodesToQuantize": ["m"]}, 0, False),
])  # fmt: skip
def test_what_a_configuration_names_is_asked_for(options: dict[str, Any], rank: int, expected: bool) -> None:
    job = SimpleNamespace(options=Options(**options))
    placement: Any = SimpleNamespace(job=job, decisions={"n": SimpleNamespace(rank=rank)})
    assert place._asked_for(ir.node("Relu", [], name="n"), placement) is expected


@pytest.mark.parametrize(("carrier", "reader", "below", "copied"), [
    ("DequantizeLinear", "Conv", True, False), ("DequantizeLinear", "Transpose", True, True),
    ("Transpose", "Conv", True, True), ("Transpose", "Conv", False, False),
    ("DequantizeLinear", "Transpose", False, False),
])  # fmt: skip
def test_what_a_body_moves_or_reads_moved_is_a_copy(
    carrier: str, reader: str, below: bool, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [ir.node("DequantizeLinear", [ir.Value(name="codes"), ir.Value(name="scale")])]
    if carrier != "DequantizeLinear":
        nodes.append(ir.node(carrier, nodes[0].outputs))
    use = ir.node(reader, nodes[-1].outputs)
    model: Any = SimpleNamespace(graph=ir.Graph([], [], nodes=[*nodes, *([] if below else [use])]))
    body = ir.Graph([], [], nodes=[use] if below else [])
    made: list[str] = []
    monkeypatch.setattr(runtime_faults, "_copy", lambda graph, node, uses, names: made.append(node.op_type))
    runtime_faults._put_copies(model, None)  # type: ignore[arg-type]
    assert made == [carrier] * copied and len(body) == below
