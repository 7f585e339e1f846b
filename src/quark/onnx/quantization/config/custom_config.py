"""The preset objects of the ONNX dialect. They are never changed when they are used, so each serves any number of models."""

from __future__ import annotations

from quark.onnx.quantization.config.config import QConfig, get_default_config
from quark.onnx.quantization.config.spec import Int8Spec, Int16Spec, QLayerConfig, XInt8Spec

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

__all__ = ["A16W8_QCONFIG", "A8W8_QCONFIG", "XINT8_QCONFIG", "get_default_config"]
