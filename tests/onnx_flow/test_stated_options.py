"""Options at the edges of what the interface states: lower opsets, float16, fusions of old opsets, generated data."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tests.onnx_flow import models

from quark.errors import DataError, ModelError
from quark.onnx import BFloat16Spec, CalibMethod, Int8Spec, Int16Spec, ModelQuantizer, QConfig, QLayerConfig, XInt8Spec
from quark.onnx.graph.lower import lower
from quark.onnx.graph.model import load, to_proto
from quark.onnx.random_data import RandomDataReader

MINMAX = CalibMethod.MinMax
EIGHT = QLayerConfig(input_tensors=Int8Spec(calibration_method=MINMAX), weight=Int8Spec())
HEAD = "g (float[2,3,4] x) => (float[2,3,4] y) { [in] a = MatMul(x, w) "
GELU = HEAD + "s = Div(a, r2) e = Erf(s) p = Add(e, one) h = Mul(a, p) [gelu] g = Mul(h, half) [out] y = MatMul(g, w) }"
NORM = (
    HEAD + "m = ReduceMean<axes = [-1]>(a) c = Sub(a, m) q = Pow(c, two) v = ReduceMean<axes = [-1]>(q) "
    "t = Add(v, eps) d = Sqrt(t) [norm] n = Div(c, d) s = Mul(n, scale) b = Add(s, shift) [out] y = MatMul(b, w) }"
)
WEIGHTS = {
    "w": models.normal(4, 4),
    **{k: np.float32(v).reshape(()) for k, v in (("r2", 2**0.5), ("one", 1), ("half", 0.5), ("two", 2), ("eps", 1e-5))},
    "scale": models.normal(4, seed=1) + 2,
    "shift": models.normal(4, seed=2),
}


def network(graph: str, opset: int) -> onnx.ModelProto:
    named = {name: array for name, array in WEIGHTS.items() if f"{name})" in graph or f"{name}," in graph}
    return models.model(graph, named, opset)


def quantized(proto: onnx.ModelProto, layer: QLayerConfig = EIGHT, **options: Any) -> onnx.ModelProto:
    config = QConfig(layer, extra_options={"PrintSummary": False, **options})
    feed = models.feeds(proto)
    made = ModelQuantizer(config).quantize_model(proto, None, [feed])
    assert made is not None
    onnx.checker.check_model(made, full_check=True)
    x, y = models.run(proto, feed)[0].astype(np.float64), models.run(made, feed)[0]
    assert np.square(x).sum() / np.square(x - y).sum() > 100
    return made


def opset_of(proto: onnx.ModelProto) -> int:
    return next(entry.version for entry in proto.opset_import if entry.domain == "")


# ---- opsets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "wanted", "layer", "found"), [
    (17, 15, EIGHT, 15),
    (17, 13, EIGHT, 13),
    (13, 17, EIGHT, 17),
    (17, 17, EIGHT, 17),
    (17, 11, EIGHT, 13),
    (21, 13, QLayerConfig(input_tensors=Int16Spec(calibration_method=MINMAX), weight=Int8Spec()), 21),
])  # fmt: skip
def test_the_opset_becomes_the_wanted_one(
    given: int, wanted: int, layer: QLayerConfig, found: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the types need a newer one it stays at that, and is told."""
    proto = models.model(HEAD + "[out] y = Relu(a) }", {"w": WEIGHTS["w"]}, given)
    assert opset_of(quantized(proto, layer, ConvertOpsetVersion=wanted)) == found
    told = f"ConvertOpsetVersion={wanted}: the quantized model needs opset {found}"
    assert (told in caplog.messages) == (found > wanted)


@pytest.mark.parametrize(
    ("body", "given", "wanted", "why"),
    [
        ("[n] y = ReduceMean(x, axes)", 18, 17, "ReduceMean takes 1 to 1 inputs, not 2"),
        ("[n] y = LayerNormalization(x, scale)", 17, 16, "opset 16 has no operator LayerNormalization"),
        ("[n] y = Reshape<allowzero = 1>(x, shape)", 17, 13, "Reshape has no attribute 'allowzero' in opset 13"),
        ("[n] y = GridSample(image, grid)", 20, 16, "GridSample computes something else before opset 20"),
        ("c = Cast<to = 6>(x) [n] r = Relu(c) y = Cast<to = 1>(r)", 17, 13, r"Relu takes no tensor.int32. in opset 13"),
    ],
)
def test_what_an_older_opset_does_not_have_is_named(body: str, given: int, wanted: int, why: str) -> None:
    inputs = "float[2,4] x, float[1,1,4,4] image, float[1,2,2,2] grid"
    weights = {"axes": np.array([-1]), "scale": WEIGHTS["scale"], "shape": np.array([4, 2])}
    used = {name: array for name, array in weights.items() if f", {name})" in body}
    model = load(models.model(f"g ({inputs}) => (float y) {{ {body} }}", used, given))
    with pytest.raises(ModelError, match=rf"from opset {given} to {wanted}: node .*n.*: {why}"):
        lower(model, wanted)
    assert to_proto(model).opset_import[0].version == given


def test_a_model_that_cannot_be_lowered_is_refused_by_the_flow() -> None:
    with pytest.raises(ModelError, match=r"from opset 18 to 13: .*ReduceMean"):
        quantized(
            models.model(
                HEAD + "m = ReduceMean(a, axes) y = Sub(a, m) }", {"w": WEIGHTS["w"], "axes": np.array([-1])}, 18
            ),
            ConvertOpsetVersion=13,
        )


@pytest.mark.parametrize("opset", [14, 17, 18, 20, 21])
def test_a_lowered_model_is_valid_and_computes_the_same(opset: int) -> None:
    """Also nodes in bodies count; attributes at their defaults, as exporters write them, are in nobody's way."""
    graph = """g (float[2,4] x, bool c) => (float[4,2] y) {
        a = MatMul(x, w) n = BatchNormalization<training_mode = 0>(a, s, b, m, v)
        t = If(c) <then_branch = t () => (float[2,4] p) { p = Relu(n) },
                   else_branch = e () => (float[2,4] q) { q = LeakyRelu(n) }>
        y = Reshape<allowzero = 0>(t, shape) }"""
    norm = dict(zip("sbmv", models.batch_norm("n", 4).values(), strict=True))
    proto = models.model(graph, {"w": WEIGHTS["w"], "shape": np.array([4, 2]), **norm}, opset)
    feed = {"x": models.normal(2, 4), "c": np.array(False)}
    model = load(proto)
    lower(model, 13)
    made = to_proto(model)
    assert opset_of(made) == 13
    onnx.checker.check_model(made, full_check=True)
    np.testing.assert_array_equal(models.run(made, feed)[0], models.run(proto, feed)[0])


# ---- fusions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "graph", "fused", "since"), [
    ("FuseGelu", GELU, "Gelu", 20), ("FuseLayerNorm", NORM, "LayerNormalization", 17),
])  # fmt: skip
@pytest.mark.parametrize("opset", [13, 17])
def test_a_fusion_that_is_written_down_lifts_the_model(
    option: str, graph: str, fused: str, since: int, opset: int
) -> None:
    proto = network(graph, opset)
    plain, asked = quantized(proto), quantized(proto, **{option: True})
    off, kept = quantized(proto, **{option: False}), quantized(proto, **{option: True}, ConvertOpsetVersion=opset)
    assert opset_of(asked) == max(opset, since) and fused in models.op_types(asked)
    assert opset_of(plain) == opset_of(off) == opset_of(kept) == opset
    assert (fused in models.op_types(plain)) == (fused in models.op_types(kept)) == (opset >= since)
    assert fused not in models.op_types(off)


@pytest.mark.parametrize("option", ["FuseGelu", "FuseLayerNorm"])
def test_nothing_is_lifted_where_nothing_is_fused(option: str) -> None:
    proto = models.model(HEAD + "e = Erf(a) t = Tanh(e) y = Mul(t, a) }", {"w": WEIGHTS["w"]}, 13)
    assert opset_of(quantized(proto, **{option: True})) == 13


# ---- what is written down acts ---------------------------------------------------------------------------------------

WIDE = QLayerConfig(input_tensors=Int16Spec(calibration_method=MINMAX), weight=Int8Spec())
POWERS = QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec())


@pytest.mark.parametrize("layer", [EIGHT, WIDE, POWERS], ids=["A8W8", "A16W8", "XINT8"])
@pytest.mark.parametrize(("low", "high", "by_default"), [(0, 6, True), (0, 1, True), (-1, 1, False), (0, None, False)])
def test_a_clip_is_part_of_its_layer_where_devices_have_it_or_the_user_says_so(
    layer: QLayerConfig, low: float, high: float | None, by_default: bool
) -> None:
    bounds = "lo, hi" if high is not None else "lo"
    proto = models.model(
        HEAD + f"[clip] c = Clip(a, {bounds}) y = Tanh(c) }}",
        {"w": WEIGHTS["w"], "lo": np.float32(low).reshape(()), "hi": np.float32(high or 0).reshape(())},
        13,
    )
    if high is None:
        del proto.graph.initializer[2]
    for options, removed in (
        ({}, by_default),
        ({"RemoveQDQConvClip": True}, True),
        ({"RemoveQDQConvClip": False}, False),
    ):
        config = QConfig(layer, extra_options={"PrintSummary": False, **options})
        plan = ModelQuantizer(config).run(proto, None, [models.feeds(proto)]).plan
        assert ("a" not in plan.tensors) == removed, (options, plan.explain("a"))


@pytest.mark.parametrize("layer", [EIGHT, WIDE, POWERS], ids=["A8W8", "A16W8", "XINT8"])
@pytest.mark.parametrize("given", [None, True, False])
def test_the_device_is_simulated_in_its_own_flow_and_where_that_is_written_down(
    layer: QLayerConfig, given: bool | None
) -> None:
    graph = """g (float[1,4,9,9] x) => (float[1,4,3,3] y) {
        a = Conv(x, w) s = Sigmoid(a) l = LeakyRelu<alpha = 0.1>(s)
        y = AveragePool<kernel_shape = [3,3], strides = [3,3]>(l) }"""
    proto = models.model(graph, {"w": models.normal(4, 4, 1, 1)}, 13)
    acts = layer is POWERS if given is None else given
    options = {} if given is None else {"SimulateDPU": given}
    config = QConfig(layer, extra_options={"PrintSummary": False, **options})
    made = ModelQuantizer(config).quantize_model(proto, None, [models.feeds(proto)])
    assert made is not None
    onnx.checker.check_model(made, full_check=True)
    types = [node.op_type for node in made.graph.node]
    assert ("HardSigmoid" in types, "Sigmoid" in types, types.count("Mul")) == (acts, not acts, 2 * acts)
    [slope] = [node.attribute[0].f for node in made.graph.node if node.op_type == "LeakyRelu"]
    assert slope == np.float32(26 / 256 if acts else 0.1)
    own = QConfig(layer, extra_options={"PrintSummary": False, **options, "ConvertSigmoidToHardSigmoid": False})
    kept = ModelQuantizer(own).quantize_model(proto, None, [models.feeds(proto)])
    assert kept is not None and "Sigmoid" in [node.op_type for node in kept.graph.node]


@pytest.mark.parametrize("option", ["EnableNPUTransformer", None])
def test_forms_that_npu_compilers_know_are_those_of_the_transformer_flow_too(option: str | None) -> None:
    graph = HEAD.replace("float[2,3,4] y", "float[2,3,2] y, float[2,3,2] z") + "y, z = Split<axis = 2>(a) }"
    proto = models.model(graph, {"w": WEIGHTS["w"]}, 13)
    config = QConfig(EIGHT, extra_options={"PrintSummary": False, **({option: True} if option else {})})
    made = ModelQuantizer(config).quantize_model(proto, None, [models.feeds(proto)])
    assert made is not None and ("Split" in models.op_types(made)) == (option is None)


# ---- float16, biases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, False, True])
def test_a_float16_model_is_quantized_as_one_whatever_is_said(
    given: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    graph = "g (float16[2,4] x) => (float16[2,6] y) { y = MatMul(x, w) }"
    proto = models.model(graph, {"w": models.normal(4, 6).astype(np.float16)}, 17)
    made = quantized(proto, QuantizeFP16=given)
    assert made.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    assert ("so QuantizeFP16 is on" in caplog.text) == (given is False)


@pytest.mark.parametrize(("layer", "copied"), [
    (EIGHT, True),
    (QLayerConfig(input_tensors=Int16Spec(calibration_method=MINMAX), weight=Int8Spec()), True),
    (QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()), True),
    (QLayerConfig(input_tensors=BFloat16Spec(), weight=BFloat16Spec()), False),
    (QLayerConfig(input_tensors=Int8Spec(calibration_method=MINMAX), weight=BFloat16Spec()), False),
])  # fmt: skip
@pytest.mark.parametrize("given", [None, ["Conv"]])
def test_shared_biases_are_copied_beside_integers_only(layer: QLayerConfig, copied: bool, given: Any) -> None:
    graph = """g (float[1,4,5,5] x) => (float[1,6,5,5] y) {
        a = Conv(x, w, b) c = Conv(x, v, b) y = Add(a, c) }"""
    weights = {"w": models.normal(6, 4, 1, 1, seed=1), "v": models.normal(6, 4, 1, 1, seed=2), "b": models.normal(6)}
    proto = models.model(graph, weights, 17)
    options = {} if given is None else {"CopyBiasInit": given}
    config = QConfig(layer, extra_options={"PrintSummary": False, "QuantizeBias": False, **options})
    passes = ModelQuantizer(config).run(proto, None, [models.feeds(proto)]).passes
    assert any(one.name == "copy_bias_init" and one.fired for one in passes) == copied


# ---- generated data --------------------------------------------------------------------------------------------------


def two_inputs() -> onnx.ModelProto:
    return models.model(
        "g (float[2,4] x, float[N,4] z) => (float[2,4] y) { a = MatMul(x, w) y = Add(a, z) }", {"w": WEIGHTS["w"]}
    )


@pytest.mark.parametrize(("ranges", "missing"), [({"x": [0, 5]}, "z"), ({"z": (0, 5)}, "x"), ({}, "x")])
def test_every_input_needs_a_range_of_generated_data(ranges: dict[str, Any], missing: str) -> None:
    message = rf"RandomDataReaderInputDataRange gives no \[lowest, highest\] for the input '{missing}'"
    with pytest.raises(DataError, match=message) as caught:
        RandomDataReader(two_inputs(), input_data_range=ranges)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(ValueError, match=message):
        config = QConfig(EIGHT, extra_options={"UseRandomData": True, "RandomDataReaderInputDataRange": ranges})
        ModelQuantizer(config).quantize_model(two_inputs())


def test_generated_data_keep_to_their_ranges() -> None:
    given = RandomDataReader(two_inputs(), input_data_range={"x": (2, 3), "z": [-5, -4]}).get_next() or {}
    assert 2 <= given["x"].min() <= given["x"].max() < 3 and -5 <= given["z"].min() <= given["z"].max() < -4
    plain = RandomDataReader(two_inputs()).get_next() or {}
    assert all(0 <= array.min() <= array.max() < 1 for array in plain.values())


def test_numbers_of_the_graph_are_where_the_text_says() -> None:
    """Guards the networks above: the fusions are looked for in what exporters write."""
    for graph in (GELU, NORM):
        names = {tensor.name for tensor in network(graph, 17).graph.initializer}
        used = {name for node in network(graph, 17).graph.node for name in node.input}
        assert names <= used
        assert all(numpy_helper.to_array(tensor).dtype == np.float32 for tensor in network(graph, 17).graph.initializer)
