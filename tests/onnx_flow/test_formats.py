"""Every data type as an ONNX model on stock ONNX Runtime: loads by default, answers as the arithmetic says, is small.

The reference is NumPy on the fake-quantized operands (``quark.numerics``, which has oracles of its own): what is tested
here is that the file computes the same.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from tests.onnx_flow import models

import quark.onnx as q
from quark.config.plan import Plan, TensorPlan
from quark.config.presets import PRESETS
from quark.demo import data as digits
from quark.errors import ConfigError
from quark.numerics.affine import Coding
from quark.numerics.blocks import BLOCKS
from quark.numerics.formats import get_format

SPECS = sorted(name for name in q.__all__ if name.endswith("Spec"))
MINMAX = {"calibration_method": q.CalibMethod.MinMax}
OPTIONS = {"PrintSummary": False, "OpTypesToExcludeOutputQuantization": ["MatMul", "Conv"], "QuantizeBias": False}
RNG = np.random.default_rng(3)
SCALE = np.exp2(RNG.integers(-3, 4, (5, 72))).astype(np.float32)
X = (RNG.normal(size=(5, 72)) * SCALE).astype(np.float32)
W = (RNG.normal(size=(72, 40)) * np.exp2(RNG.integers(-3, 4, (72, 1)))).astype(np.float32)
IMAGE = RNG.normal(size=(2, 24, 6, 6)).astype(np.float32)
KERNEL = RNG.normal(size=(16, 24, 3, 3)).astype(np.float32)


def matmul_model() -> onnx.ModelProto:
    return models.model("g (float[n,72] x) => (float[n,40] y) { y = MatMul(x, w) }", {"w": W})


def conv_model() -> onnx.ModelProto:
    return models.model("g (float[n,24,6,6] x) => (float[n,16,4,4] y) { y = Conv(x, w) }", {"w": KERNEL})


def quantized(
    proto: onnx.ModelProto, activation: str, weight: str, x: np.ndarray, **options: object
) -> tuple[onnx.ModelProto, Plan]:
    layer = q.QLayerConfig(input_tensors=getattr(q, activation)(**MINMAX), weight=getattr(q, weight)(**MINMAX))
    result = q.ModelQuantizer(q.QConfig(layer, extra_options={**OPTIONS, **options})).run(proto, None, [{"x": x}])
    assert result.proto is not None
    onnx.checker.check_model(result.proto, full_check=False)
    return result.proto, result.plan


def run(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """The answer of a session that computes products in float32.

    ONNX Runtime 1.31 fuses a MatMul of float activations and stored integer weights into MatMulNBits, and by default
    lets that quantize the activations to int8 (see docs/formats.md); accuracy level 1 switches that off.
    """
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def simulated(values: np.ndarray, tensor: TensorPlan) -> np.ndarray:
    spec, row = tensor.spec, get_format(tensor.spec.format)
    if spec.format in BLOCKS:
        above = np.asarray(tensor.scale) if BLOCKS[spec.format].tensor_scale else None
        return np.asarray(row.round(values, spec.granularity.axis, spec.rounding, above))  # type: ignore[union-attr]
    narrow = tensor.role == "weight" and spec.symmetric
    return np.asarray(
        Coding(row, spec.granularity, spec.rounding, narrow).fake_quantize(values, tensor.scale, tensor.zero_point)
    )


@pytest.mark.parametrize("name", SPECS)
def test_a_matmul_computes_with_the_quantized_operands(name: str) -> None:
    proto, plan = quantized(matmul_model(), name, name, X)
    expected = simulated(X, plan.tensors["x"]).astype(np.float64) @ simulated(W, plan.tensors["w"])
    found = run(proto, X)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", SPECS)
def test_a_convolution_computes_with_the_quantized_operands(name: str) -> None:
    proto, plan = quantized(conv_model(), name, name, IMAGE)
    x, w = simulated(IMAGE, plan.tensors["x"]), simulated(KERNEL, plan.tensors["w"])
    reference = models.model("g (float[n,24,6,6] x, float[16,24,3,3] w) => (float[n,16,4,4] y) { y = Conv(x, w) }")
    expected = models.run(reference, {"x": x, "w": w})[0]
    found = run(proto, IMAGE)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("scale_type", ["E8M0Even", "E8M0Ceil"])
def test_shared_exponents_are_rounded_as_the_scale_type_says(scale_type: str) -> None:
    spec = q.MXFP4E2M1Spec(scale_type=q.ScaleType[scale_type])
    config = q.QConfig(q.QLayerConfig(input_tensors=spec, weight=spec), extra_options=OPTIONS)
    result = q.ModelQuantizer(config).run(matmul_model(), None, [{"x": X}])
    assert result.proto is not None
    rows = BLOCKS["mxfp4_" + scale_type[4:].lower()], BLOCKS["mxfp4"]
    expected, plain = (row.round(X, 1).astype(np.float64) @ row.round(W, 0) for row in rows)
    found = run(result.proto, X)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6 * np.abs(expected).max())
    assert np.abs(found - plain).max() > 1e-3 * np.abs(expected).max()


MIXED = ["Int8Spec", "BFloat16Spec", "MX4Spec", "MX9Spec", "BFP16Spec", "MXFP4E2M1Spec", "MXFP8E4M3Spec", "FP8E4M3Spec"]


@pytest.mark.parametrize(("activation", "weight"), list(itertools.permutations(MIXED, 2)))
def test_mixed_pairs_get_what_they_say(activation: str, weight: str) -> None:
    proto, plan = quantized(matmul_model(), activation, weight, X)
    assert plan.tensors["x"].spec.format == getattr(q, activation)().data_type.format
    assert plan.tensors["w"].spec.format == getattr(q, weight)().data_type.format
    expected = simulated(X, plan.tensors["x"]).astype(np.float64) @ simulated(W, plan.tensors["w"])
    np.testing.assert_allclose(run(proto, X), expected, rtol=1e-5, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", SPECS)
def test_float_weights_behind_the_operators_compute_the_same(name: str) -> None:
    """The layout of compilers that quantize weights themselves."""
    stored, _ = quantized(matmul_model(), name, name, X)
    behind, _ = quantized(matmul_model(), name, name, X, AddQDQPairToWeight=True)
    kept = {t.name: ir.serde.deserialize_tensor(t).numpy() for t in behind.graph.initializer}
    np.testing.assert_array_equal(kept["w"], W)
    np.testing.assert_allclose(run(behind, X), run(stored, X), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", SPECS)
def test_weights_take_the_bytes_that_their_format_promises(name: str) -> None:
    big = RNG.normal(size=(512, 256)).astype(np.float32)
    proto = models.model("g (float[n,512] x) => (float[n,256] y) { y = MatMul(x, w) }", {"w": big})
    layer = q.QLayerConfig(weight=getattr(q, name)(**MINMAX))
    config = q.QConfig(layer, extra_options={"PrintSummary": False, "WeightsOnly": True})
    result = q.ModelQuantizer(config).quantize_model(proto)
    assert result is not None
    promised = big.size * float(get_format(layer.weight.data_type.format).bits) / 8
    weights = sum(len(t.raw_data) for t in result.graph.initializer)
    assert promised <= weights <= 1.02 * promised


TUNED = ("ADAROUND", "ADAQUANT", "ACCURATE", "MIXED")
SOME = [name for name in sorted(PRESETS) if not any(word in name for word in TUNED)][::3]  # the others are slow


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in SOME)) for n in sorted(PRESETS)])
def test_every_preset_gives_a_model_of_the_demo_that_loads(name: str, tmp_path: Path) -> None:
    (train, _), (test, _) = digits.split()
    config = q.get_default_config(name)
    config.extra_options["PrintSummary"] = False
    out = tmp_path / "q.onnx"
    q.ModelQuantizer(q.Config(config)).quantize_model(digits.model_path(), out, [{"image": train[:8]}])
    onnx.checker.check_model(str(out))
    expected = models.run(digits.model_path(), {"image": test[:20]})[0]
    found = models.run(out, {"image": test[:20]})[0]
    assert np.isfinite(found).all()
    if name not in ("MX4", "MXFP4E2M1"):  # 4 bits everywhere without an algorithm is not expected to answer alike
        assert np.mean(expected.argmax(1) == found.argmax(1)) >= 0.9


def test_bfloat16_can_be_plain_casts() -> None:
    extended, _ = quantized(matmul_model(), "BFloat16Spec", "BFloat16Spec", X)
    casts, _ = quantized(matmul_model(), "BFloat16Spec", "BFloat16Spec", X, BF16QDQToCast=True)
    assert {n.op_type for n in casts.graph.node} == {"Cast", "MatMul"} and not casts.functions
    assert {n.op_type for n in extended.graph.node} >= {"ExtendedQuantizeLinear", "ExtendedDequantizeLinear"}
    np.testing.assert_array_equal(models.run(casts, {"x": X})[0], models.run(extended, {"x": X})[0])


def test_bfloat16_with_clip_keeps_the_largest_numbers_finite() -> None:
    huge = np.full((1, 72), 3.4e38, np.float32)
    proto = models.model("g (float[n,72] x) => (float[n,72] y) { y = Relu(x) }")
    options = {"OpTypesToExcludeOutputQuantization": ["Relu"]}
    for cast in (False, True):
        free, _ = quantized(proto, "BFloat16Spec", "BFloat16Spec", X, BF16QDQToCast=cast, **options)
        clipped, _ = quantized(
            proto, "BFloat16Spec", "BFloat16Spec", X, BF16QDQToCast=cast, BF16WithClip=True, **options
        )
        assert np.isinf(models.run(free, {"x": huge})[0]).all()
        assert (models.run(clipped, {"x": huge})[0] == np.float32(255 * 2.0**120)).all()


def test_blocks_run_along_the_axis_that_is_summed() -> None:
    text = "g (float[n,72] x, float[72,40] b) => (float[n,40] y) { h = MatMul(x, b)  y = Softmax <axis = 0> (h) }"
    layer = q.QLayerConfig(input_tensors=q.MXInt8Spec(), weight=q.MXInt8Spec())
    feed = [{"x": X, "b": W}]
    refined = q.ModelQuantizer(q.QConfig(layer, extra_options={"PrintSummary": False})).run(
        models.model(text), None, feed
    )
    axes = {t.name: t.spec.granularity.axis for t in refined.plan}  # type: ignore[attr-defined]
    assert axes == {"x": 1, "b": 0, "h": 1}
    plain = q.QConfig(layer, extra_options={"PrintSummary": False, "RefineBlockAxis": False})
    axes = {t.name: t.spec.granularity.axis for t in q.ModelQuantizer(plain).run(models.model(text), None, feed).plan}  # type: ignore[attr-defined]
    assert axes == {"x": 1, "b": 1, "h": 1}


def test_what_has_no_carrier_is_refused_when_the_configuration_is_used() -> None:
    channel = q.Int8Spec(quant_granularity=q.QuantGranularity.Channel)
    with pytest.raises(ConfigError, match="one scale per tensor"):
        q.ModelQuantizer(q.QConfig(q.QLayerConfig(input_tensors=channel, weight=q.Int8Spec()))).quantize_model(
            matmul_model(), None, [{"x": X}]
        )
    group = q.BFloat16Spec(quant_granularity=q.QuantGranularity.Group)
    with pytest.raises(ConfigError, match="bfloat16 has no scales"):
        q.ModelQuantizer(q.QConfig(q.QLayerConfig(input_tensors=q.Int8Spec(), weight=group))).quantize_model(
            matmul_model(), None, [{"x": X}]
        )


@pytest.mark.parametrize("name", ["FP8E4M3Spec", "Int4Spec", "UInt8Spec", "Int32Spec"])
def test_scales_per_channel_meet_their_channels(name: str) -> None:
    """A kernel whose channels differ by powers of two, so that a scale on the wrong axis cannot go unnoticed."""
    kernel = (KERNEL * np.exp2(np.arange(16) - 8.0).reshape(16, 1, 1, 1)).astype(np.float32)
    proto = models.model("g (float[n,24,6,6] x) => (float[n,16,4,4] y) { y = Conv(x, w) }", {"w": kernel})
    layer = q.QLayerConfig(weight=getattr(q, name)(quant_granularity=q.QuantGranularity.Channel, **MINMAX))
    config = q.QConfig(layer, extra_options={"PrintSummary": False, "WeightsOnly": True})
    result = q.ModelQuantizer(config).run(proto)
    assert result.proto is not None
    reference = models.model("g (float[n,24,6,6] x, float[16,24,3,3] w) => (float[n,16,4,4] y) { y = Conv(x, w) }")
    expected = models.run(reference, {"x": IMAGE, "w": simulated(kernel, result.plan.tensors["w"])})[0]
    np.testing.assert_allclose(run(result.proto, IMAGE), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("cast", [False, True])
def test_scaled_bfloat16_maps_the_range_to_two(cast: bool) -> None:
    proto, plan = quantized(
        matmul_model(), "BFloat16Spec", "BFloat16Spec", X, ActivationScaled=True, WeightScaled=True, BF16QDQToCast=cast
    )
    np.testing.assert_allclose(plan.tensors["x"].scale, np.abs(X).max() / 2, rtol=1e-6)
    np.testing.assert_allclose(plan.tensors["w"].scale, np.abs(W).max() / 2, rtol=1e-6)
    expected = simulated(X, plan.tensors["x"]).astype(np.float64) @ simulated(W, plan.tensors["w"])
    np.testing.assert_allclose(run(proto, X), expected, rtol=1e-5, atol=2e-6 * np.abs(expected).max())


def test_vaiml_keeps_rounded_weights_in_float32_and_outputs_float() -> None:
    proto, _ = quantized(matmul_model(), "BFloat16Spec", "BFloat16Spec", X, EnableVaimlBF16=True)
    kept = {t.name: ir.serde.deserialize_tensor(t).numpy() for t in proto.graph.initializer}
    rounded = kept["w_bf16"]
    assert rounded.dtype == np.float32 and not (rounded.view(np.uint32) & 0xFFFF).any()
    assert [n.op_type for n in proto.graph.node] == ["Cast", "Cast", "MatMul"]
    plain, _ = quantized(matmul_model(), "BFloat16Spec", "BFloat16Spec", X)
    np.testing.assert_allclose(run(proto, X), run(plain, X), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "weight", ["Int2Spec", "UInt2Spec", "Int4Spec", "UInt4Spec", "Int8Spec", "UInt8Spec", "FP8E4M3Spec"]
)
@pytest.mark.parametrize("granularity", ["Tensor", "Channel", "Group"])
@pytest.mark.parametrize("activation", ["Int8Spec", "UInt8Spec", "Int16Spec"])
def test_weights_beside_integer_activations(activation: str, weight: str, granularity: str) -> None:
    """ONNX Runtime fuses 8-bit activations with what stands behind DequantizeLinear, and refuses some of it. 70 rows
    leave a short last group."""
    x, w = X[:, :70], np.ascontiguousarray(W[:70])
    proto = models.model("g (float[n,70] x) => (float[n,40] y) { y = MatMul(x, w) }", {"w": w})
    spec = getattr(q, weight)(quant_granularity=q.QuantGranularity[granularity], group_size=32, **MINMAX)
    layer = q.QLayerConfig(input_tensors=getattr(q, activation)(**MINMAX), weight=spec)
    result = q.ModelQuantizer(q.QConfig(layer, extra_options=OPTIONS)).run(proto, None, [{"x": x}])
    assert result.proto is not None
    expected = simulated(x, result.plan.tensors["x"]).astype(np.float64) @ simulated(w, result.plan.tensors["w"])
    np.testing.assert_allclose(run(result.proto, x), expected, rtol=1e-5, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    "name", ["Int8Spec", "Int4Spec", "Int3Spec", "FP8E4M3Spec", "BFloat16Spec", "MX6Spec", "NVFP4Spec"]
)
def test_a_weight_without_elements_stays_as_it_is(name: str) -> None:
    text = (
        "g (float[n,72] x) => (float[n,40] y) { e = MatMul(x, none)  h = MatMul(x, w)  y = Concat <axis = 1> (e, h) }"
    )
    proto = models.model(text, {"none": W[:, :0], "w": W})
    found, plan = quantized(proto, name, name, X)
    assert "none" not in plan.tensors and "w" in plan.tensors
    assert models.run(found, {"x": X})[0].shape == (5, 40)


@pytest.mark.parametrize("name", [name for name in SPECS if name not in ("Int2Spec", "UInt2Spec")])
def test_a_float16_model(name: str) -> None:
    """The rounding of the data type is what is lost, not more."""
    half = models.model("g (float16[n,72] x) => (float16[n,40] y) { y = MatMul(x, w) }", {"w": W.astype(np.float16)})
    x = X.astype(np.float16)
    proto, plan = quantized(half, name, name, x)
    expected = simulated(x.astype(np.float32), plan.tensors["x"]).astype(np.float64)
    expected = expected @ simulated(W.astype(np.float16).astype(np.float32), plan.tensors["w"])
    found = run(proto, x)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected, rtol=4e-3, atol=4e-3 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["UInt4", "Int4", "UInt2", "Int16"])
def test_a_constant_beside_narrow_activations_loads(name: str) -> None:
    """Its codes have the activation's type, which may need a higher opset than the weights' type does."""
    graph = "g (float[2, 8] x) => (float[2, 4] y) { m = Mul (x, gamma) y = MatMul (m, w) }"
    proto = models.model(graph, {"gamma": models.normal(8), "w": models.normal(8, 4)}, opset=13)
    spec = getattr(q, f"{name}Spec")(calibration_method=q.CalibMethod.MinMax)
    weight = q.Int8Spec(calibration_method=q.CalibMethod.MinMax)
    config = q.QConfig(q.QLayerConfig(spec, weight), extra_options={"PrintSummary": False})
    made = q.ModelQuantizer(config).quantize_model(proto, None, [{"x": models.normal(2, 8)}])
    assert np.isfinite(models.session(made).run(None, {"x": models.normal(2, 8)})[0]).all()
