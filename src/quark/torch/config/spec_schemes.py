"""Schemes of spec helpers: what the helpers of ``quark.torch.config.specs`` share, one class per scheme.

``observer_method`` is one of min_max, histogram, histogrampro, MSE and percentile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from quark.errors import ConfigError, unknown
from quark.torch import observer as observers
from quark.torch.config.tensor import QTensorConfig
from quark.torch.config.type import Dtype, QSchemeType, RoundType, ScaleType, ZeroPointType
from quark.torch.observer import ObserverBase

OBSERVER_METHODS: dict[str, type[ObserverBase]] = {
    "min_max": observers.PerTensorMinMaxObserver,
    "histogram": observers.PerTensorHistogramObserver,
    "histogrampro": observers.PerTensorHistogramObserverPro,
    "MSE": observers.PerTensorMSEObserver,
    "percentile": observers.PerTensorPercentileObserver,
}
SCALE_TYPES = {
    "float": ScaleType.float,
    "float32": ScaleType.float32,
    "float16": ScaleType.float16,
    "bfloat16": ScaleType.bfloat16,
    "power_of_2": ScaleType.pof2,
    "float8_e5m3": ScaleType.float8_e5m3,
}
ROUND_METHODS = {"round": RoundType.round, "floor": RoundType.floor, "half_even": RoundType.half_even}
ZERO_POINT_TYPES = {"int32": ZeroPointType.int32, "float32": ZeroPointType.float32}


def named(field: str, name: str | None, table: dict[str, Any]) -> Any:
    """The value called ``name`` (None stays None)."""
    if name is not None and name not in table:
        raise ConfigError(unknown(field, name, table))
    return None if name is None else table[name]


class DataTypeSpec:
    """Base of the spec helpers."""

    dtype: ClassVar[Dtype]

    def to_quantization_spec(self) -> QTensorConfig | list[QTensorConfig]:
        """The tensor configuration."""
        raise NotImplementedError


def per_tensor(
    dtype: Dtype,
    observer_method: str | None,
    symmetric: bool | None,
    scale_type: str | None,
    round_method: str | None,
    is_dynamic: bool | None,
) -> QTensorConfig:
    """One scale for the whole tensor."""
    return QTensorConfig(
        dtype,
        named("observer_method", observer_method or "min_max", OBSERVER_METHODS),
        is_dynamic,
        QSchemeType.per_tensor,
        symmetric=symmetric,
        round_method=named("round_method", round_method, ROUND_METHODS),
        scale_type=named("scale_type", scale_type, SCALE_TYPES),
    )


@dataclass
class PerTensor(DataTypeSpec):
    """One scale for the whole tensor."""

    observer_method: str | None = "min_max"
    symmetric: bool | None = True
    scale_type: str | None = "float"
    round_method: str | None = "half_even"
    is_dynamic: bool | None = False

    def to_quantization_spec(self) -> QTensorConfig:
        """One scale for the whole tensor."""
        values = self.observer_method, self.symmetric, self.scale_type, self.round_method, self.is_dynamic
        return per_tensor(self.dtype, *values)


@dataclass
class PerChannel(DataTypeSpec):
    """One scale per index of ``ch_axis``."""

    ch_axis: int
    symmetric: bool | None = True
    scale_type: str | None = "float"
    round_method: str | None = "half_even"
    is_dynamic: bool | None = False
    zero_point_type: str | None = "int32"

    def to_quantization_spec(self) -> QTensorConfig:
        """One scale per index of ``ch_axis``."""
        return QTensorConfig(
            self.dtype,
            observers.PerChannelMinMaxObserver,
            self.is_dynamic,
            QSchemeType.per_channel,
            self.ch_axis,
            symmetric=self.symmetric,
            round_method=named("round_method", self.round_method, ROUND_METHODS),
            scale_type=named("scale_type", self.scale_type, SCALE_TYPES),
            zero_point_type=named("zero_point_type", self.zero_point_type, ZERO_POINT_TYPES),
        )


@dataclass
class PerGroup(DataTypeSpec):
    """One scale per ``group_size`` elements along ``ch_axis``."""

    ch_axis: int
    group_size: int
    symmetric: bool | None = True
    scale_type: str | None = "float"
    round_method: str | None = "half_even"
    is_dynamic: bool | None = False

    def to_quantization_spec(self) -> QTensorConfig:
        """One scale per ``group_size`` elements along ``ch_axis``."""
        return QTensorConfig(
            self.dtype,
            observers.PerGroupMinMaxObserver,
            self.is_dynamic,
            QSchemeType.per_group,
            self.ch_axis,
            self.group_size,
            symmetric=self.symmetric,
            round_method=named("round_method", self.round_method, ROUND_METHODS),
            scale_type=named("scale_type", self.scale_type, SCALE_TYPES),
        )


@dataclass
class PerBlock(DataTypeSpec):
    """One scale per ``rows`` x ``columns`` block of a matrix."""

    rows: int = 128
    columns: int = 128
    scale_type: str | None = "float"
    is_dynamic: bool | None = False

    def to_quantization_spec(self) -> QTensorConfig:
        """One scale per block of a matrix; blocks at its edges may be smaller."""
        return QTensorConfig(
            self.dtype,
            observers.PerBlock2DMinMaxObserver,
            self.is_dynamic,
            QSchemeType.per_block,
            block_size=(self.rows, self.columns),
            symmetric=True,
            round_method=RoundType.half_even,
            scale_type=named("scale_type", self.scale_type, SCALE_TYPES),
        )


@dataclass
class FloatGroup(DataTypeSpec):
    """Small floats in groups, with scales in ``scale_format``."""

    ch_axis: int
    group_size: int
    scale_format: str | None = "float32"
    scale_calculation_mode: str | None = None
    is_dynamic: bool | None = True
    scale_type: str | None = None
    symmetric: bool | None = None

    def to_quantization_spec(self) -> QTensorConfig:
        """One scale per ``group_size`` elements along ``ch_axis``, in ``scale_format``."""
        return QTensorConfig(
            self.dtype,
            observers.PerBlockMXObserver,
            self.is_dynamic,
            QSchemeType.per_group,
            self.ch_axis,
            self.group_size,
            symmetric=self.symmetric,
            round_method=RoundType.half_even,
            scale_type=named("scale_type", self.scale_type, SCALE_TYPES),
            scale_format=self.scale_format,
            scale_calculation_mode=self.scale_calculation_mode,
        )


@dataclass
class SharedExponent(DataTypeSpec):
    """OCP Microscaling: blocks of 32 under a power of two."""

    ch_axis: int
    is_dynamic: bool | None = True
    scale_calculation_mode: str | None = "even"
    observer: ClassVar[type[ObserverBase]] = observers.PerBlockMXObserver

    def to_quantization_spec(self) -> QTensorConfig:
        """Blocks of 32 elements under E8M0 scales (OCP Microscaling v1.0)."""
        return QTensorConfig(
            self.dtype,
            self.observer,
            self.is_dynamic,
            QSchemeType.per_group,
            self.ch_axis,
            32,
            round_method=RoundType.half_even,
            scale_type=ScaleType.float,
            scale_format="e8m0",
            scale_calculation_mode=self.scale_calculation_mode,
        )


@dataclass
class Microexponent(DataTypeSpec):
    """Blocks under a shared exponent, with a bit per pair."""

    ch_axis: int
    block_size: int = 16
    scale_calculation_mode: str | None = "even"

    def to_quantization_spec(self) -> QTensorConfig:
        """Blocks under a shared exponent, and a bit for each pair (the scale calculation mode has no meaning here)."""
        return QTensorConfig(self.dtype, ch_axis=self.ch_axis, group_size=self.block_size)


class Cast(DataTypeSpec):
    """A cast and back."""

    def to_quantization_spec(self) -> QTensorConfig:
        """A cast and back."""
        return QTensorConfig(self.dtype, observers.PlaceholderObserver)
