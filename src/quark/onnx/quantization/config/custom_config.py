"""The preset objects of the ONNX dialect. Using one never changes it, so each serves any number of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quark.config.presets import PRESETS, get_preset
from quark.onnx.quantization.config.algorithm import AdaQuantConfig, AdaRoundConfig, AlgoConfig
from quark.onnx.quantization.config.config import QConfig, QuantizationConfig, get_default_config
from quark.onnx.quantization.config.spec import (
    BFloat16Spec,
    BFP16Spec,
    Int8Spec,
    Int16Spec,
    QLayerConfig,
    QTensorConfig,
    XInt8Spec,
)

_FORCE = {"ForceQuantizeNoInputCheck": True}
_ALIGN = {**_FORCE, "AlignSlice": False, "AlignConcat": True}


def _of(spec: Callable[[], QTensorConfig], options: Mapping[str, Any], *algorithms: AlgoConfig) -> QConfig:
    layer = QLayerConfig(input_tensors=spec(), weight=(Int8Spec if spec is Int16Spec else spec)())
    return QConfig(layer, algo_config=[*algorithms], extra_options=dict(options))


XINT8_QCONFIG: QConfig
XINT8_ADAROUND_QCONFIG: QConfig
XINT8_ADAQUANT_QCONFIG: QConfig
A8W8_QCONFIG: QConfig
A8W8_ADAROUND_QCONFIG: QConfig
A8W8_ADAQUANT_QCONFIG: QConfig
A16W8_QCONFIG: QConfig
A16W8_ADAROUND_QCONFIG: QConfig
A16W8_ADAQUANT_QCONFIG: QConfig
VINT8_QCONFIG: QConfig
BF16_QCONFIG: QConfig
BFP16_QCONFIG: QConfig

#: How each is made, when it is first asked for.
_MADE: Mapping[str, Callable[[], QConfig]] = {
    "XINT8_QCONFIG": lambda: _of(XInt8Spec, _FORCE),
    "XINT8_ADAROUND_QCONFIG": lambda: _of(XInt8Spec, _FORCE, AdaRoundConfig()),
    "XINT8_ADAQUANT_QCONFIG": lambda: _of(XInt8Spec, _FORCE, AdaQuantConfig()),
    "A8W8_QCONFIG": lambda: _of(Int8Spec, _ALIGN),
    "A8W8_ADAROUND_QCONFIG": lambda: _of(Int8Spec, _ALIGN, AdaRoundConfig()),
    "A8W8_ADAQUANT_QCONFIG": lambda: _of(Int8Spec, _ALIGN, AdaQuantConfig()),
    "A16W8_QCONFIG": lambda: _of(Int16Spec, _ALIGN),
    "A16W8_ADAROUND_QCONFIG": lambda: _of(Int16Spec, _ALIGN, AdaRoundConfig()),
    "A16W8_ADAQUANT_QCONFIG": lambda: _of(Int16Spec, _ALIGN, AdaQuantConfig()),
    "VINT8_QCONFIG": lambda: _of(XInt8Spec, get_preset("VINT8").options),
    "BF16_QCONFIG": lambda: _of(BFloat16Spec, _FORCE),
    "BFP16_QCONFIG": lambda: _of(BFP16Spec, {}),
}


def __getattr__(name: str) -> QConfig | QuantizationConfig:
    """``XINT8_QCONFIG`` and so on; ``XINT8_CONFIG``: every preset as an older object, a fresh one at each access."""
    if name in _MADE:
        return globals().setdefault(name, _MADE[name]())
    if name.endswith("_CONFIG") and name.removesuffix("_CONFIG") in PRESETS:
        return get_default_config(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [*_MADE, "get_default_config"]
