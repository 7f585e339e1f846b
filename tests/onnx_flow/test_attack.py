"""Corners where the flow once gave a wrong number, an unloadable file or a foreign traceback."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.onnx_flow import models

import quark.onnx as q
from quark.errors import ConfigError, ModelError
from quark.onnx import (
    CalibMethod,
    Int8Spec,
    Int16Spec,
    Int32Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    UInt8Spec,
    UInt16Spec,
)

MINMAX, CHANNEL = CalibMethod.MinMax, QuantGranularity.Channel
QUIET = {"PrintSummary": False}


def wide() -> QConfig:
    layer = QLayerConfig(
        input_tensors=UInt16Spec(calibration_method=MINMAX), weight=Int16Spec(quant_granularity=CHANNEL)
    )
    return QConfig(layer, extra_options=QUIET)


def cpu() -> QConfig:
    spec = UInt8Spec(calibration_method=MINMAX, symmetric=False)
    layer = QLayerConfig(input_tensors=spec, weight=Int8Spec(quant_granularity=CHANNEL))
    return QConfig(layer, target="cpu", extra_options=QUIET)


def quantized(
    config: QConfig, graph: str, weights: Mapping[str, np.ndarray], scale: float = 1.0
) -> tuple[onnx.ModelProto, onnx.ModelProto, dict[str, np.ndarray]]:
    """The float model, its checked quantized twin, and the sample it was calibrated on."""
    proto = models.model(graph, weights, 17)
    feed = {name: array * array.dtype.type(scale) for name, array in models.feeds(proto).items()}
    made = ModelQuantizer(config).quantize_model(proto, None, [feed])
    assert made is not None
    onnx.checker.check_model(made, full_check=True)
    return proto, made, feed


def unoptimized(proto: onnx.ModelProto, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feed)


def sqnr(expected: np.ndarray, found: np.ndarray) -> float:
    error = ((expected.astype(np.float64) - found) ** 2).sum()
    return float("inf") if error == 0 else float(10 * np.log10((expected.astype(np.float64) ** 2).sum() / error))


@pytest.mark.parametrize("shape", [(), (1,), (1, 6), (4, 6), (4, 1)])
@pytest.mark.parametrize("config", [wide, cpu])
def test_a_bias_of_gemm_that_broadcasts(shape: tuple[int, ...], config: object) -> None:
    graph = "g (float[4, 8] x) => (float[4, 6] y) { y = Gemm (x, w, b) }"
    weights = {"w": models.normal(8, 6), "b": np.full(shape, 0.7, np.float32) + models.normal(*shape)}
    proto, made, feed = quantized(config(), graph, weights)  # type: ignore[operator]
    reference = models.run(proto, feed)[0]
    for found in (models.run(made, feed)[0], unoptimized(made, feed)[0]):
        assert sqnr(reference, found) > (60 if config is wide else 30)


@pytest.mark.parametrize("sizes", [(2, 3), (1, 3)])
def test_stacked_matrices_run_where_matmul_becomes_an_integer_kernel(sizes: tuple[int, int]) -> None:
    body = "h = Relu (x) m = MatMul (h, w) y = Relu (m)"
    graph = f"g (float[{sizes[0]}, {sizes[1]}, 8] x) => (float[2, 3, 6] y) {{ {body} }}"
    proto, made, feed = quantized(cpu(), graph, {"w": models.normal(2, 8, 6)})
    assert sqnr(models.run(proto, feed)[0], models.run(made, feed)[0]) > 30


@pytest.mark.parametrize(
    "resize",
    [
        'Resize <mode = "cubic"> (h, , scales)',
        'Resize <mode = "linear", coordinate_transformation_mode = "tf_crop_and_resize", extrapolation_value = -30.0> '
        "(h, roi, , sizes)",
    ],
)
def test_a_resize_that_leaves_the_range_of_its_input(resize: str) -> None:
    graph = f"g (float[1, 2, 5, 5] x) => (float[1, 2, 10, 10] y) {{ h = Relu (x) r = {resize} y = Mul (r, two) }}"
    weights = {
        "scales": np.array([1, 1, 2, 2], np.float32),
        "sizes": np.array([1, 2, 10, 10]),
        "roi": np.array([0, 0, -0.5, -0.5, 1, 1, 1.5, 1.5], np.float32),
        "two": np.array(2, np.float32),
    }
    proto, made, feed = quantized(wide(), graph, weights)
    assert sqnr(models.run(proto, feed)[0], models.run(made, feed)[0]) > 60


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bias_that_is_not_finite_is_refused_by_name(value: float) -> None:
    graph = "g (float[3, 5] x) => (float[3, 5] y) { y = Gemm (x, w, b) }"
    bias = np.array([0, value, 0, 0, 1], np.float32)
    with pytest.raises(ModelError, match=r"'b' holds NaN or infinity"):
        quantized(wide(), graph, {"w": models.normal(5, 5), "b": bias})


def test_two_biases_of_one_weight_keep_the_scale_that_integer_kernels_assume() -> None:
    """The second bias makes the weight's scale grow; the first must follow, or a fused convolution misreads it."""
    graph = """
    g (float[1, 8, 4, 4] x) => (float[1, 8, 4, 4] y, float[1, 8, 4, 4] z) {
        y = Conv <kernel_shape = [1, 1]> (x, w, b)
        z = Conv <kernel_shape = [1, 1]> (x, w, c)
    }"""
    weights = {"w": models.normal(8, 8, 1, 1, scale=1e-3), "b": models.normal(8), "c": models.normal(8, scale=1e9)}
    _, made, feed = quantized(cpu(), graph, weights)
    for fused, plain in zip(models.run(made, feed), unoptimized(made, feed), strict=True):
        assert sqnr(plain, fused) > 60


def test_a_bias_too_large_for_computed_weights_makes_their_scale_grow() -> None:
    graph = """
    g (float[1, 4, 5, 5] x, float[6, 4, 3, 3] k) => (float[1, 6, 3, 3] y) {
        t = Tanh (k)
        c = Conv <kernel_shape = [3, 3]> (x, t, b)
        y = Relu (c)
    }"""
    proto, made, feed = quantized(wide(), graph, {"b": np.linspace(1, 2, 6, dtype=np.float32)}, scale=1e-4)
    assert sqnr(models.run(proto, feed)[0], models.run(made, feed)[0]) > 60


@pytest.mark.parametrize("method", [CalibMethod.Percentile, CalibMethod.MinMSE])
def test_a_reader_may_fill_one_array_again_and_again(method: CalibMethod) -> None:
    graph = "g (float[1, 8, 64, 64] x) => (float[1, 8, 64, 64] y) { h = Conv (x, w) y = Relu (h) }"
    proto = models.model(graph, {"w": models.normal(8, 8, 1, 1)})
    config = QConfig(
        QLayerConfig(input_tensors=Int8Spec(calibration_method=method), weight=Int8Spec()), extra_options=QUIET
    )

    def samples(again: bool) -> object:
        buffer = np.zeros((1, 8, 64, 64), np.float32)
        for index in range(1, 7):
            buffer[...] = models.normal(1, 8, 64, 64, seed=index, scale=index)
            yield {"x": buffer if again else buffer.copy()}

    made = [ModelQuantizer(config).quantize_model(proto, None, samples(again)) for again in (True, False)]
    assert made[0] == made[1]


def test_sequences_of_float_tensors_are_no_float_tensors() -> None:
    graph = """
    g (float[3, 8] x) => (float[3, 8] y) {
        s = SplitToSequence <axis = 0> (x, sizes)
        z = ConcatFromSequence <axis = 0> (s)
        y = Tanh (z)
    }"""
    layer = QLayerConfig(input_tensors=UInt16Spec(calibration_method=MINMAX), weight=Int16Spec())
    config = QConfig(layer, extra_options={**QUIET, "QuantizeAllOpTypes": True})
    proto, made, feed = quantized(config, graph, {"sizes": np.array([1, 2])})
    assert sqnr(models.run(proto, feed)[0], models.run(made, feed)[0]) > 60


def test_a_bias_does_not_make_32_bit_weights_vanish() -> None:
    """At a scale of 2**-31 the bias would need more than 32 bits, and the weight's scale used to grow to 1."""
    graph = "g (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y) { h = Conv (x, w, b) y = Relu (h) }"
    layer = QLayerConfig(input_tensors=Int32Spec(calibration_method=MINMAX), weight=Int32Spec())
    config = QConfig(layer, extra_options=QUIET)
    proto, made, feed = quantized(config, graph, {"w": models.normal(4, 4, 1, 1), "b": models.normal(4)})
    assert sqnr(models.run(proto, feed)[0], models.run(made, feed)[0]) > 100


def test_the_float_model_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(models.cnn(), path)
    before = path.read_bytes()
    with pytest.raises(ModelError, match="is the float model itself"):
        ModelQuantizer(cpu()).quantize_model(str(path), path, [models.feeds(models.cnn())])
    assert path.read_bytes() == before


def test_names_that_the_model_uses_already_are_left_alone() -> None:
    weights = {"w": models.normal(4, 3), "w_scale": models.normal(3)}
    text = "g (float[n,4] x) => (float[n,3] y) { x_scale = Relu(x)  x_DequantizeLinear_Output = Tanh(x_scale)"
    text += "  w_quantized = MatMul(x_DequantizeLinear_Output, w)  y = Add(w_quantized, w_scale) }"
    proto = models.model(text, weights)
    feed = {"x": models.normal(32, 4)}
    spec = q.Int16Spec(calibration_method=q.CalibMethod.MinMax)
    config = q.QConfig(q.QLayerConfig(input_tensors=spec, weight=spec), extra_options={"PrintSummary": False})
    result = q.ModelQuantizer(config).quantize_model(proto, None, [feed])
    assert result is not None
    np.testing.assert_allclose(models.run(result, feed)[0], models.run(proto, feed)[0], atol=1e-3)


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
def test_a_float_bias_survives_the_runtime_that_rounds_it(level: str) -> None:
    weights = {"w": models.normal(4, 3, 1, 1, scale=1e-3), "b": np.array([1e6, -1e6, 5e5, 1.0], np.float32)}
    proto = models.model("g (float[n,3,4,4] x) => (float[n,4,4,4] y) { c = Conv(x, w, b)  y = Relu(c) }", weights)
    feed = {"x": models.normal(4, 3, 4, 4, scale=0.01)}
    spec = q.Int8Spec(calibration_method=q.CalibMethod.MinMax)
    options = {"PrintSummary": False, "QuantizeBias": False}
    config = q.QConfig(q.QLayerConfig(input_tensors=spec, weight=spec), extra_options=options)
    result = q.ModelQuantizer(config).quantize_model(proto, None, [feed])
    assert result is not None
    session_options = onnxruntime.SessionOptions()
    session_options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(result.SerializeToString(), session_options)
    np.testing.assert_allclose(session.run(None, feed)[0], models.run(proto, feed)[0], atol=1e4)


def test_float16_scales_that_lose_the_bias_are_refused() -> None:
    half = {"w": models.normal(4, 3, scale=1e-2).astype(np.float16), "b": models.normal(3).astype(np.float16)}
    proto = models.model("g (float16[n,4] x) => (float16[n,3] y) { y = Gemm(x, w, b) }", half)
    feed = {"x": models.normal(8, 4, scale=0.1).astype(np.float16)}
    options = {"PrintSummary": False, "UseFP32Scale": False}
    config = q.QConfig(q.QLayerConfig(input_tensors=q.Int16Spec(), weight=q.Int16Spec()), extra_options=options)
    with pytest.raises(ConfigError, match="Leave UseFP32Scale on"):
        q.ModelQuantizer(config).quantize_model(proto, None, [feed])
