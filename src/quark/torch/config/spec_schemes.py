"""Schemes of spec helpers: what the helpers of ``quark.torch.config.specs`` share, one class per scheme.

``observer_method`` is one of min_max, histogram, histogrampro, MSE and percentile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from quark.config.known_fields import KnownFields
from quark.dataclass import dataclass
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
#: Field of a helper -> field of ``QTensorConfig``, and the values by the names that the helper takes.
NAMED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "observer_method": ("observer_cls", OBSERVER_METHODS),
    "round_method": ("round_method", ROUND_METHODS),
    "scale_type": ("scale_type", SCALE_TYPES),
    "zero_point_type": ("zero_point_type", ZERO_POINT_TYPES),
}


Fields = Mapping[str, Any]


class DataTypeSpec(KnownFields):
    """Base of the spec helpers, and what the fields of all of them mean; each has some of these.

    Args:
        ch_axis: the axis of channels, or along which groups and blocks lie; -1: the last.
        group_size: elements that share a scale; -1: the whole axis.
        block_size: elements that share an exponent.
        rows, columns: size of a block of a matrix.
        symmetric: the range is symmetric around 0, and the zero point is 0.
        is_dynamic: each tensor gives its own range at run time; False: ranges are fixed beforehand.
        observer_method: how the range is found: min_max, histogram, histogrampro, MSE or percentile.
        round_method: how values are rounded to codes: half_even, round or floor.
        scale_type: type of the scales: float, float32, float16, bfloat16, power_of_2 or float8_e5m3.
        scale_format: values that a scale can have: float32, e8m0, e4m3 or e5m3.
        scale_calculation_mode: how the largest magnitude of a block becomes its exponent: even, floor or ceil.
        zero_point_type: int32, or float32 for zero points that are not rounded.
    """

    def to_quantization_spec(self) -> QTensorConfig | list[QTensorConfig]:
        """The tensor configuration."""
        raise NotImplementedError


class OneStage(DataTypeSpec):
    """One tensor configuration; the fields are those of ``QTensorConfig``, but for the names in ``NAMED``.

    Attributes:
        dtype: data type of the codes.
        fixed: fields of ``QTensorConfig`` that helpers of a scheme have in common.
    """

    dtype: ClassVar[Dtype]
    fixed: ClassVar[Fields] = {}

    def to_quantization_spec(self) -> QTensorConfig:
        """The tensor configuration."""
        return QTensorConfig(self.dtype, **{**self.fixed, **self.settings()})

    def settings(self) -> dict[str, Any]:
        """The fields of ``QTensorConfig`` that this helper says something about.

        Raises:
            ConfigError: a name that is not known; the nearest is shown.
        """
        found: dict[str, Any] = {}
        for field, value in vars(self).items():
            name, table = NAMED.get(field, (field, None))
            if table is not None and value is not None and value not in table:
                raise ConfigError(unknown(field, value, table))
            found |= {} if value is None else {name: value if table is None else table[value]}
        return found


@dataclass
class PerTensor(OneStage):
    """One scale for the whole tensor."""

    observer_method: str | None = "min_max"
    symmetric: bool | None = True
    scale_type: str | None = "float"
    round_method: str | None = "half_even"
    is_dynamic: bool | None = False
    fixed: ClassVar[Fields] = {
        "observer_cls": observers.PerTensorMinMaxObserver,
        "qscheme": QSchemeType.per_tensor,
    }


@dataclass
class PerChannel(OneStage):
    """One scale per index of ``ch_axis``."""

    ch_axis: int
    symmetric: bool | None = True
    scale_type: str | None = "float"
    round_method: str | None = "half_even"
    is_dynamic: bool | None = False
    zero_point_type: str | None = "int32"
    fixed: ClassVar[Fields] = {
        "observer_cls": observers.PerChannelMinMaxObserver,
        "qscheme": QSchemeType.per_channel,
    }


@dataclass
class PerGroup(OneStage):
    """One scale per ``group_size`` elements along ``ch_axis``."""

    ch_axis: int
    group_size: int
    symmetric: bool | None = True
    scale_type: str | None = "float"
    round_method: str | None = "half_even"
    is_dynamic: bool | None = False
    fixed: ClassVar[Fields] = {
        "observer_cls": observers.PerGroupMinMaxObserver,
        "qscheme": QSchemeType.per_group,
    }


@dataclass
class PerBlock(OneStage):
    """One scale per ``rows`` x ``columns`` block of a matrix; blocks at its edges may be smaller."""

    rows: int = 128
    columns: int = 128
    scale_type: str | None = "float"
    is_dynamic: bool | None = False
    fixed: ClassVar[Fields] = {
        "observer_cls": observers.PerBlock2DMinMaxObserver,
        "qscheme": QSchemeType.per_block,
        "symmetric": True,
        "round_method": RoundType.half_even,
    }

    def settings(self) -> dict[str, Any]:
        """Both sizes as one."""
        found = super().settings()
        size = found.pop("rows"), found.pop("columns")
        return {**found, "block_size": size}


@dataclass
class FloatGroup(OneStage):
    """Small floats in groups, with scales in ``scale_format``."""

    ch_axis: int
    group_size: int
    scale_format: str | None = "float32"
    scale_calculation_mode: str | None = None
    is_dynamic: bool | None = True
    scale_type: str | None = None
    symmetric: bool | None = None
    fixed: ClassVar[Fields] = {
        "observer_cls": observers.PerBlockMXObserver,
        "qscheme": QSchemeType.per_group,
        "round_method": RoundType.half_even,
    }


@dataclass
class SharedExponent(OneStage):
    """OCP Microscaling v1.0: blocks of 32 elements under E8M0 scales."""

    ch_axis: int
    is_dynamic: bool | None = True
    scale_calculation_mode: str | None = "even"
    fixed: ClassVar[Fields] = {
        **FloatGroup.fixed,
        "group_size": 32,
        "scale_type": ScaleType.float,
        "scale_format": "e8m0",
    }


@dataclass
class Microexponent(OneStage):
    """Blocks under a shared exponent, with a bit per pair; the scale calculation mode has no meaning here."""

    ch_axis: int
    block_size: int = 16
    scale_calculation_mode: str | None = "even"

    def settings(self) -> dict[str, Any]:
        """The axis and the size of a block."""
        return {"ch_axis": self.ch_axis, "group_size": self.block_size}


class Cast(OneStage):
    """A cast and back."""

    fixed: ClassVar[Fields] = {"observer_cls": observers.PlaceholderObserver}
