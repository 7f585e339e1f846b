"""The enumerations of the torch dialect."""

from __future__ import annotations

from quark.torch.config.type import (
    DeviceType,
    Dtype,
    QSchemeType,
    QuantFlow,
    QuantizationMode,
    RoundType,
    ScaleType,
    TQTThresholdInitMeth,
    ZeroPointType,
)

__all__ = [
    "DeviceType",
    "Dtype",
    "QSchemeType",
    "QuantFlow",
    "QuantizationMode",
    "RoundType",
    "ScaleType",
    "TQTThresholdInitMeth",
    "ZeroPointType",
]
