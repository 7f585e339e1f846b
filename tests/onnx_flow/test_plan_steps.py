"""Every step of placement by itself, on graphs of a few nodes and plans written by hand: what it takes and leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from quark.config.plan import NodePlan, Plan, TensorPlan
from quark.config.tensor import TensorSpec
from quark.errors import ConfigError
from quark.ir import surgery
from quark.numerics.granularity import Channel, Granularity, Group, Tensor
from quark.onnx import Int8Spec, QConfig, QLayerConfig, XInt8Spec
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.qdq import (
    align,
    biases,
    block_axes,
    channel_axes,
    divisors,
    dual_pairs,
    float_biases,
    fuse,
    isolated,
    masks,
    outputs,
    own_inputs,
    passthrough,
    second_type,
    slots,
    small_weights,
)
from quark.onnx.qdq.op_rules import OP_RULES

INT8, INT16 = TensorSpec("int8"), TensorSpec("int16")
UINT8 = TensorSpec("uint8", symmetric=False)
BLOCKS = TensorSpec("mxfp8_e4m3", granularity=Group(1, 32))


def graph(inputs: str, results: str, body: str, opset: int = 17, **weights: Any) -> ir.Model:
    """A model from text and arrays."""
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g ({inputs}) => ({results}) {{ {body} }}'
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in weights.items())
    model = ir.from_proto(proto)
    infer_shapes(model)
    return model


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def planned(*names: str, spec: TensorSpec = INT8, **others: TensorSpec) -> Plan:
    """Activations by name (weights begin with w, biases with b), each with its spec."""
    specs = {**dict.fromkeys(names, spec), **others}
    roles = {"w": "weight", "b": "bias"}
    made = [TensorPlan(name, roles.get(name[0], "activation"), one, "r", name) for name, one in specs.items()]  # type: ignore[arg-type]
    return Plan({one.name: one for one in made})


def value(model: ir.Model, name: str) -> ir.Value:
    found = [*model.graph.inputs, *model.graph.initializers.values(), *(v for n in model.graph for v in n.outputs)]
    return next(one for one in found if one.name == name)


def node(model: ir.Model, name: str) -> ir.Node:
    return next(one for one in model.graph if one.name == name)


def job(target: str = "cpu", **options: Any) -> Any:
    """What a user wants of the target "cpu", "any", or "npu": positions of the binary point."""
    kind = XInt8Spec if target == "npu" else Int8Spec
    made = QConfig(QLayerConfig(input_tensors=kind(), weight=kind()), extra_options=options).compile()
    return replace(made, target="cpu" if target == "cpu" else "any")


# ---- align -----------------------------------------------------------------------------------------------------------


def concat() -> ir.Model:
    return graph("float[2,4] a, float[2,4] x", "float[4,4] y", "[r] c = Relu(x) [cat] y = Concat<axis = 0>(a, c)")


def test_aligned_operators_form_one_group_with_the_first_spec() -> None:
    plan = planned("a", "c", "y", "other")
    plan.put(replace(plan.tensors["y"], spec=replace(INT8, method="percentile")))
    plan.put(TensorPlan("tail", "activation", INT8, "r", "c"))
    align.align(concat(), plan, job(AlignConcat=True))
    assert {name: tensor.group for name, tensor in plan.tensors.items()} == {
        **dict.fromkeys(("a", "c", "y", "tail"), "a"),
        "other": "other",
    }
    assert plan.tensors["y"].spec == INT8


@pytest.mark.parametrize(
    ("target", "options", "other"),
    [
        ("cpu", {}, INT8),
        ("npu", {"AlignConcat": True}, INT8),
        ("cpu", {"AlignConcat": True, "NPULimitationCheck": False}, INT8),
        ("cpu", {"AlignConcat": True}, INT16),
    ],
    ids=["not asked", "an NPU aligns positions", "no limits", "two types"],
)
def test_what_is_not_aligned(target: str, options: dict[str, bool], other: TensorSpec) -> None:
    plan = planned("a", "y", c=other)
    align.align(concat(), plan, job(target, **options))
    assert all(tensor.group == name for name, tensor in plan.tensors.items())


def test_operators_with_one_data_input_align_that_with_their_output_and_weights_never() -> None:
    text = "[t] t = Transpose(x) [c] y = Concat<axis = 0>(t, w)"
    model = graph("float[2,4] x", "float y", text, w=ones(2, 2))
    plan = planned("x", "t", "y", "w")
    align.align(model, plan, job(AlignTranspose=True))
    assert {tensor.name for tensor in plan if tensor.group == "x"} == {"x", "t"}
    align.align(model, plan, job(AlignConcat=True))
    assert {tensor.name for tensor in plan if tensor.group == plan.tensors["y"].group} == {"x", "t", "y"}
    assert plan.tensors["w"].group == "w"


# ---- passthrough -----------------------------------------------------------------------------------------------------


def test_a_chain_passes_on_the_range_of_its_first_tensor() -> None:
    model = graph("float[2,4] x, float[2,4] z", "float[2,4] y", "[a] a = Tanh(x) [b] c = Erf(a) [m] y = Mul(c, z)")
    plan = planned("x", "a", "c", "z", "y")
    plan.put(replace(plan.tensors["a"], fixed_range=(-1.0, 1.0)))
    plan.put(TensorPlan("with", "activation", INT16, "its own", "a"))
    passthrough.pass_through(model, plan, ["Tanh", "Erf"])
    taken = {tensor.name: tensor for tensor in plan if tensor.group == "x"}
    assert set(taken) == {"x", "a", "c", "with"} and taken["x"].observed
    assert not any(taken[name].observed for name in ("a", "c", "with")) and taken["a"].fixed_range is None
    assert "passes on" in taken["a"].reason and taken["with"].reason == "its own" and taken["with"].spec == INT8
    assert plan.tensors["y"].group == "y"


def test_ranges_are_passed_on_by_activations_and_to_other_groups_only() -> None:
    model = graph("float[2,4] x", "float[2,4] y", "[a] y = Mul(w, x)", w=ones(4))
    plan = planned("w", "x", "y")
    passthrough.pass_through(model, plan, ["Mul"])
    assert plan.tensors["y"].group == "x"
    before = dict(plan.tensors)
    passthrough.pass_through(model, plan, ["Mul"])  # already one group
    assert plan.tensors == before
    for gone in ("x", "y"):
        plan = planned("w", *({"x", "y"} - {gone}))
        before = dict(plan.tensors)
        passthrough.pass_through(model, plan, ["Mul"])
        assert plan.tensors == before


# ---- channels and blocks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "attributes", "shape", "axes"),
    [
        ("Conv", "", (6, 3, 1, 1), (0, 1)),
        ("ConvTranspose", "", (3, 6, 1, 1), (1, 0)),
        ("ConvTranspose", "<group = 3>", (3, 1, 1, 1), (0, 1)),
        ("ConvTranspose", "<group = 3>", (3, 2, 1, 1), (1, 0)),
        ("ConvTranspose", "<group = 1>", (3, 1, 1, 1), (1, 0)),
        ("Gemm", "", (3, 6), (1, 0)),
        ("Gemm", "<transB = 1>", (6, 3), (0, 1)),
        ("MatMul", "", (3, 6), (-1, -2)),
    ],
)
def test_axes_of_weights(op: str, attributes: str, shape: tuple[int, ...], axes: tuple[int, int]) -> None:
    data = "float[1,3,4,4] x" if len(shape) == 4 else "float[2,3] x"
    model = graph(data, "float y", f"[n] y = {op}{attributes}(x, w)", w=ones(*shape))
    assert channel_axes.weight_axes(node(model, "n"), OP_RULES[op]) == axes
    good, bad = (TensorSpec("int8", granularity=Channel(axis % len(shape))) for axis in axes)
    weight = value(model, "w")
    assert not channel_axes.is_off_channel(node(model, "n"), weight, good)
    assert channel_axes.is_off_channel(node(model, "n"), weight, bad)
    assert not channel_axes.is_off_channel(node(model, "n"), weight, INT8)


@pytest.mark.parametrize(
    ("body", "shape", "format", "off"),
    [
        ("MatMul(x, w)", (3,), "int16", True),
        ("MatMul(x, w)", (2, 3, 5), "int8", True),
        ("MatMul(x, w)", (2, 3, 5), "uint8", True),
        ("MatMul(x, w)", (2, 3, 5), "int16", False),
        ("MatMul(w, x)", (5, 2), "int8", True),
        ("Add(x, w)", (3,), "int8", True),
        ("PRelu(x, w)", (3,), "int8", False),
        ("LayerNormalization(x, w)", (3,), "int8", False),
        ("Gemm(x, v, w)", (5,), "int8", False),
    ],
)
def test_scales_that_no_kernel_has(body: str, shape: tuple[int, ...], format: str, off: bool) -> None:
    model = graph("float[2,3] x", "float y", f"[n] y = {body}", w=ones(*shape), v=ones(3, 5))
    spec = TensorSpec(format, granularity=Channel(len(shape) - 1))
    assert channel_axes.is_off_channel(node(model, "n"), value(model, "w"), spec) is off


@pytest.mark.parametrize(
    ("bias", "weight", "axis", "fits"),
    [
        ((4,), (4, 2), 0, True),
        ((4,), (2, 4), 1, True),
        ((8,), (2, 4), 1, True),
        ((6,), (2, 4), 1, False),
        ((2,), (2, 4), 1, False),
        ((1,), (2, 4), 1, False),
        ((1, 4), (2, 4), 1, False),
        ((), (2, 4), 1, False),
        ((4,), (4,), 1, False),
    ],
)
def test_biases_with_an_element_per_channel(
    bias: tuple[int, ...], weight: tuple[int, ...], axis: int, fits: bool
) -> None:
    made = [ir.Value(name=str(k), shape=ir.Shape(shape)) for k, shape in enumerate((bias, weight))]
    assert channel_axes.has_channels(made[0], made[1], axis) is fits
    free = ir.Value(name="n", shape=ir.Shape(["N"]))
    assert not channel_axes.has_channels(free, made[1], axis) and not channel_axes.has_channels(made[0], free, 0)


@pytest.mark.parametrize(
    ("body", "rank", "axes"),
    [
        ("MatMul(x, z)", 3, {"x": 2, "z": 1, "y": 2}),
        ("Gemm(x, z)", 2, {"x": 1, "z": 0, "y": 7}),
        ("Gemm<transA = 1>(x, z)", 2, {"x": 0, "z": 0}),
        ("Gemm<transB = 1>(x, z)", 2, {"x": 1, "z": 1}),
        ("Softmax(x)", 3, {"x": 2}),
        ("Softmax<axis = 0>(x)", 3, {"x": 0}),
        ("Softmax<axis = 1>(x)", 3, {"x": 1}),
        ("Softmax<axis = -2>(x)", 3, {"x": 1}),
        ("Add(x, z)", 3, {"x": 7, "z": 7, "y": 7}),
    ],
)
def test_blocks_run_along_what_is_summed(body: str, rank: int, axes: dict[str, int]) -> None:
    shape = ",".join(["4"] * rank)
    model = graph(f"float[{shape}] x, float[{shape}] z", "float y", f"[n] y = {body}")
    plan = planned("x", "z", "y", spec=replace(BLOCKS, granularity=Group(7, 32)))
    block_axes.refine(model, plan, job())
    for name, axis in axes.items():
        assert plan.tensors[name].spec.granularity == Group(axis, 32), name


def test_the_first_reader_settles_the_axis_of_blocks() -> None:
    text = "[a] h = Softmax<axis = 0>(x) [b] y = MatMul(x, z)"
    model = graph("float[4,4] x, float[4,4] z", "float[4,4] y, float[4,4] h", text)
    plan = planned("x", spec=BLOCKS, z=INT8)
    block_axes.refine(model, plan, job(RefineBlockAxis=False))
    assert plan.tensors["x"].spec == BLOCKS
    block_axes.refine(model, plan, job())
    assert plan.tensors["x"].spec.granularity == Group(0, 32) and plan.tensors["z"].spec == INT8
    weights = planned("w", spec=BLOCKS)
    block_axes.refine(graph("float[4,4] x", "float[4,4] y", "[b] y = MatMul(w, x)", w=ones(4, 4)), weights, job())
    assert weights.tensors["w"].spec == BLOCKS


@pytest.mark.parametrize(("shape", "axis"), [((), 0), ((5,), 0), ((5, 5), 1), ((5, 5, 5, 5), 1), (None, 1)])
def test_default_axis_of_blocks(shape: tuple[int, ...] | None, axis: int) -> None:
    made = ir.Value(name="x", shape=None if shape is None else ir.Shape(shape))
    assert block_axes.in_blocks(BLOCKS, made).granularity == Group(axis, 32)
    assert block_axes.in_blocks(INT8, made) == INT8
    if shape is not None:
        assert not block_axes.is_scalar(made)
        made = ir.Value(name="x", const_value=ir.tensor(ones(*shape)))
        assert block_axes.in_blocks(BLOCKS, made).granularity == Group(axis, 32)
        assert block_axes.is_scalar(made) == (shape == ())
    assert block_axes.is_scalar(ir.Value(name="x", const_value=ir.tensor(ones(1, 1))))


# ---- biases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "weight", "why"),
    [
        (INT8, INT8, None),
        (INT8, TensorSpec("int8", granularity=Channel(1)), None),
        (INT16, INT16, None),
        (TensorSpec("fp8_e4m3"), INT8, "integers only"),
        (INT8, TensorSpec("bfloat16"), "integers only"),
        (TensorSpec("int32"), INT8, "32 bits"),
        (INT8, TensorSpec("int32"), "32 bits"),
        (INT8, TensorSpec("int8", granularity=Group(0, 2)), "over groups"),
        (TensorSpec("int8", granularity=Channel(1)), INT8, "over channels"),
        (INT8, TensorSpec("int8", granularity=Channel(0)), "over channels"),
    ],
)
def test_which_scales_have_a_product_for_the_bias(data: TensorSpec, weight: TensorSpec, why: str | None) -> None:
    model = graph("float[2,3] x", "float[2,4] y", "[n] y = Gemm(x, w, b)", w=ones(3, 4), b=ones(4))
    found = biases.why_no_product(node(model, "n"), value(model, "b"), data, weight)
    assert found is None if why is None else why in (found or "")
    short = graph("float[2,3] x", "float[2,4] y", "[n] y = Gemm(x, w, b)", w=ones(3, 4), b=ones(1))
    if why is None:
        broadcast = biases.why_no_product(node(short, "n"), value(short, "b"), data, weight)
        assert (broadcast is not None) == isinstance(weight.granularity, Channel)


def gemm(bias: int = 4) -> ir.Model:
    return graph("float[2,3] x", "float[2,4] y", "[n] y = Gemm(x, w, b)", w=ones(3, 4), b=ones(bias))


@pytest.mark.parametrize(
    ("granularity", "data_readers", "axis"),
    [(Channel(1), None, Channel(1)), (Tensor(), frozenset(["n", "m"]), Tensor())],
)
def test_biases_follow_the_axes_of_their_weights(
    granularity: Granularity, data_readers: frozenset[str] | None, axis: Granularity
) -> None:
    plan = planned("x", "w", "b")
    plan.put(replace(plan.tensors["x"], readers=data_readers))
    plan.put(replace(plan.tensors["w"], spec=replace(INT8, granularity=granularity)))
    plan.put(replace(plan.tensors["b"], bias_of=("x", "w"), readers=frozenset(["n"])))
    biases.refit(gemm(), plan)
    assert plan.tensors["b"].spec.granularity == axis


@pytest.mark.parametrize("lost", ["x", "w", "reader", "groups"])
def test_biases_without_a_product_of_scales_stay_float(lost: str) -> None:
    plan = planned("x", "w", "b")
    plan.put(replace(plan.tensors["b"], bias_of=("x", "w"), readers=frozenset(["n"])))
    if lost == "reader":
        plan.put(replace(plan.tensors["x"], readers=frozenset(["m"])))
    elif lost == "groups":
        plan.put(replace(plan.tensors["w"], spec=replace(INT8, granularity=Group(0, 3))))
    else:
        del plan.tensors[lost]
    biases.refit(gemm(), plan)
    assert "b" not in plan.tensors and plan.floats["b"] == (
        "a sum over groups has no single scale for the bias to share"
        if lost == "groups"
        else "there is no scale to share: its layer's input stays float"
    )


@pytest.mark.parametrize(
    ("spec", "options", "target", "own"),
    [
        (INT8, {}, "cpu", False),
        (INT8, {}, "npu", True),
        (INT8, {"Int32Bias": True}, "npu", False),
        (INT8, {"Int32Bias": False}, "cpu", True),
        (INT8, {"Int16Bias": True, "Int32Bias": False}, "npu", False),
        (BLOCKS, {}, "npu", False),
        (BLOCKS, {"Int32Bias": False}, "cpu", True),
        (TensorSpec("bfloat16"), {}, "cpu", True),
    ],
)
def test_biases_that_have_a_scale_of_their_own(
    spec: TensorSpec, options: dict[str, bool], target: str, own: bool
) -> None:
    made = job(target)
    made = replace(made, options=made.options.changed(options))
    assert biases.like_weight(spec, made) is own


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"x": None}, False),
        ({"w": None}, False),
        ({"x": replace(INT8, dynamic=True)}, False),
        ({"w": replace(INT8, dynamic=True)}, False),
        ({"w": replace(INT8, granularity=Group(0, 3))}, False),
        ({"b": TensorSpec("int32")}, True),
        ({"b": INT8}, False),
    ],
)
def test_float_biases_beside_integers(change: dict[str, TensorSpec | None], found: bool) -> None:
    plan = planned("x", "w", **({"b": change["b"]} if "b" in change else {}))  # type: ignore[arg-type]
    if "b" in change:
        plan.put(replace(plan.tensors["b"], role="weight"))
    for name, spec in change.items():
        if spec is None:
            del plan.tensors[name]
        elif name != "b":
            plan.put(replace(plan.tensors[name], spec=spec))
    made = list(float_biases.float_biases(gemm(), plan))
    assert [(one.name, one.role, one.bias_of) for one in made] == [("b", "bias", ("x", "w"))] * found


def test_float_biases_of_every_form() -> None:
    plan = planned("x", "w")
    model = graph("float[2,3] x", "float[2,4] y", "[n] y = Gemm(x, w, b)", w=ones(3, 4), b=ones(1, 4))
    assert not list(float_biases.float_biases(model, plan))
    plan = planned("x", "w", "b")
    assert plan.tensors["b"].role == "bias" and not list(float_biases.float_biases(gemm(), plan))
    plan.put(replace(plan.tensors["b"], spec=TensorSpec("int32")))
    assert not list(float_biases.float_biases(gemm(), plan))


@pytest.mark.parametrize(
    ("least", "rule", "fits"), [(2.0**-10, "float16", True), (2.0**-11, "float16", False), (2.0**-11, "float32", True)]
)
def test_a_product_of_half_scales_that_is_none(least: float, rule: Any, fits: bool) -> None:
    plan = planned("w", x=replace(INT8, scale_rule=rule))
    bias = TensorPlan("b", "bias", INT8, "r", "b", bias_of=("x", "w"))
    float_biases.check_half(plan, bias)  # before there are scales
    plan.put(replace(plan.tensors["x"], scale=np.float32(2.0**-4)))
    float_biases.check_half(plan, bias)
    plan.put(replace(plan.tensors["w"], scale=np.array([1, least], np.float32)))
    if fits:
        float_biases.check_half(plan, bias)
    else:
        with pytest.raises(ConfigError, match="cannot hold"):
            float_biases.check_half(plan, bias)


# ---- fused operators -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "target", "options", "spec", "dropped"),
    [
        ("y = Relu(h)", "cpu", {}, UINT8, True),
        ("y = Relu(h)", "cpu", {}, INT8, False),
        ("y = Relu(h)", "npu", {}, INT8, True),
        ("y = Relu(h)", "npu", {"RemoveQDQConvRelu": False}, INT8, False),
        ("y = Clip(h, low, six)", "cpu", {}, UINT8, True),
        ("y = Clip(h, below, six)", "cpu", {}, UINT8, True),
        ("y = Clip(h, below, six)", "cpu", {"FasterForms": False}, UINT8, False),
        ("y = Clip(h, low, six)", "npu", {}, INT8, True),
        ("y = Clip(h, low, one)", "npu", {}, INT8, True),
        ("y = Clip(h, low, three)", "npu", {}, INT8, False),
        ("y = Clip(h, low, three)", "npu", {"RemoveQDQConvClip": True}, INT8, True),
        ("y = LeakyRelu(h)", "npu", {"RemoveQDQConvLeakyRelu": True}, INT8, True),
        ("y = LeakyRelu(h)", "cpu", {"RemoveQDQConvLeakyRelu": True}, UINT8, False),
        ("y = Sigmoid(h)", "npu", {}, INT8, False),
        ("y = Sigmoid(h)", "npu", {"RemoveQDQBetweenOps": [["Conv", "Sigmoid"]]}, INT8, True),
        ("y = Sigmoid(h)", "npu", {"RemoveQDQBetweenOps": [["Sigmoid", "Conv"]]}, INT8, False),
    ],
)
def test_what_is_one_kernel_has_nothing_between(
    body: str, target: str, options: dict[str, Any], spec: TensorSpec, dropped: bool
) -> None:
    numbers = {"low": np.float32(0), "below": np.float32(-1), "six": np.float32(6), "one": np.float32(1)}
    model = graph(
        "float[1,2,4,4] x",
        "float[1,2,4,4] y",
        f"[c] h = Conv(x, w) [n] {body}",
        w=ones(2, 2, 1, 1),
        three=np.float32(3),
        **numbers,
    )
    plan = planned("x", "w", "h", y=spec)
    fuse.drop_fused(model, plan, job(target, **options))
    assert ("h" not in plan.tensors) is dropped and {"x", "y", "w"} <= set(plan.tensors)


@pytest.mark.parametrize(
    ("results", "body"),
    [
        ("float[1,2,4,4] y, float[1,2,4,4] h", "[c] h = Conv(x, w) [n] y = Relu(h)"),
        ("float[1,2,4,4] y, float[1,2,4,4] z", "[c] h = Conv(x, w) [n] y = Relu(h) [m] z = Tanh(h)"),
        ("float[1,2,4,4] y", "[c] h = Tanh(x) [n] y = Relu(h)"),
    ],
    ids=["a graph output", "two readers", "no sum of products"],
)
def test_what_others_see_too_stays(results: str, body: str) -> None:
    model = graph("float[1,2,4,4] x", results, body, w=ones(2, 2, 1, 1))
    plan = planned("x", "w", "h", "y")
    fuse.drop_fused(model, plan, job("npu"))
    assert "h" in plan.tensors


def test_mul_and_add_are_one_kernel_where_asked() -> None:
    model = graph("float[4] x, float[4] z", "float[4] y", "[m] h = Mul(x, z) [a] y = Add(h, z)")
    for asked in (False, True):
        plan = planned("x", "z", "h", "y")
        fuse.drop_fused(model, plan, job(RemoveQDQMulAdd=asked))
        assert ("h" in plan.tensors) is not asked


def test_blocks_between_a_kernel_and_its_activation_stay_unless_asked() -> None:
    model = graph("float[1,2,4,4] x", "float[1,2,4,4] y", "[c] h = Conv(x, w) [n] y = Relu(h)", w=ones(2, 2, 1, 1))
    for asked in (False, True):
        plan = planned("x", "w", "y", h=TensorSpec("mxfp8_e4m3", granularity=Group(1, 32)))
        fuse.drop_fused(model, plan, job("npu", RemoveFusedQDQ=asked))
        assert ("h" in plan.tensors) is not asked


def test_instance_normalization_is_fused_where_asked() -> None:
    text = "[c] h = InstanceNormalization(x, w, v) [n] y = Relu(h)"
    model = graph("float[1,2,4,4] x", "float[1,2,4,4] y", text, w=ones(2), v=ones(2))
    for asked in (False, True):
        plan = planned("x", "h", "y")
        fuse.drop_fused(model, plan, job("npu", RemoveQDQInstanceNorm=asked))
        assert ("h" in plan.tensors) is not asked


@pytest.mark.parametrize(
    ("body", "results", "left", "dropped"),
    [
        ("h = Exp(x) y = Reshape(h, s)", "float[8,8] y", (), True),
        ("h = Exp(x) y = Relu(h)", "float[8,8] y", (), True),
        ("h = Exp(x) y = Tanh(h)", "float[8,8] y", (), False),
        ("h = Exp(x) y = Exp(h)", "float[8,8] y", (), False),
        ("h = Exp(x) y = Reshape(h, s)", "float[8,8] y, float[4,16] h", (), False),
        ("h = Exp(x) y = Reshape(h, s) z = Tanh(h)", "float[8,8] y, float z", (), False),
        ("h = Exp(x) y = Reshape(h, s) z = Relu(h)", "float[8,8] y, float z", (), True),
        ("h = Exp(x) y = Reshape(h, s)", "float[8,8] y", ("y",), False),
        ("h = Tanh(x) y = Reshape(h, s)", "float[8,8] y", (), False),
        ("h = Tanh(x) y = Reshape(h, s)", "float[8,8] y", ("x",), True),
    ],
)
def test_float_results_are_rounded_to_blocks_once(
    body: str, results: str, left: tuple[str, ...], dropped: bool
) -> None:
    model = graph("float[4,16] x", results, body, s=np.array([8, 8]))
    plan = planned("x", "h", "y", "z", spec=BLOCKS)
    if body.startswith("h = Exp"):
        plan.leave("x", "r")
    for name in left:
        plan.leave(name, "r")
    fuse.drop_before_moves(model, plan)
    assert ("h" not in plan.tensors) is dropped
    integers = planned("h", "y")
    fuse.drop_before_moves(model, integers)
    assert "h" in integers.tensors


# ---- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("y = Gemm(x, w)", {"y"}),
        ("h = Gemm(x, w) y = Reshape(h, s)", {"y", "h"}),
        ("h = Gemm(x, w) i = Transpose(h) y = Reshape(i, s)", {"y", "h", "i"}),
        ("h = Gemm(x, w) y = Relu(h)", set()),
        ("h = Relu(x) y = Reshape(h, s)", set()),
        ("h = Exp(x) i = Mul(h, h) y = Reshape(i, s)", {"y", "i"}),
        ("h = Abs(x) y = Reshape(h, s)", set()),
        ("y = Reshape(x, s)", set()),
        ("h = Gemm(x, w) y = Reshape(h, s) z = Tanh(h)", {"z"}),
        ("y, z = Split<axis = 0>(x)", set()),
    ],
)
def test_last_results_keep_their_resolution(body: str, left: set[str]) -> None:
    results = "float y, float z" if "z =" in body else "float y"
    model = graph("float[4,4] x", results, body, w=ones(4, 4), s=np.array([2, 8]))
    names = ("x", "h", "i", "y", "z")
    plan = planned(*names)
    outputs.leave_float(model, plan, job())
    assert set(names) - set(plan.tensors) == left
    for other in (job(EnableVaimlBF16=True), job("any", ForceQuantizeNoInputCheck=True)):
        plan = planned(*names)
        outputs.leave_float(model, plan, other)
        assert set(plan.tensors) == set(names)
    for other in (job(FloatOutputs=True, EnableVaimlBF16=True), job("npu", FloatOutputs=True)):
        plan = planned(*names)
        outputs.leave_float(model, plan, other)
        assert set(names) - set(plan.tensors) == left
        assert all(plan.floats[name].startswith("FloatOutputs: ") for name in left)
    plan = planned(*names)
    outputs.leave_float(model, plan, job(FloatOutputs=False))
    assert set(plan.tensors) == set(names)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("h = Gemm(x, w) z = ArgMax(h) y = Relu(x)", {"h"}),
        ("h = Gemm(x, w) i = Transpose(h) z = ArgMin(i) y = Relu(x)", {"h", "i"}),
        ("h = Relu(x) z = ArgMax(h) y = Relu(x)", set()),
        ("h = Gemm(x, w) z = ArgMax(h) y = Exp(h)", {"h for z"}),
    ],
)
def test_an_order_is_read_of_what_can_be_written_as_float(body: str, left: set[str]) -> None:
    model = graph("float[4,4] x", "float y, int64 z", body, w=ones(4, 4))
    for number, node in enumerate(model.graph):
        node.name = f"n{number}"
    names = ("x", "h", "i", "y")
    plan = planned(*names)
    outputs.leave_ordered(model, plan, job())
    readers = plan.tensors["h"].readers if "h" in plan.tensors else None
    assert set(names) - set(plan.tensors) | ({"h for z"} if readers == {"n2"} else set()) == left
    plan = planned(*names)
    outputs.leave_ordered(model, plan, job("npu"))
    assert set(plan.tensors) == set(names) and plan.tensors["h"].readers is None


def test_an_output_on_the_way_to_another_keeps_its_codes() -> None:
    model = graph(
        "float[4,4] x", "float y, float h", "h = Gemm(x, w) y = Reshape(h, s)", w=ones(4, 4), s=np.array([2, 8])
    )
    plan = planned("x", "h", "y")
    outputs.leave_float(model, plan, job())
    assert set(plan.tensors) == {"x", "y"}


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("h = Gemm(x, w) [n] y = Tanh(h)", {"h"}),
        ("h = Gemm(x, w) i = Reshape(h, s) [n] y = Tanh(i)", {"h", "i"}),
        ("h = Abs(x) [n] y = Tanh(h)", {"h"}),
        ("[n] y = Tanh(x)", {"x"}),
        ("h = Gemm(x, w) [n] y = Tanh(h) z = Relu(h)", set()),
        ("h = Gemm(x, w) [m] z = Relu(h) [n] y = Tanh(h)", {"h"}),
        ("h = Gemm(x, w) [n] y = Tanh(h) z = Reshape(y, s)", {"h"}),
        ("h = Gemm(x, w) i, z = Split<axis = 0>(h) [n] y = Tanh(i)", {"i"}),
    ],
)
def test_inputs_of_precise_layers_stay_float(body: str, left: set[str]) -> None:
    results = "float y, float z" if "z =" in body or "z " in body else "float y"
    model = graph("float[4,4] x", results, body, w=ones(4, 4), s=np.array([2, 8]))
    names = ("x", "h", "i", "y", "z")
    plan = planned(*names)
    outputs.leave_inputs(model, plan, {"n", "m"} if "[m]" in body else {"n"})
    assert set(names) - set(plan.tensors) == left
    plan = planned(*names)
    outputs.leave_inputs(model, plan, set())
    assert set(plan.tensors) == set(names)


def test_an_input_that_is_an_output_too_keeps_its_codes() -> None:
    model = graph("float[4,4] x", "float y, float h", "h = Relu(x) [n] y = Tanh(h)")
    plan = planned("h")
    outputs.leave_inputs(model, plan, {"n"})
    assert "h" in plan.tensors


# ---- isolated ----------------------------------------------------------------------------------------------

ISLAND = "[p] h = Pow(x, two) [m] a = Mul(h, h) [r] c = Relu(a) [e] y = Exp(c)"


@pytest.mark.parametrize(
    ("body", "results", "chosen", "found"),
    [
        (ISLAND, "float y", "mr", "mr"),
        (ISLAND, "float y", "m", "m"),
        (ISLAND, "float y", "pmr", ""),
        (ISLAND, "float y", "mre", ""),
        (ISLAND, "float y, float a", "mr", ""),
        (ISLAND, "float y, float c", "mr", ""),
        ("[p] h = Pow(x, two) [m] a = MatMul(h, h) [r] c = Relu(a) [e] y = Exp(c)", "float y", "mr", ""),
        ("[p] h = Pow(x, two) [m] a = Abs(h) [r] c = Relu(a) [e] y = Exp(c)", "float y", "mr", ""),
        ("[p] h = Pow(x, two) [m] a = Add(h, x) [e] y = Exp(a)", "float y", "m", ""),
        ("[p] h = Pow(x, two) [m] a = Add(h, two) [e] y = Exp(a)", "float y", "m", "m"),
        ("[p] h = Pow(x, two) [m] a = Mul(two, two) [e] y = Add(h, a)", "float y", "m", ""),
        ("[p] h = Pow(x, two) [m] a = Mul(h, h) [e] y = Exp(h)", "float y", "m", ""),
        ("[p] h = Pow(x, two) [m] a = Mul(h, h) [e] c = Exp(a) [r] d = Relu(c) [t] y = Exp(d)", "float y", "mr", "mr"),
    ],
)
def test_cheap_operators_between_float_ones(body: str, results: str, chosen: str, found: str) -> None:
    model = graph("float[4,4] x", results, body, two=np.float32(2))
    assert {one.name for one in isolated.isolated_nodes([node(model, name) for name in chosen])} == set(found)


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "masks_it"),
    [
        ([0, -1e3], True),
        ([0, -999.0], False),
        ([0, 1e6], True),
        ([0, 9.9e5], False),
        ([-1e9, 1], True),
        ([-1, 1e9], True),
        ([0, -1e4, -1], True),
        ([0, -1e4, -10], False),
        ([0, 1e7, 1], True),
        ([0, 1e7, 1e4], False),
        ([0, -np.inf], True),
        ([1, np.inf], True),
        ([-1e9, 1e9], True),
        ([-1e9, 0, 1e9], True),
        ([-1e9, 1, 1e9], True),
        ([-1e9, 1, 1e8], False),
        ([-1e5, 1e5], False),
        ([-1e4, -10], False),
        ([-1e4, -1.02e4], False),
        ([-1e4, -1.005e4], True),
        ([-1e4, -1e4], True),
        ([], False),
        ([0, 0], False),
    ],
)
def test_which_constants_are_masks(numbers: list[float], masks_it: bool) -> None:
    array = np.array(numbers, np.float32)
    model = graph(f"float[{max(len(numbers), 1)}] x", "float y", "[a] h = Add(x, m) [s] y = Softmax(h)", m=array)
    nodes, values = masks.masked_tensors(model)
    assert {one.name for one in nodes} == ({"a", "s"} if masks_it else set())
    assert {one.name for one in values} == ({"h"} if masks_it else set())


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("[a] h = Relu(m) [s] y = Add(x, h)", set()),
        ("[a] h = Unsqueeze(m, i) [s] y = Add(x, h)", {"a", "s"}),
        ("[a] h = Unsqueeze(m, i) [b] g = Transpose(h) [s] y = Sub(x, g)", {"a", "b", "s"}),
        ("[a] h = Unsqueeze(x, i) [s] y = Add(x, h)", set()),
        ("[s] y = Max(x, m)", set()),
        ("[s] y = Min(x, m)", {"s"}),
        ("[s] h = Mul(x, m) [t] g = Relu(h) [e] c = Tanh(g) [n] y = Relu(c)", {"s", "t", "e"}),
        ("[a] h = ConstantOfShape<value = float[1] {-10000.0}>(k) [s] y = Add(x, h)", {"s"}),
        ("[a] h = ConstantOfShape<value = float[1] {-10.0}>(k) [s] y = Add(x, h)", set()),
        ("[a] h = ConstantOfShape(k) [s] y = Add(x, h)", set()),
        ("[s] y = Concat<axis = 0>(x, m)", {"s"}),
    ],
)
def test_masks_are_followed_through_moves_to_small_numbers(body: str, found: set[str]) -> None:
    model = graph("float[2] x", "float y", body, m=np.array([0, -1e9], np.float32), i=np.array([0]), k=np.array([2]))
    assert {one.name for one in masks.masked_tensors(model)[0]} == found


# ---- second types ----------------------------------------------------------------------------------------------------


def shared_input() -> ir.Model:
    text = "[r] h = Relu(x) [a] y = Gemm(h, w, b) [c] z = Tanh(h) [d] v = Exp(h)"
    return graph("float[2,3] x", "float y, float z, float v", text, w=ones(3, 4), b=ones(4))


def test_layers_read_a_shared_tensor_in_their_own_type() -> None:
    model, plan = shared_input(), planned("h", "w", "b")
    plan.put(replace(plan.tensors["h"], fixed_range=(0.0, 6.0)))
    plan.put(replace(plan.tensors["b"], bias_of=("h", "w"), readers=frozenset(["a"])))
    h = value(model, "h")
    wanted = [own_inputs.Apart(node(model, name), h, INT16, f"of {name}") for name in ("a", "c")]
    wanted.append(own_inputs.Apart(node(model, "d"), h, INT8, "of d"))
    own_inputs.separate(model, plan, wanted)
    own = plan.tensors["h_a"]
    assert own.spec == INT16 and own.fixed_range == (0.0, 6.0) and own.group == "h_a" and own.reason == "of a"
    assert [node(model, name).inputs[0].name for name in "acd"] == ["h_a", "h_a", "h"]  # type: ignore[union-attr]
    assert plan.tensors["b"].bias_of == ("h_a", "w") and plan.tensors["h"].spec == INT8
    assert [one.name for one in model.graph] == ["r", "h_a", "a", "c", "d"]
    second_type.drop(model, plan)
    assert [one.name for one in model.graph] == ["r", "a", "c", "d"] and node(model, "a").inputs[0] is h


@pytest.mark.parametrize(("readers", "after"), [(None, None), (frozenset(["c"]), frozenset(["a", "c"]))])
def test_a_layer_of_the_same_type_becomes_one_more_reader(
    readers: frozenset[str] | None, after: frozenset[str] | None
) -> None:
    model, plan = shared_input(), planned("h")
    plan.put(replace(plan.tensors["h"], readers=readers))
    own_inputs.separate(model, plan, [own_inputs.Apart(node(model, "a"), value(model, "h"), INT8, "of a")])
    assert plan.tensors["h"].readers == after and set(plan.tensors) == {"h"}
    plan = planned()
    own_inputs.separate(model, plan, [own_inputs.Apart(node(model, "a"), value(model, "h"), INT8, "of a")])
    assert plan.tensors["h"].readers == frozenset(["a"]) and plan.tensors["h"].role == "activation"


def test_a_second_type_of_a_graph_input_stands_first_and_moves_the_biases_of_its_readers_only() -> None:
    text = "[a] y = Gemm(x, w, b) [e] z = Gemm(x, w, b2)"
    model = graph("float[2,3] x", "float y, float z", text, w=ones(3, 4), b=ones(4), b2=ones(4))
    plan = planned("x", "w", "b", "b2")
    for bias, reader in (("b", "a"), ("b2", "e")):
        plan.put(replace(plan.tensors[bias], bias_of=("x", "w"), readers=frozenset([reader])))
    second_type.insert(model, plan, value(model, "x"), "copy", [node(model, "a")])
    assert [one.name for one in model.graph] == ["copy", "a", "e"] and plan.nodes["copy"].quantized
    assert plan.tensors["b"].bias_of == ("copy", "w") and plan.tensors["b2"].bias_of == ("x", "w")
    second_type.hand_over(plan, value(model, "w"), value(model, "x"), [node(model, "e")])
    assert plan.tensors["b2"].bias_of == ("x", "x") and plan.tensors["b"].bias_of == ("copy", "w")
    plan.nodes["a"] = NodePlan("a", "Gemm", True, "ours")
    second_type.drop(model, plan)
    assert [one.name for one in model.graph] == ["a", "e"]


@pytest.mark.parametrize(
    ("one", "other", "unsigned", "differ"),
    [
        ("int8", "uint8", True, False),
        ("int8", "uint8", False, True),
        ("int8", "int8", False, False),
        ("int8", "int16", True, True),
    ],
)
def test_precisions_that_differ(one: str, other: str, unsigned: bool, differ: bool) -> None:
    at = dual_pairs.Boundaries(shared_input(), Plan(), {}, unsigned)
    assert at.differ(one, other) is differ and at.differ(other, one) is differ


# ---- slots -----------------------------------------------------------------------------------------------------------


def test_what_is_a_float_tensor() -> None:
    shapes = {"x": "float[2]", "h": "float16[2]", "i": "int64[2]", "e": "float[0]", "d": "double[2]"}
    model = graph(
        ", ".join(f"{kind} {name}" for name, kind in shapes.items()), "float[2] y", "[n] y = Relu(x)", w=ones(2)
    )
    assert {name for name in shapes if slots.is_float(value(model, name))} == {"x", "h"}
    assert slots.is_float(value(model, "w")) and not slots.is_float(None)
    model.graph.inputs.append(value(model, "w"))
    assert not slots.is_float(value(model, "w"))  # a feed may override it


@pytest.mark.parametrize(
    ("body", "positions"),
    [
        ("Conv(x, w)", ["x"]),
        ("MatMul(x, w)", ["x"]),
        ("MatMul(w, x)", ["w", "x"]),
        ("MatMul(x, x)", ["x", "x"]),
        ("Add(x, w)", ["x", "w"]),
        ("Where(c, x, w)", ["x", "w"]),
        ("Div(x, w)", ["x"]),
    ],
)
def test_data_inputs(body: str, positions: list[str]) -> None:
    model = graph("float[2,2] x, bool[2,2] c", "float y", f"[n] y = {body}", w=ones(2, 2))
    rule = OP_RULES[body.split("(")[0]]
    assert [one.name for one in slots.data_inputs(node(model, "n"), rule)] == positions
    weight = slots.weight_input(node(model, "n"), rule)
    assert (weight is not None) == (body in ("Conv(x, w)", "MatMul(x, w)")) and slots.bias_input(
        node(model, "n"), rule
    ) is None


@pytest.mark.parametrize(
    ("body", "leaves"),
    [
        ("Pad(x, p)", False),
        ("Pad(x, p, zero)", False),
        ("Pad(x, p, one)", True),
        ('Pad<mode = "edge">(x, p, one)', False),
        ("Pad(x, p, z)", True),
        ('Resize<mode = "cubic">(x, , k)', True),
        ('Resize<mode = "linear">(x, , k)', False),
        ("Resize(x, , k)", False),
        ('Resize<coordinate_transformation_mode = "tf_crop_and_resize">(x, , k)', True),
        ("Relu(x)", False),
    ],
)
def test_layout_operators_that_leave_the_range(body: str, leaves: bool) -> None:
    numbers = {"p": np.array([1, 1]), "zero": np.float32(0), "one": np.float32(1), "k": np.array([2], np.float32)}
    model = graph("float[2] x, float z", "float y", f"[n] y = {body}", **numbers)
    assert (slots.leaves_range(node(model, "n")) is not None) is leaves


@pytest.mark.parametrize(
    ("body", "bounds"),
    [
        ("Clip(x)", (-np.inf, np.inf)),
        ("Clip(x, low)", (-2.0, np.inf)),
        ("Clip(x, , high)", (-np.inf, 3.0)),
        ("Clip(x, low, high)", (-2.0, 3.0)),
        ("Clip(x, z)", None),
        ("Clip(x, low, z)", None),
    ],
)
def test_bounds_of_a_clip(body: str, bounds: tuple[float, float] | None) -> None:
    model = graph("float[2] x, float z", "float y", f"[n] y = {body}", low=np.float32(-2), high=np.float32(3))
    assert surgery.clip_bounds(node(model, "n")) == bounds


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("[a] h = Mul(x, x) [b] m = ReduceMean(h) [c] s = Sqrt(m) [d] y = Div(x, s)", {"a", "b", "c"}),
        ("[a] h = Mul(x, z) [c] s = Sqrt(h) [d] y = Div(x, s)", {"c"}),
        ("[a] h = Tanh(x) [c] s = Sqrt(h) [d] y = Reciprocal(s)", {"c"}),
        ("[a] h = Abs(x) [d] y = Log(h)", {"a"}),
        ("[a] h = Abs(x) [d] y = Div(h, z)", set()),
        ("[a] h = Abs(x) [d] y = Mul(h, z)", set()),
        ("[r] r = Relu(x) [a] h = Mul(r, two) [b] j = Concat <axis=0> (h, h) [d] y = Log(j)", {"r", "a", "b"}),
        ("[r] r = Relu(x) [a] h = Mul(r, z) [b] j = Concat <axis=0> (h, h) [d] y = Log(j)", {"a", "b"}),
        ("[a] h = Sigmoid(x) [d] y = Log(h)", {"a"}),
        ("[a] h = Sigmoid(x) [d] y = Div(x, h)", set()),
        ("[f] f = MatMul(x, w) [a] p = Mul(f, f) [m] e = MatMul(p, w) [d] y = Log(e)", set("fam")),
        ("[f] f = MatMul(x, w) [r] r = Relu(f) [m] e = MatMul(r, w) [b] c = Clip(e, two) [d] y = Log(c)", {"b"}),
        ("[f] f = MatMul(x, w) [r] r = Clip(f, , two) [m] e = MatMul(r, w) [d] y = Log(e)", set()),
    ],
)
def test_what_becomes_a_divisor(body: str, found: set[str]) -> None:
    model = graph("float[2] x, float[2] z", "float y", body, two=np.float32(2), w=np.eye(2, dtype=np.float32))
    assert {one.name for one in divisors.makes_divisors(model)} == found


# ---- small weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1, 12, 1 << 18])
def test_small_weights_are_searched_as_one_by_one(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    weights = {f"w{k}": rng.standard_normal((3, 4)).astype(np.float32) * 10.0**k for k in range(4)}
    weights |= {"wide": rng.standard_normal((4, 3)).astype(np.float32)}
    power = TensorSpec("int8", method="mse", scale_rule="power_of_two")
    model = graph("float[3] x", "float y", "[n] y = Relu(x)", **weights)
    channel = replace(power, granularity=Channel(0))
    plan = planned(w0=power, w1=power, w2=channel, w3=channel, wide=channel)
    monkeypatch.setattr(small_weights, "TOGETHER", together)
    found = small_weights.ranges_of_small(model, plan)
    assert set(found) == set(weights)
    for name, (low, high) in found.items():
        rows = weights[name].reshape(1, -1) if plan.tensors[name].spec == power else weights[name]
        own = small_weights.search_rows(rows, power.grid)
        shape = () if plan.tensors[name].spec == power else (len(rows),)
        assert low.shape == high.shape == shape
        np.testing.assert_array_equal(low, own[0].reshape(shape))
        np.testing.assert_array_equal(high, own[1].reshape(shape))


@pytest.mark.parametrize(
    "change",
    [
        {"fixed_range": (0.0, 1.0)},
        {"given": (1.0, 0)},
        {"spec": TensorSpec("int8", scale_rule="power_of_two")},
        {"spec": TensorSpec("int8", method="mse")},
        {"spec": TensorSpec("int8", method="mse", scale_rule="power_of_two", settings=(("mode", "MostCommon"),))},
    ],
)
def test_weights_that_are_searched_alone(change: dict[str, Any]) -> None:
    model = graph("float[3] x", "float y", "[n] y = Relu(x)", w=ones(3, 4))
    power = TensorSpec("int8", method="mse", scale_rule="power_of_two")
    plan = planned(w=power)
    assert set(small_weights.ranges_of_small(model, plan)) == {"w"}
    plan.put(replace(plan.tensors["w"], **change))
    assert not small_weights.ranges_of_small(model, plan)


@pytest.mark.parametrize(
    ("array", "small"),
    [(ones(0), False), (np.full(3, np.nan, np.float32), False), (ones(1 << 12), True), (ones((1 << 12) + 1), False)],
)
def test_which_weights_are_small(array: np.ndarray, small: bool) -> None:
    model = graph("float[3] x", "float y", "[n] y = Relu(x)", w=array)
    plan = planned(w=TensorSpec("int8", method="mse", scale_rule="power_of_two"))
    assert bool(small_weights.ranges_of_small(model, plan)) is small
