"""The preset objects of the ONNX dialect. Using one never changes it, so each serves any number of models."""

from __future__ import annotations

from quark.config.presets import PRESETS, get_preset
from quark.onnx.quantization.config.algorithm import AdaQuantConfig, AdaRoundConfig
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
_ALIGN = {**_FORCE, "AlignSlice": False, "AlignConcat": True}
_XINT8 = QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec())
_A8W8 = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
_A16W8 = QLayerConfig(input_tensors=Int16Spec(), weight=Int8Spec())

XINT8_QCONFIG = QConfig(_XINT8, extra_options=_FORCE)
XINT8_ADAROUND_QCONFIG = QConfig(_XINT8, algo_config=[AdaRoundConfig()], extra_options=_FORCE)
XINT8_ADAQUANT_QCONFIG = QConfig(_XINT8, algo_config=[AdaQuantConfig()], extra_options=_FORCE)
A8W8_QCONFIG = QConfig(_A8W8, extra_options=_ALIGN)
A8W8_ADAROUND_QCONFIG = QConfig(_A8W8, algo_config=[AdaRoundConfig()], extra_options=_ALIGN)
A8W8_ADAQUANT_QCONFIG = QConfig(_A8W8, algo_config=[AdaQuantConfig()], extra_options=_ALIGN)
A16W8_QCONFIG = QConfig(_A16W8, extra_options=_ALIGN)
A16W8_ADAROUND_QCONFIG = QConfig(_A16W8, algo_config=[AdaRoundConfig()], extra_options=_ALIGN)
A16W8_ADAQUANT_QCONFIG = QConfig(_A16W8, algo_config=[AdaQuantConfig()], extra_options=_ALIGN)
VINT8_QCONFIG = QConfig(_XINT8, extra_options=dict(get_preset("VINT8").options))
BF16_QCONFIG = QConfig(QLayerConfig(input_tensors=BFloat16Spec(), weight=BFloat16Spec()), extra_options=_FORCE)
BFP16_QCONFIG = QConfig(QLayerConfig(input_tensors=BFP16Spec(), weight=BFP16Spec()))


def __getattr__(name: str) -> QuantizationConfig:
    """``XINT8_CONFIG`` and so on: every preset as an older configuration object, a fresh one at each access."""
    if name.endswith("_CONFIG") and name.removesuffix("_CONFIG") in PRESETS:
        return get_default_config(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "A8W8_ADAQUANT_QCONFIG",
    "A8W8_ADAROUND_QCONFIG",
    "A8W8_QCONFIG",
    "A16W8_ADAQUANT_QCONFIG",
    "A16W8_ADAROUND_QCONFIG",
    "A16W8_QCONFIG",
    "BF16_QCONFIG",
    "BFP16_QCONFIG",
    "VINT8_QCONFIG",
    "XINT8_ADAQUANT_QCONFIG",
    "XINT8_ADAROUND_QCONFIG",
    "XINT8_QCONFIG",
    "get_default_config",
]
