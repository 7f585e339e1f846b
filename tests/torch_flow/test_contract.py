"""Every data type under every granularity and strategy, through the whole flow, against the formulas of ``oracle``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.torch_flow import oracle
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    AmdFP4Spec,
    BFP16Spec,
    FP4PerGroupSpec,
    FP8E4M3PerTensorSpec,
    FP8E5M3PerTensorSpec,
    MX6Spec,
    MX9Spec,
    OCP_MXFP4Spec,
    OCP_MXFP6E2M3Spec,
    OCP_MXFP6E3M2Spec,
    OCP_MXFP8E4M3Spec,
    OCP_MXFP8E5M2Spec,
    OCP_MXINT8Spec,
    QConfig,
    QLayerConfig,
    QTensorConfig,
    ScaleQuantSpec,
)
from quark.torch.quantization.config.type import Dtype, QSchemeType, ScaleType

INS, OUTS = 32, 24
GENERATOR = torch.Generator().manual_seed(5)
TWO = torch.randn(6, INS, generator=GENERATOR) * torch.linspace(0.1, 3, 6)[:, None]
THREE = torch.randn(2, 3, INS, generator=GENERATOR) + torch.linspace(-2, 4, 3)[:, None]
WEIGHT = torch.randn(OUTS, INS, generator=GENERATOR) * torch.linspace(0.05, 1, OUTS)[:, None]

INTEGERS = [(name, symmetric) for name in oracle.BITS for symmetric in (True, False)]
FORMATS = [
    *[(name, {"symmetric": symmetric}, oracle.integer(name, symmetric)) for name, symmetric in INTEGERS],
    *[(name, {}, oracle.floating(name)) for name in oracle.FLOATS],
    *[(name, {}, oracle.cast(name)) for name in oracle.CASTS],
]
IDS = ["-".join([name, *[k if v else f"a{k}" for k, v in fields.items()]]) for name, fields, _ in FORMATS]
per_tensor = ({"qscheme": QSchemeType.per_tensor}, oracle.tensor)
WEIGHT_SCHEMES = {
    "tensor": per_tensor,
    "channel": ({"qscheme": QSchemeType.per_channel, "ch_axis": 0}, oracle.channel(0)),
    "group": ({"qscheme": QSchemeType.per_group, "ch_axis": -1, "group_size": 16}, oracle.group(-1, 16)),
    "group0": ({"qscheme": QSchemeType.per_group, "ch_axis": 0, "group_size": 8}, oracle.group(0, 8)),
    "whole": ({"qscheme": QSchemeType.per_group, "ch_axis": -1, "group_size": -1}, oracle.group(-1, INS)),
    "block": ({"qscheme": QSchemeType.per_block, "block_size": (16, 16)}, oracle.block(16, 16)),
}
STATIC_SCHEMES = {
    "tensor": per_tensor,
    "channel": ({"qscheme": QSchemeType.per_channel, "ch_axis": -1}, oracle.channel(-1)),
}
DYNAMIC_SCHEMES = {
    **STATIC_SCHEMES,
    "token": ({"qscheme": QSchemeType.per_channel, "ch_axis": 1}, oracle.token),
    "group": ({"qscheme": QSchemeType.per_group, "ch_axis": -1, "group_size": 16}, oracle.group(-1, 16)),
}


def linear() -> nn.Sequential:
    layer = nn.Linear(INS, OUTS, bias=False)
    with torch.no_grad():
        layer.weight.copy_(WEIGHT)
    return nn.Sequential(layer)


def quantize(layer: QLayerConfig, samples: list[torch.Tensor] | None = None) -> nn.Sequential:
    return ModelQuantizer(QConfig(layer)).quantize_model(linear(), samples).eval()


def weight_of(model: nn.Sequential) -> np.ndarray:
    """The weight as the layer computes with it."""
    with torch.no_grad():
        return model(torch.eye(INS)).numpy().T


def input_of(model: nn.Sequential, x: torch.Tensor) -> np.ndarray:
    """The input as the layer computes with it: its weight is the identity."""
    with torch.no_grad():
        return model[0].input_quantizer(x).numpy()


@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
@pytest.mark.parametrize(("name", "fields", "one"), FORMATS, ids=IDS)
def test_weights(name: str, fields: dict, one: Callable[[np.ndarray], np.ndarray], scheme: str) -> None:
    placed, parts = WEIGHT_SCHEMES[scheme]
    expected = oracle.quantized(WEIGHT.numpy(), parts, one)
    for dynamic in (False, True):
        config = QTensorConfig(Dtype[name], **placed, **fields, is_dynamic=dynamic)
        model = quantize(QLayerConfig(weight=config))
        np.testing.assert_array_equal(weight_of(model), expected)
        frozen = ModelQuantizer.freeze(model)
        np.testing.assert_array_equal(frozen[0].weight.detach().numpy(), expected)


@pytest.mark.parametrize("scheme", DYNAMIC_SCHEMES)
@pytest.mark.parametrize(("name", "fields", "one"), FORMATS, ids=IDS)
def test_dynamic_inputs(name: str, fields: dict, one: Callable[[np.ndarray], np.ndarray], scheme: str) -> None:
    placed, parts = DYNAMIC_SCHEMES[scheme]
    model = quantize(QLayerConfig(input_tensors=QTensorConfig(Dtype[name], **placed, **fields, is_dynamic=True)))
    for x in (TWO, THREE):
        expected = oracle.quantized(x.numpy(), parts, one)
        np.testing.assert_array_equal(input_of(model, x), expected)
        y = torch.from_numpy(expected) @ WEIGHT.T
        torch.testing.assert_close(model(x).detach(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", STATIC_SCHEMES)
@pytest.mark.parametrize(("name", "fields", "one"), FORMATS, ids=IDS)
def test_static_inputs(name: str, fields: dict, one: Callable[[np.ndarray], np.ndarray], scheme: str) -> None:
    placed, parts = STATIC_SCHEMES[scheme]
    config = QTensorConfig(Dtype[name], **placed, **fields, is_dynamic=False)
    model = quantize(QLayerConfig(input_tensors=config), [TWO[:3], TWO[3:]])
    np.testing.assert_array_equal(input_of(model, TWO), oracle.quantized(TWO.numpy(), parts, one))


SCALED = [("int8", True), ("int4", False), ("uint4", False), ("uint8", True), ("int2", False), ("fp8_e4m3", True)]


@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
@pytest.mark.parametrize("scale", ["float16", "bfloat16", "pof2"])
@pytest.mark.parametrize(("name", "symmetric"), SCALED)
def test_scale_types(name: str, symmetric: bool, scale: str, scheme: str) -> None:
    """Weights, and the same granularity for dynamic inputs where inputs have it."""
    placed, parts = WEIGHT_SCHEMES[scheme]
    fields = {"symmetric": symmetric} if name in oracle.BITS else {}
    one = oracle.integer(name, symmetric, scale) if name in oracle.BITS else oracle.floating(name, scale)
    config = QTensorConfig(Dtype[name], **placed, **fields, scale_type=ScaleType[scale])
    np.testing.assert_array_equal(
        weight_of(quantize(QLayerConfig(weight=config))), oracle.quantized(WEIGHT.numpy(), parts, one)
    )
    if scheme not in DYNAMIC_SCHEMES or scheme == "channel":
        return
    config = QTensorConfig(Dtype[name], **placed, **fields, scale_type=ScaleType[scale], is_dynamic=True)
    model = quantize(QLayerConfig(input_tensors=config))
    np.testing.assert_array_equal(input_of(model, THREE), oracle.quantized(THREE.numpy(), parts, one))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", DYNAMIC_SCHEMES)
@pytest.mark.parametrize("name", ["int8", "int4", "uint8", "fp8_e4m3", "fp6_e2m3", "fp4"])
def test_half_inputs_are_quantized_in_float32(name: str, scheme: str, dtype: torch.dtype) -> None:
    """Of tensors of every rank; the result is rounded to the model's type once."""
    placed, parts = DYNAMIC_SCHEMES[scheme]
    symmetric = name != "uint8"
    fields = {"symmetric": symmetric} if name in oracle.BITS else {}
    model = quantize(QLayerConfig(input_tensors=QTensorConfig(Dtype[name], **placed, **fields, is_dynamic=True)))
    one = oracle.integer(name, symmetric) if name in oracle.BITS else oracle.floating(name)
    for x in (TWO.to(dtype), THREE.to(dtype)):
        expected = torch.from_numpy(oracle.quantized(x.float().numpy(), parts, one)).to(dtype)
        assert torch.equal(model.to(dtype)[0].input_quantizer(x), expected)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
def test_int32_is_finer_than_float32(scheme: str, symmetric: bool) -> None:
    placed, _ = WEIGHT_SCHEMES[scheme]
    model = quantize(QLayerConfig(weight=QTensorConfig(Dtype.int32, **placed, symmetric=symmetric)))
    np.testing.assert_allclose(weight_of(model), WEIGHT.numpy(), rtol=0, atol=2**-23 * float(WEIGHT.abs().max()))


E4M3, E5M2 = "fp8_e4m3", "fp8_e5m2"
SHARED = [
    (OCP_MXFP4Spec, "fp4", 1),
    (OCP_MXFP6E2M3Spec, "fp6_e2m3", 3),
    (OCP_MXFP6E3M2Spec, "fp6_e3m2", 2),
    (OCP_MXFP8E4M3Spec, E4M3, 3),
    (OCP_MXFP8E5M2Spec, E5M2, 2),
]
BLOCK_FORMATS = {
    **{
        f"{spec.__name__}-{mode}": (
            spec(ch_axis=-1, scale_calculation_mode=mode),
            oracle.group(-1, 32),
            oracle.shared_exponent(name, bits, mode),
        )
        for spec, name, bits in SHARED
        for mode in ("even", "floor", "ceil")
    },
    "mxint8": (OCP_MXINT8Spec(ch_axis=-1, scale_calculation_mode="floor"), oracle.group(-1, 32), oracle.mxint8),
    "bfp16": (BFP16Spec(ch_axis=-1), oracle.group(-1, 8), oracle.bfp16),
    "mx6": (MX6Spec(ch_axis=-1, block_size=16), oracle.group(-1, 16), oracle.microexponent(5)),
    "mx9": (MX9Spec(ch_axis=-1, block_size=16), oracle.group(-1, 16), oracle.microexponent(8)),
    "nvfp4": (
        ScaleQuantSpec(FP4PerGroupSpec(-1, 16), FP8E4M3PerTensorSpec(is_dynamic=True)),
        oracle.tensor,
        oracle.nvfp4,
    ),
    "amd fp4 under a tensor scale": (
        ScaleQuantSpec(FP4PerGroupSpec(-1, 32), FP8E5M3PerTensorSpec(is_dynamic=True)),
        oracle.tensor,
        oracle.two_level(114688.0, oracle.e5m3, 32),
    ),
    "nvfp4 in one stage": (FP4PerGroupSpec(-1, 16, "e4m3"), oracle.tensor, oracle.nvfp4),
}


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_block_formats(name: str) -> None:
    spec, parts, one = BLOCK_FORMATS[name]
    config = spec.to_quantization_spec()
    model = quantize(QLayerConfig(weight=config, input_tensors=config))
    np.testing.assert_array_equal(input_of(model, THREE), oracle.quantized(THREE.numpy(), parts, one))
    weight = torch.from_numpy(oracle.quantized(WEIGHT.numpy(), parts, one))
    np.testing.assert_array_equal(ModelQuantizer.freeze(model)[0].weight.detach().numpy(), weight.numpy())


@pytest.mark.parametrize("size", [16, 32])
def test_amd_fp4_scales_are_e5m3(size: int) -> None:
    """Each scale has a mantissa of 3 bits and lies within half a step of amax / 6; elements are multiples of it."""
    model = quantize(QLayerConfig(weight=AmdFP4Spec(-1, size).to_quantization_spec()))
    weight = ModelQuantizer.freeze(model)[0].weight.detach().numpy()
    for part in oracle.group(-1, size)(WEIGHT.shape):
        exact = float(WEIGHT.numpy()[part].__abs__().max()) / 6
        step = 2.0 ** (np.floor(np.log2(exact)) - 3)
        scale = np.rint(exact / step) * step
        grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * scale
        off = np.abs(np.abs(weight[part])[..., None] - grid).min(-1)
        assert off.max() < 1e-7
        assert np.abs(weight[part] - WEIGHT.numpy()[part]).max() <= scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in BLOCK_FORMATS if "-" not in name or name.endswith("even")])
def test_block_formats_of_half_models(name: str, dtype: torch.dtype) -> None:
    spec, parts, one = BLOCK_FORMATS[name]
    model = quantize(QLayerConfig(input_tensors=spec.to_quantization_spec())).to(dtype)
    expected = torch.from_numpy(oracle.quantized(THREE.to(dtype).float().numpy(), parts, one)).to(dtype)
    assert torch.equal(model[0].input_quantizer(THREE.to(dtype)), expected)


def test_static_second_level_of_nvfp4_comes_from_calibration() -> None:
    spec = ScaleQuantSpec(FP4PerGroupSpec(-1, 16), FP8E4M3PerTensorSpec(is_dynamic=False)).to_quantization_spec()
    model = quantize(QLayerConfig(input_tensors=spec), [TWO, 2 * TWO])
    part = model[0].input_quantizer
    assert part.scale.item() == np.float32(float((2 * TWO).abs().max()) / (448 * 6))
    np.testing.assert_array_equal(input_of(model, 2 * TWO), oracle.nvfp4(2 * TWO.numpy()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3", "fp4"])
def test_half_models_have_float32_scales(name: str, dtype: torch.dtype) -> None:
    """A scale in bfloat16 would be off by up to 0.4 %."""
    config = QTensorConfig(Dtype[name], qscheme=QSchemeType.per_channel, ch_axis=0)
    tensor = QTensorConfig(Dtype[name], qscheme=QSchemeType.per_tensor)
    model = linear().to(dtype)
    weight = model[0].weight.detach().float().numpy()
    ModelQuantizer(QConfig(QLayerConfig(weight=config, input_tensors=tensor))).quantize_model(model, [TWO.to(dtype)])
    one = oracle.integer(name, True) if name in oracle.BITS else oracle.floating(name)
    expected = torch.from_numpy(oracle.quantized(weight, oracle.channel(0), one)).to(dtype)
    assert model(TWO.to(dtype)).dtype == dtype
    assert model[0].weight_quantizer.scale.dtype == torch.float32
    assert torch.equal(ModelQuantizer.freeze(model)[0].weight, expected)


def test_e5m3_scales_reach_further_than_e4m3() -> None:
    """Rows that are 2^-22 of the largest lie below the smallest E4M3 scale, and within those of E5M3."""
    wide = WEIGHT * 2.0 ** -torch.linspace(0, 22, OUTS).round()[:, None]
    for level, snap, largest in (
        (FP8E4M3PerTensorSpec(), oracle.e4m3, 448.0),
        (FP8E5M3PerTensorSpec(), oracle.e5m3, 114688.0),
    ):
        model = linear()
        with torch.no_grad():
            model[0].weight.copy_(wide)
        spec = ScaleQuantSpec(FP4PerGroupSpec(-1, 16), level).to_quantization_spec()
        ModelQuantizer.freeze(ModelQuantizer(QConfig(QLayerConfig(weight=spec))).quantize_model(model))
        expected = oracle.two_level(largest, snap)(wide.numpy())
        np.testing.assert_array_equal(model[0].weight.detach().numpy(), expected)
