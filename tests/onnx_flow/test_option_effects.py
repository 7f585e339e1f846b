"""Options whose effect no other test shows on a model; and a look whether every option has such a test somewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.onnx_flow import models

from quark.config.options import OPTIONS
from quark.onnx import (
    BFP16Spec,
    CalibMethod,
    Config,
    GPTQConfig,
    Int8Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    XInt8Spec,
    get_default_config,
)
from quark.onnx.flow import Result
from quark.onnx.layer_runs import candidate_layers

MINMAX, CHANNEL = CalibMethod.MinMax, QuantGranularity.Channel
EIGHT = QLayerConfig(input_tensors=Int8Spec(calibration_method=MINMAX), weight=Int8Spec())
CHANNELS = QLayerConfig(input_tensors=Int8Spec(calibration_method=MINMAX), weight=Int8Spec(quant_granularity=CHANNEL))
POWERS = QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec())
BLOCKS = QLayerConfig(input_tensors=BFP16Spec(), weight=BFP16Spec())
HEAVY = models.normal(4, 4, 32, 32, seed=1)
HEAVY[0, 0, 0, 0] = 40
WEIGHTS = {
    "w": models.normal(4, 4, 3, 3, seed=1) / 3,
    "heavy": HEAVY,
    "b": models.normal(4, seed=2),
    "ones": np.ones(4, np.float32),
    "tiny": models.normal(4, 4, 3, 3, seed=1) * np.float32(2**-16),
    "far": np.array([-1000, 0.01, 0.01, 0.01], np.float32),
    "slope": np.full((4, 1, 1), 0.1, np.float32),
    "k": models.normal(6, 5, seed=3),
    "half": np.full((1,), 0.5, np.float32),
    "six": np.float32(6).reshape(()),
    "none": np.float32(0).reshape(()),
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
    "one": np.array([1], np.int64),
    "two": np.array([2], np.int64),
    "flat": np.array([1, -1], np.int64),
    **models.batch_norm("n", 4),
}
IMAGE = "g (float[1,4,8,8] x) => (float y) {{ [conv] a = Conv<pads = [1,1,1,1]>(x, w, b) {} }}"
TWICE = IMAGE.format("[next] y = Conv<pads = [1,1,1,1]>(a, w, b)")
ALL = {"QuantizeAllOpTypes": True}


def run(
    graph: str,
    layer: QLayerConfig,
    samples: Sequence[float] = (1,),
    opset: int = 13,
    named: dict[QLayerConfig, list[Any]] | None = None,
    **options: Any,
) -> Result:
    words = set(graph.replace("(", " ").replace(")", " ").replace(",", " ").split())
    proto = models.model(graph, {name: array for name, array in WEIGHTS.items() if name in words}, opset=opset)
    feeds = [{"x": models.feeds(proto)["x"] * np.float32(k)} for k in samples]
    given = {"PrintSummary": False, **options}
    result = ModelQuantizer(QConfig(layer, named, extra_options=given)).run(proto, None, feeds)
    assert result.proto is not None
    assert np.isfinite(models.session(result.proto).run(None, feeds[0])[0]).all()
    return result


# ---- what is looked at -----------------------------------------------------------------------------------------------


def operators(result: Result) -> list[str]:
    assert result.proto is not None
    return sorted(node.op_type for node in result.proto.graph.node if "uantize" not in node.op_type)


def quantized(name: str) -> Callable[[Result], Any]:
    return lambda result: name in result.plan.tensors


def format_of(name: str) -> Callable[[Result], Any]:
    return lambda result: result.plan.tensors[name].spec.format


def opset_of(result: Result) -> int:
    assert result.proto is not None
    return next(int(one.version) for one in result.proto.opset_import if not one.domain)


def nodes(result: Result) -> set[str]:
    return {node.op_type for node in result.plan.nodes.values() if node.quantized}


def stored(dtype: int) -> Callable[[Result], Any]:
    """How many initializers of a type have more than one element."""
    return lambda result: sum(
        tensor.data_type == dtype and int(np.prod(tensor.dims)) > 1 for tensor in result.proto.graph.initializer
    )


def scales(name: str) -> Callable[[Result], Any]:
    return lambda result: np.asarray(result.plan.tensors[name].scale).size


FLOAT, INT8 = 1, 3


@dataclass(frozen=True)
class Effect:
    """One option: a model, two values, and what is seen under each."""

    option: str
    graph: str
    see: Callable[[Result], Any]
    values: tuple[Any, Any]
    seen: tuple[Any, Any]
    layer: QLayerConfig = field(default_factory=lambda: EIGHT)
    base: dict[str, Any] = field(default_factory=dict)
    opset: int = 13


def fused(option: str, follower: str, between: str = "", opset: int = 13) -> Effect:
    """An activation that its producer feeds without a pair between."""
    graph = IMAGE.format(f"{between} y = {follower}")
    return Effect(
        option, graph, quantized("c" if between else "a"), (False, True), (True, False), base=ALL, opset=opset
    )


EFFECTS = [
    fused("RemoveQDQConvRelu", "Relu(a)"),
    fused("RemoveQDQConvClip", "Clip(a, none, six)"),
    fused("RemoveQDQConvLeakyRelu", "LeakyRelu(a)"),
    fused("RemoveQDQConvPRelu", "PRelu(a, slope)"),
    fused("RemoveQDQConvGelu", "Gelu(a)", opset=20),
    fused("RemoveQDQInstanceNorm", "Relu(c)", "c = InstanceNormalization(a, ones, b)"),
    Effect(
        "RemoveQDQMulAdd", IMAGE.format("m = Mul(a, a) y = Add(m, x)"), quantized("m"), (False, True), (True, False)
    ),
    Effect("RemoveFusedQDQ", IMAGE.format("y = Relu(a)"), quantized("a"), (False, True), (True, False), BLOCKS),
    Effect(
        "ConvertReduceMeanToGlobalAvgPool",
        IMAGE.format("y = ReduceMean<axes = [2,3]>(a)"),
        operators,
        (False, True),
        (["Conv", "ReduceMean"], ["Conv", "GlobalAveragePool"]),
    ),
    Effect("ConvertOpsetVersion", TWICE, opset_of, (None, 17), (13, 17)),
    Effect("CopySharedInit", TWICE, stored(INT8), (None, []), (1, 2)),
    Effect("CopyBiasInit", TWICE, stored(FLOAT), (None, ["Conv"]), (1, 2), base={"QuantizeBias": False}),
    Effect("EnableNPUCnn", TWICE, format_of("b"), (False, None), ("int32", "int8"), POWERS),
    Effect(
        "EnableNPUTransformer",
        "g (float[1,6] x) => (float y) { m = MatMul(x, k) y = Sigmoid(m) }",
        nodes,
        (False, True),
        ({"MatMul", "Sigmoid"}, {"MatMul"}),
    ),
    Effect("ExtraOpTypesToQuantize", IMAGE.format("y = Exp(a)"), nodes, ([], ["Exp"]), ({"Conv"}, {"Conv", "Exp"})),
    Effect("Int32Bias", TWICE, format_of("b"), (True, False), ("int32", "int8")),
    Effect(
        "OptimizeModel",
        IMAGE.format("c = Add(half, half) i = Identity(a) y = Mul(i, c)"),
        operators,
        (False, True),
        (["Add", "Conv", "Identity", "Mul"], ["Conv", "Mul"]),
        base={"SimplifyModel": False},
    ),
    Effect(
        "SimplifyModel",
        IMAGE.format("t = Sin(a) u = Sin(a) y = Add(t, u)"),
        operators,
        (False, True),
        (["Add", "Conv", "Sin", "Sin"], ["Add", "Conv", "Sin"]),
    ),
    Effect(
        "SimplifyModelOptions",
        IMAGE.format("t = Sin(a) u = Sin(a) y = Add(t, u)"),
        operators,
        ({"skip_optimizations": ["subexpression_elimination"]}, {}),
        (["Add", "Conv", "Sin", "Sin"], ["Add", "Conv", "Sin"]),
    ),
    Effect(
        "SkipPreprocess",
        IMAGE.format("y = BatchNormalization(a, n_scale, n_bias, n_mean, n_var)"),
        operators,
        (True, False),
        (["BatchNormalization", "Conv"], ["Conv"]),
        CHANNELS,
    ),
    Effect(
        "QDQOpTypePerChannelSupportToAxis",
        "g (float[1,6] x) => (float y) { y = MatMul(x, k) }",
        scales("k"),
        ({}, {"MatMul": 0}),
        (5, 6),
        CHANNELS,
    ),
    Effect(
        "UseUnsignedReLU",
        IMAGE.format("y = Relu(a)"),
        format_of("y"),
        (False, True),
        ("int8", "uint8"),
        base=ALL | {"ForceQuantizeNoInputCheck": True},
    ),
]


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: effect.option)
def test_effect(effect: Effect) -> None:
    for value, seen in zip(effect.values, effect.seen, strict=True):
        base = {key: given for key, given in effect.base.items() if key != effect.option}
        result = run(effect.graph, effect.layer, opset=effect.opset, **{**base, effect.option: value})
        assert effect.see(result) == seen, value


@pytest.mark.parametrize(
    ("option", "move"),
    [
        ("AlignPad", "Pad(a, pads)"),
        ("AlignSlice", "Slice(a, one, two, one)"),
        ("AlignTranspose", "Transpose(a)"),
        ("AlignReshape", "Reshape(a, flat)"),
    ],
)
def test_what_is_moved_keeps_the_scale_of_its_source(option: str, move: str) -> None:
    """By itself it does; here a later entry gives its reader a range of its own."""
    graph = IMAGE.format(f"m = {move} [next] y = Mul(m, m)")
    cutting = QLayerConfig(input_tensors=Int8Spec(calibration_method=CalibMethod.Percentile), weight=Int8Spec())
    scale = {}
    for aligned in (False, True):
        options = {"Percentile": 80.0, option: aligned}
        plan = run(graph, EIGHT, named={cutting: ["next"]}, **ALL, **options).plan
        scale[aligned] = [float(plan.tensors[name].scale) for name in ("a", "m")]
    assert scale[False][1] < 0.8 * scale[False][0]
    assert scale[True] == [scale[False][0]] * 2


def test_what_a_softmax_makes_has_a_scale_from_0_to_1_or_that_of_the_data() -> None:
    graph = IMAGE.format("s = Softmax<axis = 1>(a) [next] y = Conv<pads = [1,1,1,1]>(s, w, b)")
    known = run(graph, EIGHT).plan.tensors["s"]
    assert float(known.scale) == pytest.approx(1 / 127)
    found = run(graph, EIGHT, MeasureSoftmax=True).plan.tensors["s"]
    assert 0.25 < 127 * float(found.scale) < 1  # the largest of four is at least a quarter


def test_weights_are_searched_by_the_method_that_is_asked_for() -> None:
    graph = "g (float[1,4,32,32] x) => (float y) { y = Conv(x, heavy) }"
    widest = float(run(graph, EIGHT, WeightCalibrateMethod="MinMax").plan.tensors["heavy"].scale)
    assert widest == pytest.approx(40 / 127)
    for mode in ("All", "HistCenter"):
        found = run(graph, EIGHT, WeightCalibrateMethod="MinMSE", MinMSEModeFloatScale=mode).plan.tensors["heavy"]
        assert found.spec.method == "mse" and float(found.scale) < 0.97 * widest
    cut = run(graph, EIGHT, WeightCalibrateMethod="MinMSE", MinMSEModeFloatScale="Percentile").plan.tensors["heavy"]
    every = run(graph, EIGHT, WeightCalibrateMethod="MinMSE", MinMSEModeFloatScale="All").plan.tensors["heavy"]
    assert float(cut.scale) != float(every.scale)


@pytest.mark.parametrize("constant", [0.25, 0.5])
def test_the_constant_of_the_moving_average_weighs_the_newest_sample(constant: float) -> None:
    graph, options = IMAGE.format("y = Relu(a)"), {"CalibMovingAverage": True, "CalibMovingAverageConstant": constant}
    found = run(graph, EIGHT, samples=(1, 2), **options).plan.tensors["x"].range
    first = run(graph, EIGHT).plan.tensors["x"].range
    older, newer = constant * (1 - constant), constant  # the weights of the two samples, of which the second is twice
    assert found is not None and first is not None
    np.testing.assert_allclose(found, np.multiply(first, (older + 2 * newer) / (older + newer)), rtol=1e-5)


def test_layerwise_percentile_takes_the_candidate_of_least_error_by_its_metric() -> None:
    layer = QLayerConfig(input_tensors=Int8Spec(calibration_method=CalibMethod.LayerwisePercentile), weight=Int8Spec())
    graph = IMAGE.format("c = Mul(a, a) d = Mul(c, c) y = Mul(d, d)")

    def widest(**options: Any) -> float:
        return float(run(graph, layer, **options).plan.tensors["d"].scale)

    cut, whole = (widest(PercentileCandidates=[share]) for share in (60.0, 100.0))
    assert cut < whole / 2
    assert widest(PercentileCandidates=[60.0, 100.0], LWPMetric="mse") == pytest.approx(whole)


@pytest.mark.parametrize(("metric", "largest"), [("mae", 4), ("mse", 100)])
def test_one_far_value_is_cut_by_mean_magnitude_and_kept_by_mean_square(metric: str, largest: float) -> None:
    """1,024 values: cutting 100 to 3 costs 0.1 on average and 9 squared; a step of 100 / 127 costs 0.2 and 0.05."""
    image = np.random.default_rng(0).standard_normal((1, 4, 16, 16)).astype(np.float32)
    image[0, 0, 0, 0] = 100
    proto = models.model("g (float[1,4,16,16] x) => (float[1,4,14,14] y) { y = Conv(x, w) }", {"w": WEIGHTS["w"]})
    layer = QLayerConfig(input_tensors=Int8Spec(calibration_method=CalibMethod.LayerwisePercentile), weight=Int8Spec())
    options = {"PrintSummary": False, "PercentileCandidates": [99.5, 100.0], "LWPMetric": metric}
    plan = ModelQuantizer(QConfig(layer, extra_options=options)).run(proto, None, [{"x": image}]).plan
    assert largest / 2 < plan.tensors["x"].range[1] <= largest


def test_the_most_common_power_of_two_of_the_samples_is_not_that_of_all() -> None:
    graph = "g (float[1,4,8,8] x) => (float y) { a = Conv(x, w, b) y = Relu(a) }"
    found = {
        mode: float(run(graph, POWERS, samples=(1, 1, 1, 64), MinMSEModePof2Scale=mode).plan.tensors["x"].scale)
        for mode in ("All", "MostCommon")
    }
    assert found["MostCommon"] <= found["All"] / 4


def test_calibration_runs_on_the_providers_that_are_asked_for() -> None:
    with pytest.raises(Exception, match="NoSuchProvider"):
        run(TWICE, EIGHT, ExecutionProviders=["NoSuchProvider"])


def test_a_swish_is_held_within_its_shifter() -> None:
    graph = IMAGE.format("s = HardSigmoid<alpha = 0.16666667>(a) y = Mul(a, s)").replace("(x, w, b)", "(x, tiny, far)")
    moved = {}
    for held in (False, True):
        options = {"AdjustShiftSwish": held, "AdjustShiftWrite": False, "AdjustHardSigmoid": False}
        plan = run(graph, POWERS, ForceQuantizeNoInputCheck=True, **options).plan
        moved[held] = [change for change in plan.tensors["y"].changes if "shift_swish" in change]
    assert not moved[False] and moved[True]


def test_every_option_is_named_by_a_test_of_the_flow() -> None:
    folder = Path(__file__).parent
    words = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    assert [name for name in OPTIONS if name not in words] == []


def test_weights_that_gptq_asks_for_are_those_of_presets_too() -> None:
    said = GPTQConfig(bits=4, per_channel=True, mse=True)
    preset = get_default_config("A8W8")
    preset.algorithms = [said]
    wanted = QConfig(QLayerConfig(Int8Spec(), Int8Spec()), algo_config=[said]).compile().rules.default.weight
    assert wanted is not None and wanted.format == "int4" and Config(preset).compile().rules.default.weight == wanted


@pytest.mark.parametrize("where", ["preset", "layers", "candidate"])
@pytest.mark.parametrize(
    "given",
    [
        {"Int16Scale": True},
        {"WeightCalibrateMethod": "MinMSE"},
        {"WeightCalibrateMethod": "MinMSE", "MinMSEModeFloatScale": "Percentile"},
    ],
)
def test_options_about_scales_and_weights_hold_for_presets_too(where: str, given: dict[str, Any]) -> None:
    """In the configuration, for its single layers and for the candidates of a search: as for specs spelt out."""
    wanted = QConfig(QLayerConfig(Int8Spec(), Int8Spec()), extra_options=given).compile().rules.default
    preset = get_default_config("A8W8")
    preset.extra_options.update(given)
    preset.layers = {"one": preset.layer}
    job = Config(preset).compile()
    single = next(rule.layer for rule in job.rules.rules if rule.source == "layers")
    tried = candidate_layers(["A8W8"], job)["A8W8"]
    found = {"preset": job.rules.default, "layers": single, "candidate": tried}[where]
    assert found is not None and found.weight == wanted.weight
    assert found.inputs is not None and wanted.inputs is not None
    assert found.inputs.scale_rule == wanted.inputs.scale_rule
