"""Placement: which tensors the Plan quantizes, with which spec, and why the others stay float."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from quark.config.plan import Plan
from quark.errors import ConfigError
from quark.numerics.granularity import Channel
from quark.onnx import (
    CalibMethod,
    Int8Spec,
    Int16Spec,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    UInt8Spec,
    XInt8Spec,
)
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.qdq.place import place

CHAIN = """
<ir_version: 8, opset_import: ["" : 17]>
agraph (float[1,4,8,8] x) => (float[1,3] y)
<float[4,4,3,3] w1, float[4] b1, float[4,1,3,3] w2, float[4,3] w3, float[3] b3, int64[2] shape = {1, 4}>
{
  [c1] h = Conv<pads = [1,1,1,1]>(x, w1, b1)
  [r1] a = Relu(h)
  [c2] d = Conv<pads = [1,1,1,1], group = 4>(a, w2)
  [add] s = Add(a, d)
  [r2] t = Relu(s)
  [pool] g = GlobalAveragePool(t)
  [flat] f = Reshape(g, shape)
  [fc] y = Gemm(f, w3, b3)
}
"""


def model_of(text: str) -> ir.Model:
    proto = onnx.parser.parse_model(text)
    named = {tensor.name for tensor in proto.graph.initializer}
    for value in list(proto.graph.value_info):
        if value.name not in named:  # weights that the text declares without values
            dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
            count = 1
            for d in dims:
                count *= d
            values = [((7 * k) % 13 - 6) / 6 for k in range(count)]
            proto.graph.initializer.append(onnx.helper.make_tensor(value.name, 1, dims, values))
    del proto.graph.value_info[:]
    model = ir.from_proto(proto)
    infer_shapes(model)
    return model


def plan_of(text: str = CHAIN, spec: type = Int8Spec, **config: object) -> Plan:
    specs = QLayerConfig(input_tensors=spec(), weight=Int8Spec(calibration_method=CalibMethod.MinMax))
    return place(model_of(text), QConfig(config.pop("layer", specs), **config).compile())  # type: ignore[arg-type]


def roles(plan: Plan, role: str) -> set[str]:
    return {tensor.name for tensor in plan if tensor.role == role}


def test_inputs_outputs_weights_and_biases_of_computing_nodes_are_quantized() -> None:
    plan = plan_of()
    assert roles(plan, "activation") == {"x", "a", "d", "t", "g", "f"}
    assert roles(plan, "weight") == {"w1", "w2", "w3"}
    assert roles(plan, "bias") == {"b1", "b3"}
    assert plan.tensors["b3"].bias_of == ("f", "w3")


def test_nothing_stands_between_a_convolution_and_its_relu() -> None:
    assert {"h", "s"} & set(plan_of().tensors) == set()
    assert "h" in plan_of(extra_options={"RemoveQDQConvRelu": False}).tensors


FORCED = {"ForceQuantizeNoInputCheck": True}


def test_the_last_product_writes_float_unless_everything_is_forced() -> None:
    assert "y" not in plan_of().tensors
    assert "y" in plan_of(extra_options=FORCED).tensors
    assert "y" not in plan_of(extra_options=FORCED, target="cpu").tensors
    assert "y" in plan_of(layer=QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec())).tensors


LAST = """<ir_version: 8, opset_import: ["" : 17]>
agraph (float[1,4,8,8] x) => (float[1,4] y) <float[4,4,3,3] w>
{ c = Conv(x, w)  r = Relu(c)  g = GlobalAveragePool(r)  y = Flatten(g) }"""


def test_layout_operators_behind_the_last_result_stay_float_with_it() -> None:
    assert roles(plan_of(LAST), "activation") == {"x", "r"}


def test_a_last_convolution_keeps_its_quantized_output() -> None:
    text = LAST.replace("c = Conv(x, w)  r = Relu(c)  g = GlobalAveragePool(r)  y = Flatten(g)", "y = Conv(x, w)")
    assert roles(plan_of(text), "activation") == {"x", "y"}


def test_a_layout_operator_shares_the_range_of_its_input() -> None:
    plan = plan_of()
    assert plan.tensors["f"].group == "g" and not plan.tensors["f"].observed
    assert "moves the values of 'g'" in plan.explain("f")


def test_a_layout_operator_on_float_data_stays_float_unless_forced() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    agraph (float[1,4,8,8] x) => (float[1,4,4,4] y) { [p] y = MaxPool<kernel_shape = [2,2], strides = [2,2]>(x) }"""
    assert not plan_of(text).tensors
    assert plan_of(text).nodes["p"].reason == "its input is not quantized"
    forced = plan_of(text, extra_options={"ForceQuantizeNoInputCheck": True})
    assert forced.tensors["y"].group == "x"


def test_weights_per_channel_take_the_axis_of_their_operator() -> None:
    layer = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec(quant_granularity=QuantGranularity.Channel))
    plan = plan_of(layer=layer)
    assert plan.tensors["w1"].spec.granularity.axis == 0  # type: ignore[attr-defined]
    assert plan.tensors["w3"].spec.granularity.axis == 1, "Gemm without transB keeps its output channels on axis 1"  # type: ignore[attr-defined]


def test_groups_run_along_the_axis_that_is_summed() -> None:
    weight = Int8Spec(quant_granularity=QuantGranularity.Group, group_size=2)
    plan = plan_of(layer=QLayerConfig(input_tensors=Int8Spec(), weight=weight))
    assert (plan.tensors["w3"].spec.granularity.axis, plan.tensors["w1"].spec.granularity.axis) == (0, 1)  # type: ignore[attr-defined]
    assert "b3" not in plan.tensors, "a sum over groups has no single scale that a bias could share"


def test_power_of_two_on_both_sides_gives_biases_a_scale_of_their_own() -> None:
    plan = plan_of(layer=QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()))
    assert roles(plan, "bias") == set() and plan.tensors["b1"].spec.format == "int8"


def test_the_cpu_target_uses_unsigned_codes_and_the_whole_range_behind_relu() -> None:
    plan = plan_of(target="cpu")
    assert (plan.tensors["x"].spec.format, plan.tensors["x"].spec.symmetric) == ("uint8", True)
    assert (plan.tensors["a"].spec.format, plan.tensors["a"].spec.symmetric) == ("uint8", False)


def test_excluded_nodes_keep_float_inputs_unless_a_neighbour_quantizes_them() -> None:
    plan = plan_of(exclude=["fc"])
    assert plan.tensors["f"].name == "f" and "y" not in plan.tensors and "w3" not in plan.tensors
    assert plan.nodes["fc"].reason == "exclude: fc"


def test_a_layer_rule_wins_over_the_global_one_at_the_tensors_of_its_layer() -> None:
    wide = QLayerConfig(input_tensors=Int16Spec(), weight=Int8Spec())
    plan = plan_of(specific_layer_config={wide: ["c2"]})
    assert plan.tensors["a"].spec.format == "int16" and plan.tensors["d"].spec.format == "int16"
    assert plan.tensors["x"].spec.format == "int8"
    assert "specific_layer_config: c2" in plan.explain("a")


def test_a_type_rule_with_none_keeps_the_type_in_float() -> None:
    plan = plan_of(layer_type_config={None: ["Gemm"]})
    assert not plan.nodes["fc"].quantized and "w3" not in plan.tensors


def test_a_name_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"exclude: the node name 'pol' matches no node.*Did you mean 'pool'"):
        plan_of(exclude=["pol"])


MASKED = """<ir_version: 8, opset_import: ["" : 17]>
agraph (float[2,4,4] q, float[2,4,4] k, float[2,4,4] v) => (float[2,4,4] y)
<float[1,2,2] m = {0, -10000, 0, 0}, int64[3] reps = {1, 2, 2}>
{
  [scores] s = MatMul(q, k)
  [tile] mask = Tile(m, reps)
  [add] p = Add(s, mask)
  [softmax] a = Softmax(p)
  [mix] y = MatMul(a, v)
}"""


def test_an_attention_mask_does_not_take_the_range_of_the_scores() -> None:
    plan = plan_of(MASKED)
    assert {"p", "mask", "m"} & set(plan.tensors) == set()
    assert "attention mask" in plan.nodes["add"].reason and "attention mask" in plan.nodes["softmax"].reason
    assert {"q", "k", "s", "a", "v"} == roles(plan, "activation")


def test_a_constant_used_in_two_ways_is_copied() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    agraph (float[4,4] x) => (float[4,4] y, float[4,4] z) <float[4,4] w>
    { [m] y = MatMul(x, w)   [g] z = Gemm<transB = 1>(x, w) }"""
    weight = Int8Spec(quant_granularity=QuantGranularity.Channel)
    plan = plan_of(text, layer=QLayerConfig(input_tensors=UInt8Spec(), weight=weight))
    axes = {name: plan.tensors[name].spec.granularity.axis for name in roles(plan, "weight")}  # type: ignore[attr-defined]
    assert axes == {"w": 1, "w_g": 0}


def test_matmul_of_two_activations_can_be_left_out() -> None:
    plan = plan_of(MASKED, extra_options={"MatMulConstBOnly": True})
    assert not plan.tensors and "MatMulConstBOnly" in plan.nodes["scores"].reason


def test_weights_only_plans_no_activation() -> None:
    assert {tensor.role for tensor in plan_of(extra_options={"WeightsOnly": True})} == {"weight"}


def test_outputs_can_be_left_float_by_type_and_name() -> None:
    assert "y" not in plan_of(extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm"]}).tensors
    assert "d" not in plan_of(extra_options={"NodesToExcludeOutputQuantization": ["c2"]}).tensors


def test_leaving_an_output_float_frees_what_hung_on_it() -> None:
    plan = plan_of(extra_options={"OpTypesToExcludeOutputQuantization": ["GlobalAveragePool"]})
    assert "g" not in plan.tensors and plan.tensors["f"].observed and plan.tensors["f"].group == "f"
    plan = plan_of(extra_options={"RemoveQDQBetweenOps": [("Reshape", "Gemm")]})
    assert "f" not in plan.tensors and "b3" not in plan.tensors, "a bias needs its input's scale"


def test_what_is_divided_by_stays_float() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    agraph (float[2,4] x, float[2,4] g) => (float[2,4] y) <float[1] eps>
    { [sq] q = Mul(x, x)  [mean] m = ReduceMean<axes = [1]>(q)  [add] e = Add(m, eps)  [root] s = Sqrt(e)
      [div] n = Div(x, s)  [gain] o = Mul(n, g)  y = Sigmoid(o) }"""
    plan = plan_of(text, extra_options={"QuantizeAllOpTypes": True})
    assert {"q", "m", "e", "s", "eps"} & set(plan.tensors) == set()
    assert {"x", "n", "g", "o"} == set(plan.tensors)
    assert "divided by" in plan.nodes["mean"].reason


def test_constant_operands_have_the_type_of_the_activation_beside_them() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    agraph (float[1,4] x) => (float[1,4] y) <float[4] k> { [m] h = Mul(x, k)  y = Sigmoid(h) }"""
    assert plan_of(text, spec=Int16Spec).tensors["k"].spec.format == "int16"
    weights = plan_of(text, spec=Int16Spec, extra_options={"AlignEltwiseQuantType": False})
    assert weights.tensors["k"].spec.format == "int8"


def test_aligned_concat_gives_one_group() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    agraph (float[1,4] x, float[1,4] z) => (float[1,8] y)
    { [s] a = Sigmoid(x)   [t] b = Tanh(z)   [c] y = Concat<axis = 1>(a, b) }"""
    assert len(plan_of(text).groups()) == 5
    aligned = plan_of(text, extra_options={"AlignConcat": True})
    assert {aligned.tensors[name].group for name in ("a", "b", "y")} == {"a"}


def test_a_plan_survives_json() -> None:
    plan = plan_of()
    again = Plan.from_json(plan.to_json())
    assert again.tensors == plan.tensors and again.nodes == plan.nodes


def test_explain_refuses_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown tensor or node 'w11'. Did you mean 'w1'"):
        plan_of().explain("w11")


ISLAND = """
<ir_version: 8, opset_import: ["" : 17]>
agraph (float[1,4,8,8] x) => (float[1,4,8,8] y)
<float[4,4,3,3] w1, float[1] two = {2.0}>
{
  [conv] c = Conv<pads = [1,1,1,1]>(x, w1)
  [pow] p = Pow(c, two)
  [add] m = Add(p, p)
  [tr] t = Transpose<perm = [0,1,3,2]>(m)
  [atan] s = Atan(t)
  [last] y = Conv<pads = [1,1,1,1]>(s, w1)
}
"""


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"extra_options": {"ForceQuantizeNoInputCheck": True}},
        {"layer": QLayerConfig(XInt8Spec(), XInt8Spec()), "extra_options": {"EnableNPUCnn": True}},
    ],
)
def test_cheap_nodes_between_float_ones_stay_float(config: dict) -> None:
    plan = plan_of(ISLAND, **config)
    assert {"p", "m", "t"} & set(plan.tensors) == set()
    assert all("between float operators" in plan.nodes[name].reason for name in ("add", "tr"))
    assert plan.nodes["conv"].quantized and plan.nodes["last"].quantized


@pytest.mark.parametrize(
    "config",
    [
        {"extra_options": {"QuantizeAllOpTypes": True}},
        {"extra_options": {"OpTypesToQuantize": ["Conv", "Add", "Transpose"]}},
        {"specific_layer_config": {QLayerConfig(input_tensors=Int8Spec()): ["add", "tr"]}},
    ],
)
def test_but_not_where_the_user_asks_for_them(config: dict) -> None:
    assert {"p", "m", "t"} <= set(plan_of(ISLAND, **config).tensors)


@pytest.mark.parametrize(("float_node", "input_of_add"), [("Atan(p)", "x"), ("Relu(t)", "p")])
def test_a_group_that_reaches_an_input_or_an_integer_operator_is_no_island(float_node: str, input_of_add: str) -> None:
    text = ISLAND.replace("Add(p, p)", f"Add({input_of_add}, p)").replace("Atan(t)", float_node)
    assert plan_of(text).nodes["add"].quantized


@pytest.mark.parametrize(("weight", "group", "axis"), [("4,1,3,3", 4, 0), ("4,2,3,3", 2, 1), ("4,1,3,3", 1, 1)])
def test_channels_of_a_depthwise_transposed_convolution_are_on_its_first_axis(
    weight: str, group: int, axis: int
) -> None:
    text = f"""
    <ir_version: 8, opset_import: ["" : 17]>
    agraph (float[1,4,8,8] x) => (float y) <float[{weight}] w>
    {{ [deconv] y = ConvTranspose<group = {group}>(x, w) }}"""
    layer = QLayerConfig(
        input_tensors=Int8Spec(),
        weight=Int8Spec(calibration_method=CalibMethod.MinMax, quant_granularity=QuantGranularity.Channel),
    )
    assert plan_of(text, layer=layer).tensors["w"].spec.granularity == Channel(axis)
