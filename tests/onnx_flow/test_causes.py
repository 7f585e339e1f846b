"""What each layer loses by itself: against arithmetic done here by hand, and on models that equalization rescales."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from quark.demo import data
from quark.measure.scaling import Scaling
from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.causes import causes, with_causes
from quark.onnx.compare import compare
from quark.onnx.page import neighbours
from quark.onnx.weight_views import weight_views

FLOAT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 8] x) => (float[n, 8] out)
<float[1] two = {2}, float[1] three = {3}>
{
  [first] a = Mul(x, two)
  [second] b = Tanh(a)
  [third] out = Mul(b, three)
}
"""
COARSE, FINE = 0.5, 0.01
QUANTIZED = f"""
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 8] x) => (float[n, 8] out)
<float[1] two = {{2}}, float[1] three = {{3}}, float coarse = {{{COARSE}}}, float fine = {{{FINE}}}, int8 zero = {{0}}>
{{
  [first] a = Mul(x, two)
  a_codes = QuantizeLinear(a, coarse, zero)
  a_back = DequantizeLinear(a_codes, coarse, zero)
  [second] b = Tanh(a_back)
  b_codes = QuantizeLinear(b, fine, zero)
  b_back = DequantizeLinear(b_codes, fine, zero)
  [third] out = Mul(b_back, three)
}}
"""


def rounded(x: np.ndarray, scale: float) -> np.ndarray:
    return np.clip(np.rint(x / scale), -128, 127) * scale


def decibel(x: np.ndarray, y: np.ndarray) -> float:
    return float(10 * np.log10(np.square(x).sum() / np.square(x - y).sum()))


def samples(count: int = 3) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(3)
    return [{"x": generator.standard_normal((4, 8)).astype(np.float32)} for _ in range(count)]


@pytest.fixture(scope="module")
def pair() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    return onnx.parser.parse_model(FLOAT), onnx.parser.parse_model(QUANTIZED)


def test_errors_are_those_of_one_layer_and_no_other(pair: tuple[onnx.ModelProto, onnx.ModelProto]) -> None:
    found = with_causes(compare(*pair, samples()), causes(*pair, samples()))
    x = np.concatenate([one["x"] for one in samples()]).astype(np.float64)
    a, b, out = 2 * x, np.tanh(2 * x), 3 * np.tanh(2 * x)
    layers = {layer.tensor: layer for layer in found.layers}
    assert layers["a"].own == pytest.approx(decibel(a, rounded(a, COARSE)), abs=0.01)
    assert layers["a"].alone == pytest.approx(decibel(out, 3 * np.tanh(rounded(a, COARSE))), abs=0.01)
    assert layers["b"].own == pytest.approx(decibel(b, rounded(b, FINE)), abs=0.01)
    assert layers["b"].alone == pytest.approx(decibel(out, 3 * rounded(b, FINE)), abs=0.01)
    everything = 3 * rounded(np.tanh(rounded(a, COARSE)), FINE)
    assert layers["out"].sqnr == pytest.approx(decibel(out, everything), abs=0.01)
    assert layers["out"].own == layers["out"].alone == np.inf  # its arithmetic is exact: it causes nothing


def test_layers_without_time_have_no_figure_at_the_outputs(
    pair: tuple[onnx.ModelProto, onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quark.onnx.causes.LEAST", 1)
    found = causes(*pair, samples(), seconds=0)
    assert set(found.own) == {"x", "a", "b", "out"} and "b" not in found.alone
    assert "all but the 1 layers with the smallest own errors" in found.told()


def test_an_error_at_a_graph_output_counts_once() -> None:
    text = QUANTIZED.replace(
        "[third] out = Mul(b_back, three)",
        "[third] c = Mul(b_back, three)\n"
        "  c_codes = QuantizeLinear(c, coarse, zero)\n  out = DequantizeLinear(c_codes, coarse, zero)",
    )
    found = causes(onnx.parser.parse_model(FLOAT), onnx.parser.parse_model(text), samples())
    x = np.concatenate([one["x"] for one in samples()]).astype(np.float64)
    out = 3 * np.tanh(2 * x)
    assert found.own["out"] == pytest.approx(decibel(out, rounded(out, COARSE)), abs=0.01) == found.alone["out"]


@pytest.mark.parametrize("axis", [1, -1])
def test_a_scale_per_channel_is_told_from_noise(axis: int) -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((4, 6, 5, 6))
    scale = np.moveaxis(np.array([0.2, 1, 3, 0.5, 2, 7]).reshape(6, 1, 1, 1), 0, axis)
    noise = 0.01 * generator.standard_normal(x.shape)
    scaled, noisy, few = Scaling(), Scaling(), Scaling()
    scaled.update(x, (x + noise) * scale)
    noisy.update(x, x + 30 * noise)
    few.update(x[0, :, :1, 0], x[0, :, :1, 0] * scale.ravel()[:, None])
    assert scaled.sqnr == pytest.approx(decibel(x, x + noise), abs=0.2)
    assert noisy.sqnr is None and few.sqnr is None
    shifted, still = Scaling(), 3 + 0.001 * x
    shifted.update(still, still + 0.2 * np.sign(scale - 1.5))  # channels that hardly vary, each off by a constant
    assert shifted.sqnr is None
    drowned = Scaling()
    drowned.update(x, 10 * x + 10 * generator.standard_normal(x.shape))
    assert drowned.sqnr is None  # a scale takes most of the error away, and what is left is not a copy of the values


def test_rescaled_layers_are_compared_once_the_scale_is_undone() -> None:
    (train, _), (inputs, _) = data.split()
    config = get_default_config("A8W8")
    config.include_cle, config.print_summary = True, False
    quantizer = ModelQuantizer(Config(global_quant_config=config))
    proto = quantizer.run(str(data.model_path()), None, data.Reader(train[:32])).proto
    feeds = [{data.INPUT: inputs[:16]}]
    found, measured = compare(data.model_path(), proto, feeds), causes(data.model_path(), proto, feeds)
    held = [layer for layer in found.layers if layer.rescaled]
    assert held and {layer.tensor for layer in held} <= measured.rescaled and "rescaled per channel" in measured.held()
    assert min(layer.sqnr for layer in found.layers) > 20  # without the scales undone: 2 dB
    together = -10 * np.log10(sum(10 ** (-one / 10) for one in measured.alone.values()))
    assert together == pytest.approx(found.outputs["logits"].sqnr, abs=2.0)  # single errors add up to what is lost
    assert not any(layer.rescaled for layer in compare(data.model_path(), data.model_path(), feeds).layers)


def test_weights_come_with_their_channels_and_limits() -> None:
    from quark.onnx.graph.model import load

    config = get_default_config("A8W8_CPU")
    config.print_summary = False
    config.extra_options["FloatWhereFaster"] = False
    (train, _), _ = data.split()
    proto = (
        ModelQuantizer(Config(global_quant_config=config))
        .run(str(data.model_path()), None, data.Reader(train[:8]))
        .proto
    )
    first, second = load(data.model_path()), load(proto)
    views = weight_views(first, second)
    stored = {one.name: onnx.numpy_helper.to_array(one) for one in proto.graph.initializer}
    assert len(views) == 9
    for name, view in views.items():
        node = next(node for node in proto.graph.node if node.name == name)
        reader = next(node_ for node_ in proto.graph.node if node_.output[0] == node.input[1])
        codes, scale = stored[reader.input[0]], stored[reader.input[1]]
        back = codes.astype(np.float64) * scale.reshape(-1, *[1] * (codes.ndim - 1))
        assert view.channels is not None and view.channels.high is not None and view.channels.low is not None
        assert np.allclose(view.channels.high, 127 * scale, rtol=1e-5) and len(view.channels.highest) == len(codes)
        assert np.allclose(view.channels.highest, back.reshape(len(codes), -1).max(1), atol=float(scale.max()))
        assert view.clipped == 0 and view.format == "int8" and view.counts.sum() > 0
    folded = [view.note for name, view in views.items() if "Conv" in name]
    assert all(folded) and not views["/head/Gemm"].note  # batch norms are in the weights of the convolutions


def test_neighbours_are_found_past_nodes_that_are_no_rows() -> None:
    from quark.onnx.graph.model import load

    model = load(onnx.parser.parse_model(FLOAT))
    found = dict(neighbours(model, {"a", "out"}))
    assert found["a"].reads == ("x",) and found["a"].feeds == ("out",) and found["out"].reads == ("a",)


@pytest.mark.parametrize(
    "between",
    [
        "s = SplitToSequence<axis = 1>(a, four) b = ConcatFromSequence<axis = 1>(s)",
        "s = Optional(a) b = OptionalGetElement(s)",
        "s = Cast<to = 16>(a) b = Cast<to = 1>(s)",
    ],
    ids=["sequence", "optional", "bfloat16"],
)
def test_what_no_array_holds_is_no_layer(between: str) -> None:
    """Its tensors cannot be fetched, or put back as arrays: the page of such a model ended in an error."""
    text = f"""<ir_version: 10, opset_import: ["" : 18]> g (float[4, 8] x) => (float[4, 8] y) <int64 four = {{4}}>
        {{ [first] a = MatMul(x, w) {between} [last] y = MatMul(b, w) }}"""
    proto = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).normal(0, 0.3, (8, 8)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    made = ModelQuantizer(Config(get_default_config("XINT8"))).quantize_model(proto, None, samples())
    assert made is not None
    layers = {layer.tensor for layer in compare(proto, made, samples()).layers}
    assert {"a", "y"} <= layers and "s" not in layers
    assert {"a", "y"} <= set(causes(proto, made, samples()).own)
