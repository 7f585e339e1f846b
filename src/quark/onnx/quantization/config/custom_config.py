"""The preset objects of the ONNX dialect. Using one never changes it, so each serves any number of models."""

from __future__ import annotations

from quark.config.presets import PRESETS, get_preset
from quark.onnx.quantization.config.config import QConfig, QuantizationConfig, get_default_config
from quark.onnx.quantization.config.spec import (
    BFloat16Spec,
    BFP16Spec,
    Int8Spec,
    Int16Spec,
    QLayerConfig,
    XInt8Spec,
)

_FORCE = {"ForceQuantizeNoInputCheck": True}

XINT8_QCONFIG = QConfig(QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()), extra_options=_FORCE)
A8W8_QCONFIG = QConfig(
    QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()),
    extra_options={**_FORCE, "AlignSlice": False, "AlignConcat": True},
)
A16W8_QCONFIG = QConfig(
    QLayerConfig(input_tensors=Int16Spec(), weight=Int8Spec()),
    extra_options={**_FORCE, "AlignSlice": False, "AlignConcat": True},
)
VINT8_QCONFIG = QConfig(
    QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()), extra_options=dict(get_preset("VINT8").options)
)
BF16_QCONFIG = QConfig(QLayerConfig(input_tensors=BFloat16Spec(), weight=BFloat16Spec()), extra_options=_FORCE)
BFP16_QCONFIG = QConfig(QLayerConfig(input_tensors=BFP16Spec(), weight=BFP16Spec()))


def __getattr__(name: str) -> QuantizationConfig:
    """``XINT8_CONFIG`` and so on: every preset as an older configuration object, a fresh one at each access."""
    if name.endswith("_CONFIG") and name.removesuffix("_CONFIG") in PRESETS:
        return get_default_config(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "A8W8_QCONFIG",
    "A16W8_QCONFIG",
    "BF16_QCONFIG",
    "BFP16_QCONFIG",
    "VINT8_QCONFIG",
    "XINT8_QCONFIG",
    "get_default_config",
]
