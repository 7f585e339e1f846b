"""Mixed precision and selection: every field of a layer's specs, every way to name nodes, who wins, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.config.plan import Plan
from quark.errors import ConfigError
from quark.numerics.granularity import Channel
from quark.onnx import (
    AutoMixprecisionConfig,
    BFloat16Spec,
    BFP16Spec,
    CalibMethod,
    Int8Spec,
    Int16Spec,
    Int32Spec,
    ModelQuantizer,
    MX9Spec,
    MXFP8E4M3Spec,
    MXInt8Spec,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    ScaleType,
    SmoothQuantConfig,
    UInt8Spec,
    XInt8Spec,
)
from quark.onnx.forecast import forecast

GRAPH = """g (float[1,4,8,8] x) => (float[1,8,4,4] y) {
    [c1] a = Conv<pads = [1,1,1,1]>(x, w1, b1)
    [r1] r = Relu(a)
    [c2] b = Conv<pads = [1,1,1,1]>(r, w2, b2)
    [add] s = Add(r, b)
    [pool] p = MaxPool<kernel_shape = [2,2], strides = [2,2]>(s)
    [c3] y = Conv<pads = [1,1,1,1]>(p, w3, b3)
}"""
WEIGHTS = {
    "w1": models.normal(4, 4, 3, 3, seed=1),
    "b1": models.normal(4, seed=2),
    "w2": models.normal(4, 4, 3, 3, seed=3) * 0.2,
    "b2": models.normal(4, seed=4),
    "w3": models.normal(8, 4, 3, 3, seed=5),
    "b3": models.normal(8, seed=6),
}
BASE = QLayerConfig(input_tensors=Int8Spec(calibration_method=CalibMethod.MinMax), weight=Int8Spec())
WIDE = QLayerConfig(input_tensors=Int16Spec(), weight=Int16Spec())


def float_model() -> onnx.ModelProto:
    return models.model(GRAPH, WEIGHTS, opset=21)


def plan_of(options: dict[str, Any] | None = None, **config: Any) -> Plan:
    proto = float_model()
    given = {"PrintSummary": False, **(options or {})}
    made = QConfig(config.pop("layer", BASE), extra_options=given, **config)
    before = proto.SerializeToString()
    result = ModelQuantizer(made).run(proto, None, [models.feeds(proto)])
    assert proto.SerializeToString() == before and result.proto is not None
    onnx.checker.check_model(result.proto, full_check=True)
    models.session(result.proto).run(None, models.feeds(proto))
    return result.plan


def formats(plan: Plan, *names: str) -> list[str]:
    return [plan.tensors[name].spec.format for name in names]


# ---- every field, every slot -----------------------------------------------------------------------------------------


def test_every_field_of_every_slot_reaches_its_tensor() -> None:
    layer = QLayerConfig(
        input_tensors=Int16Spec(symmetric=False, calibration_method=CalibMethod.Entropy),
        weight=Int8Spec(quant_granularity=QuantGranularity.Channel, calibration_method=CalibMethod.MinMSE),
        bias=Int16Spec(scale_type=ScaleType.PowerOf2),
        output_tensors=UInt8Spec(scale_type=ScaleType.PowerOf2, calibration_method=CalibMethod.MinMax),
    )
    plan = plan_of({"OpTypesToQuantize": ["Conv"]}, specific_layer_config={layer: ["c3"]})
    data, weight, bias, out = (plan.tensors[name].spec for name in ("p", "w3", "b3", "y"))
    assert (data.format, data.symmetric, data.method) == ("int16", False, "entropy")
    assert (weight.format, weight.granularity, weight.method) == ("int8", Channel(0), "mse")
    assert (bias.format, bias.scale_rule) == ("int16", "power_of_two")
    assert (out.format, out.symmetric, out.scale_rule, out.method) == ("uint8", False, "power_of_two", "minmax")
    assert np.shape(plan.tensors["w3"].scale) == (8,)
    assert all(np.log2(float(plan.tensors[name].scale)) % 1 == 0 for name in ("b3", "y"))


def test_slots_that_a_layer_leaves_open_follow_the_global_configuration() -> None:
    only_weight = QLayerConfig(weight=Int16Spec())
    plan = plan_of(specific_layer_config={only_weight: ["c2"]})
    assert formats(plan, "r", "w2", "b") == ["int8", "int16", "int8"]


def test_a_calibration_method_of_one_layer_changes_its_range_only() -> None:
    clipping = QLayerConfig(input_tensors=Int8Spec(calibration_method=CalibMethod.Percentile), weight=Int8Spec())
    plain = plan_of()
    plan = plan_of({"Percentile": 90.0}, specific_layer_config={clipping: ["c3"]})
    assert plan.tensors["y"].range[1] < plain.tensors["y"].range[1]  # type: ignore[index]
    assert plan.tensors["r"].range == plain.tensors["r"].range


def test_named_outputs_hold_behind_the_activation_function_of_the_same_kernel() -> None:
    """``a`` lies between c1 and its Relu and stays float: what c1's entry says of its outputs is said of ``r``."""
    unsigned = UInt8Spec(calibration_method=CalibMethod.MinMSE)
    named = QLayerConfig(weight=Int16Spec(), output_tensors=unsigned)
    for given in ({"specific_layer_config": {named: ["c1"]}}, {"layer_type_config": {named: ["Conv"]}}):
        plan = plan_of(**given)
        assert plan.tensors["r"].spec == unsigned.to_spec() and "c1" in plan.explain("r")
        assert "a" not in plan.tensors
    assert formats(plan_of(specific_layer_config={WIDE: ["c1"]}), "r") == ["int8"]  # it says nothing of its outputs
    later = {named: ["c1"], WIDE: ["r1"]}
    assert formats(plan_of(specific_layer_config=later), "r") == ["int16"]
    apart = plan_of({"RemoveQDQConvRelu": False}, specific_layer_config={named: ["c1"]})
    assert formats(apart, "a", "r") == ["uint8", "int8"]


def test_every_tensor_that_stays_float_says_why() -> None:
    plan = plan_of({"NodesToExcludeOutputQuantization": ["pool"]}, exclude=["c3"])
    assert plan.explain("a") == "tensor 'a': float, because Conv 'c1' and Relu 'r1' are one kernel (RemoveQDQConvRelu)"
    assert plan.explain("p") == "tensor 'p': float, because NodesToExcludeOutputQuantization: pool"
    assert plan.explain("w3") == "tensor 'w3': float, because 'c3' (Conv) stays float: exclude: c3"
    assert plan.explain("y").endswith("exclude: c3")
    assert Plan.from_json(plan.to_json()).explain("a") == plan.explain("a")


# ---- names, patterns, types, subgraphs -------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", ["c2", "^c2$", "^[cd]2", (["c2"], ["c2"])])
def test_a_node_can_be_named_in_every_way(selector: Any) -> None:
    plan = plan_of(specific_layer_config={WIDE: [selector]})
    assert formats(plan, "w1", "w2", "w3") == ["int8", "int16", "int8"]
    assert "specific_layer_config" in plan.explain("w2")


def test_a_subgraph_goes_from_its_start_to_its_end() -> None:
    plan = plan_of(specific_layer_config={WIDE: [(["r1"], ["add"])]})
    assert formats(plan, "w1", "w2", "w3") == ["int8", "int16", "int8"]
    assert formats(plan, "x", "r", "b", "s") == ["int8", "int16", "int16", "int16"]


def test_a_residual_block_is_a_subgraph() -> None:
    plan = plan_of(exclude=[(["c2"], ["add"])])
    assert {name for name, node in plan.nodes.items() if node.reason.startswith("exclude")} == {"c2", "add"}


def test_subgraphs_may_stand_in_a_list_of_their_own() -> None:
    plan = plan_of(exclude=["c1", [(["r1"], ["c2"]), (["c2"], ["add"])]])
    excluded = {name for name, node in plan.nodes.items() if node.reason.startswith("exclude")}
    assert excluded == {"c1", "r1", "c2", "add"}


def test_types_are_configured_and_excluded() -> None:
    plan = plan_of(layer_type_config={WIDE: ["Conv"], None: ["Add"]})
    assert formats(plan, "w1", "w2", "w3") == ["int16"] * 3
    assert not plan.nodes["add"].quantized and "layer_type_config: Add" in plan.explain("add")


def test_a_specific_layer_wins_over_its_type_and_exclusion_over_both() -> None:
    narrow = QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec())
    plan = plan_of(layer_type_config={WIDE: ["Conv"]}, specific_layer_config={narrow: ["c2"]}, exclude=["c3"])
    assert formats(plan, "w1", "w2") == ["int16", "int8"]
    assert "w3" not in plan.tensors and "exclude: c3" in plan.explain("c3")


@pytest.mark.parametrize("swapped", [False, True])
def test_later_entries_win_at_shared_tensors(swapped: bool) -> None:
    """``s`` is written by add and read by pool; ``r`` is read by c2 and add."""
    unsigned = QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec())
    entries = [(WIDE, ["c2"]), (unsigned, ["add"])]
    plan = plan_of(specific_layer_config=dict(reversed(entries) if swapped else entries))
    assert formats(plan, "r", "b") == (["int16", "int16"] if swapped else ["uint8", "uint8"])


def test_a_layer_behind_a_layout_operator_keeps_its_own_spec() -> None:
    plan = plan_of(specific_layer_config={WIDE: ["c3"]})
    assert formats(plan, "s", "p", "y") == ["int8", "int16", "int16"]
    assert float(plan.tensors["p"].scale) < float(plan.tensors["s"].scale) / 100  # type: ignore[arg-type]


def test_a_constant_that_two_layers_share_is_stored_once_per_spec() -> None:
    graph = "g (float[1,4,8,8] x) => (float[1,4,4,4] y) { [c1] a = Conv(x, w, b) [c2] y = Conv(a, w, b) }"
    proto = models.model(graph, {"w": WEIGHTS["w1"], "b": WEIGHTS["b1"]}, opset=21)
    config = QConfig(BASE, specific_layer_config={WIDE: ["c2"]}, extra_options={"PrintSummary": False})
    result = ModelQuantizer(config).run(proto, None, [models.feeds(proto)])
    assert sorted(tensor.spec.format for tensor in result.plan.of_role("weight")) == ["int16", "int8"]


def test_a_shared_input_in_either_operand_order_excludes_the_same_nodes() -> None:
    for operands in ("r, b", "b, r"):
        proto = models.model(GRAPH.replace("Add(r, b)", f"Add({operands})"), WEIGHTS)
        config = QConfig(BASE, exclude=[(["r1"], ["add"])], extra_options={"PrintSummary": False})
        plan = ModelQuantizer(config).run(proto, None, [models.feeds(proto)]).plan
        excluded = {name for name, node in plan.nodes.items() if node.reason.startswith("exclude")}
        assert excluded == {"r1", "c2", "add"}


# ---- formats beside each other ---------------------------------------------------------------------------------------


def test_several_block_formats_live_in_one_model() -> None:
    def both(spec: type) -> QLayerConfig:
        return QLayerConfig(input_tensors=spec(), weight=spec())

    plan = plan_of(
        layer=both(BFP16Spec),
        specific_layer_config={both(MX9Spec): ["c2"], both(MXFP8E4M3Spec): ["c3"], both(MXInt8Spec): ["add"]},
    )
    assert formats(plan, "w1", "w2", "w3") == ["bfp16", "mx9", "mxfp8_e4m3"]
    assert formats(plan, "r", "p", "s") == ["mxint8", "mxfp8_e4m3", "mxint8"]


def test_mixed_activations_and_weights_keep_what_they_are() -> None:
    mixed = QLayerConfig(input_tensors=BFloat16Spec(), weight=MX9Spec())
    plan = plan_of(layer=BASE, specific_layer_config={mixed: ["c2"]})
    assert formats(plan, "r", "w2", "w1") == ["bfloat16", "mx9", "int8"]


def test_float_layers_in_a_power_of_two_model_and_the_other_way_round() -> None:
    pow2 = QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec())
    plan = plan_of(layer=pow2, specific_layer_config={BASE: ["c3"]})
    assert plan.tensors["w1"].spec.scale_rule == "power_of_two" and plan.tensors["w3"].spec.scale_rule == "float32"
    plan = plan_of(layer=BASE, specific_layer_config={pow2: ["c3"]})
    assert plan.tensors["w1"].spec.scale_rule == "float32" and plan.tensors["w3"].spec.scale_rule == "power_of_two"


# ---- refused before any work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"specific_layer_config": {WIDE: ["c22"]}}, r"specific_layer_config: the node name 'c22'.*Did you mean 'c2'"),
        ({"specific_layer_config": {WIDE: ["^conv.*"]}}, r"specific_layer_config: the pattern '\^conv"),
        ({"layer_type_config": {WIDE: ["conv"]}}, r"layer_type_config: the operator type 'conv'.*Did you mean 'Conv'"),
        ({"exclude": ["c4"]}, r"exclude: the node name 'c4' matches no node"),
        ({"exclude": [(["c2"], ["cc3"])]}, r"exclude: the node name 'cc3'"),
        ({"exclude": [(["c3"], ["add"])]}, r"not closed: no start node leads to its end node 'add'"),
        ({"options": {"NodesToQuantize": ["c1", "c9"]}}, r"NodesToQuantize: the node name 'c9'"),
        ({"options": {"NodesToExcludeOutputQuantization": ["cc"]}}, r"NodesToExcludeOutputQuantization: the node"),
        ({"options": {"TensorQuantOverrides": {"ww1": [{"symmetric": True}]}}}, r"TensorQuantOverrides 'ww1'.*'w1'"),
        ({"options": {"OpTypesToQuantize": ["Convv"]}}, r"OpTypesToQuantize: the operator type 'Convv'.*'Conv'"),
    ],
)
def test_names_that_match_nothing_are_errors_before_any_sample_is_read(
    config: dict[str, Any], message: str, tmp_path: Any
) -> None:
    def samples() -> Any:
        raise AssertionError("a sample was read")
        yield

    options = {"PrintSummary": False, **config.pop("options", {})}
    output = tmp_path / "q.onnx"
    for algorithms in ([], [SmoothQuantConfig(), AutoMixprecisionConfig(target_layer_config=WIDE, metric_threshold=1)]):
        made = QConfig(BASE, extra_options=options, algo_config=algorithms, **config)
        with pytest.raises(ConfigError, match=message):
            ModelQuantizer(made).quantize_model(float_model(), output, samples())
        with pytest.raises(ConfigError, match=message):
            forecast(made.compile(), float_model())
    assert not output.exists()
    assert not output.exists()


def test_a_name_that_a_graph_pass_folds_away_is_no_error() -> None:
    graph = """g (float[1,4,8,8] x) => (float[1,4,6,6] y) {
        [c1] a = Conv(x, w) [bn] y = BatchNormalization(a, n_scale, n_bias, n_mean, n_var) }"""
    proto = models.model(graph, {"w": WEIGHTS["w1"], **models.batch_norm("n", 4)})
    config = QConfig(
        BASE, specific_layer_config={WIDE: ["^(c1|bn)$"]}, exclude=["bn"], extra_options={"PrintSummary": False}
    )
    plan = ModelQuantizer(config).run(proto, None, [models.feeds(proto)]).plan
    assert "bn" not in plan.nodes and plan.tensors["w"].spec.format == "int16"


def test_a_type_of_another_model_is_no_error_in_the_lists_of_options() -> None:
    assert plan_of({"OpTypesToQuantize": ["Conv", "LSTM"]}).nodes["c1"].quantized


def test_a_bias_of_its_own_type_stays_what_the_layer_says() -> None:
    plan = plan_of(specific_layer_config={QLayerConfig(bias=Int32Spec()): ["c2"]})
    assert plan.tensors["b2"].spec.format == "int32"


@pytest.mark.parametrize(
    ("field", "given", "message"),
    [
        ("exclude", "c2", r"exclude: give a list, \['c2'\], not the text 'c2'"),
        ("exclude", 3, "exclude: give a list of names, not 3"),
        ("exclude", [None], "exclude: None is neither a node name, nor a pattern .*, nor a subgraph"),
        ("exclude", [("c2", "add")], r"exclude: \('c2', 'add'\) is neither"),
        ("exclude", [[]], r"exclude: \[\] is neither"),
        ("specific_layer_config", {WIDE: "c2"}, r"specific_layer_config: give a list, \['c2'\]"),
        ("specific_layer_config", {"c2": WIDE}, "specific_layer_config: its keys are QLayerConfig"),
        ("specific_layer_config", [(WIDE, ["c2"])], "specific_layer_config: give a dictionary"),
        ("layer_type_config", {None: "Conv"}, r"layer_type_config: give a list, \['Conv'\]"),
        ("global_config", Int8Spec(), "global_config must be a QLayerConfig"),
        ("extra_options", ["Percentile"], "extra_options must be a dictionary"),
        ("algo_config", "cle", "algo_config"),
    ],
)
def test_fields_of_another_form_are_refused_in_words(field: str, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QConfig(**{"global_config": BASE, field: given})


@pytest.mark.parametrize("listed", ["layer_type_config", "OpTypesToQuantize", "ExtraOpTypesToQuantize"])
def test_types_that_the_model_lacks_are_told_and_those_that_exist_nowhere_refused(
    listed: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Types of ONNX, of its other domains, of ONNX Runtime and of our own domains exist; others have a nearest name."""

    def given(*types: str) -> dict[str, Any]:
        names = ["Conv", *types]
        return {listed: {WIDE: names}} if listed == "layer_type_config" else {"options": {listed: names}}

    there = ("ConvTranspose", "Gemm", "TreeEnsemble", "BiasGelu", "ExtendedLSTM")
    plan = plan_of(**given(*there))
    assert plan.nodes["c1"].quantized
    [told] = {line for line in caplog.messages if line.startswith(f"{listed}: the model has no")}
    assert told == f"{listed}: the model has no {', '.join(there)}"
    caplog.clear()
    for wrong, near in (("ConvTransposed", "ConvTranspose"), ("gemm", "Gemm"), ("BiasGeluu", "BiasGelu")):
        with pytest.raises(ConfigError, match=rf"{listed}: the operator type '{wrong}'.*Did you mean '{near}'"):
            plan_of(**given(wrong))
    with pytest.raises(ConfigError, match=rf"{listed}: an operator type is a text such as 'Conv', not 3|valid string"):
        plan_of(**given(3))  # type: ignore[arg-type]


def test_a_library_of_the_users_own_may_define_any_type(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quark.onnx.graph.run.library_files", lambda libraries: [])  # one that defines nothing
    plan_of(options={"OpTypesToQuantize": ["Conv", "MyOwn"], "UserCustomOpLibPath": "mine.so"})
    assert "OpTypesToQuantize: the model has no MyOwn" in caplog.messages
