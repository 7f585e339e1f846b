"""Spec helpers: short names for common tensor configurations; ``to_quantization_spec()`` makes a ``QTensorConfig``.

Helpers differ in data type, scheme and defaults only, so each is a row: its scheme, and the values in which it differs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.torch import observer as observers
from quark.torch.config.spec_schemes import (
    Cast,
    DataTypeSpec,
    Fields,
    FloatGroup,
    Microexponent,
    OneStage,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    SharedExponent,
)
from quark.torch.config.tensor import QTensorConfig
from quark.torch.config.type import Dtype, RoundType

# ---- integers --------------------------------------------------------------------------------------------------------


class Int4PerTensorSpec(PerTensor):
    """int4, one scale."""

    dtype = Dtype.int4


class Int8PerTensorSpec(PerTensor):
    """int8, one scale."""

    dtype = Dtype.int8


@dataclass
class Uint4PerTensorSpec(PerTensor):
    """uint4, one scale."""

    symmetric: bool | None = False
    dtype = Dtype.uint4


@dataclass
class Uint8PerTensorSpec(PerTensor):
    """uint8, one scale."""

    symmetric: bool | None = False
    dtype = Dtype.uint8


class Int4PerChannelSpec(PerChannel):
    """int4, a scale per channel."""

    dtype = Dtype.int4


@dataclass
class Int3PerChannelSpec(PerChannel):
    """int3, a scale per channel; with zero points unless told otherwise."""

    symmetric: bool | None = False
    dtype = Dtype.int3


@dataclass
class Int8PerChannelSpec(PerChannel):
    """int8, a scale per channel; with zero points unless told otherwise."""

    symmetric: bool | None = False
    dtype = Dtype.int8


class Uint8PerChannelSpec(PerChannel):
    """uint8, a scale per channel."""

    dtype = Dtype.uint8


@dataclass
class Uint4PerChannelSpec(PerChannel):
    """uint4, a scale per channel."""

    symmetric: bool | None = False
    dtype = Dtype.uint4


class Int2PerGroupSpec(PerGroup):
    """int2, a scale per group."""

    dtype = Dtype.int2


class Int3PerGroupSpec(PerGroup):
    """int3, a scale per group."""

    dtype = Dtype.int3


class Int4PerGroupSpec(PerGroup):
    """int4, a scale per group."""

    dtype = Dtype.int4


class Int8PerGroupSpec(PerGroup):
    """int8, a scale per group."""

    dtype = Dtype.int8


@dataclass
class Uint4PerGroupSpec(PerGroup):
    """uint4, a scale per group."""

    symmetric: bool | None = False
    dtype = Dtype.uint4


@dataclass
class Uint8PerGroupSpec(PerGroup):
    """uint8, a scale per group."""

    symmetric: bool | None = False
    dtype = Dtype.uint8


# ---- small floats ----------------------------------------------------------------------------------------------------


@dataclass
class FP8E4M3PerTensorSpec(OneStage):
    """FP8 E4M3, one scale."""

    observer_method: str | None = "min_max"
    scale_type: str | None = None
    is_dynamic: bool | None = False
    dtype = Dtype.fp8_e4m3
    fixed: ClassVar[Fields] = {**PerTensor.fixed, "symmetric": True, "round_method": RoundType.half_even}


class FP8E5M3PerTensorSpec(FP8E4M3PerTensorSpec):
    """Unsigned FP8 E5M3, one scale: a format for scales."""

    dtype = Dtype.fp8_e5m3


class FP8E5M2PerTensorSpec(PerTensor):
    """FP8 E5M2, one scale."""

    dtype = Dtype.fp8_e5m2


class FP8E4M3PerChannelSpec(PerChannel):
    """FP8 E4M3, a scale per channel."""

    dtype = Dtype.fp8_e4m3


class FP8E5M2PerChannelSpec(PerChannel):
    """FP8 E5M2, a scale per channel."""

    dtype = Dtype.fp8_e5m2


class FP8E4M3PerGroupSpec(FloatGroup):
    """FP8 E4M3, a scale per group."""

    dtype = Dtype.fp8_e4m3


class FP8E4M3PerBlockSpec(PerBlock):
    """FP8 E4M3, a scale per two-dimensional block."""

    dtype = Dtype.fp8_e4m3


class FP8E5M2PerGroupSpec(FloatGroup):
    """FP8 E5M2, a scale per group."""

    dtype = Dtype.fp8_e5m2


class FP6E2M3PerGroupSpec(FloatGroup):
    """FP6 E2M3, a scale per group."""

    dtype = Dtype.fp6_e2m3


class FP6E3M2PerGroupSpec(FloatGroup):
    """FP6 E3M2, a scale per group."""

    dtype = Dtype.fp6_e3m2


@dataclass
class FP4PerGroupSpec(FloatGroup):
    """FP4 E2M1, a scale per group."""

    scale_type: str | None = "float"
    dtype = Dtype.fp4


@dataclass
class AmdFP4Spec(DataTypeSpec):
    """FP4 in groups of 16 or 32 under unsigned E5M3 scales."""

    ch_axis: int
    group_size: int
    is_dynamic: bool | None = True
    dtype = Dtype.fp4

    def to_quantization_spec(self) -> QTensorConfig:
        """Groups of 16 or 32."""
        if self.group_size not in (16, 32):
            raise ConfigError(f"AMD FP4 has groups of 16 or 32; group_size={self.group_size} is neither")
        spec = FP4PerGroupSpec(self.ch_axis, self.group_size, "e5m3", None, self.is_dynamic, "float8_e5m3")
        return spec.to_quantization_spec()


class OCP_MXFP8E4M3Spec(SharedExponent):
    """MXFP8 with E4M3 elements."""

    dtype = Dtype.fp8_e4m3


class OCP_MXFP8E5M2Spec(SharedExponent):
    """MXFP8 with E5M2 elements."""

    dtype = Dtype.fp8_e5m2


class OCP_MXFP6E3M2Spec(SharedExponent):
    """MXFP6 with E3M2 elements."""

    dtype = Dtype.fp6_e3m2


class OCP_MXFP6E2M3Spec(SharedExponent):
    """MXFP6 with E2M3 elements."""

    dtype = Dtype.fp6_e2m3


class OCP_MXFP4Spec(SharedExponent):
    """MXFP4."""

    dtype = Dtype.fp4


@dataclass
class OCP_MXFP4DiffsSpec(SharedExponent):
    """MXFP4 whose shared exponent has the less squared error of two."""

    is_dynamic: bool | None = False
    dtype = Dtype.fp4
    fixed: ClassVar[Fields] = {**SharedExponent.fixed, "observer_cls": observers.PerBlockMXDiffsObserver}


class OCP_MXINT8Spec(SharedExponent):
    """MXINT8."""

    dtype = Dtype.mx
    fixed: ClassVar[Fields] = {"group_size": 32, "mx_element_dtype": Dtype.int8}

    def settings(self) -> dict[str, Any]:
        """Blocks of 32 elements under E8M0 scales, from each tensor as it comes."""
        return {"ch_axis": self.ch_axis, "scale_calculation_mode": self.scale_calculation_mode}


class MX6Spec(Microexponent):
    """MX6: 16 elements share an exponent."""

    dtype = Dtype.mx6


class MX9Spec(Microexponent):
    """MX9: 16 elements share an exponent."""

    dtype = Dtype.mx9


@dataclass
class BFP16Spec(OneStage):
    """BFP16: 8 elements of 8 bits share an exponent."""

    ch_axis: int
    scale_calculation_mode: str | None = "even"
    dtype = Dtype.bfp16

    def settings(self) -> dict[str, Any]:
        """Blocks of 8 (the scale calculation mode has no meaning here)."""
        return {"ch_axis": self.ch_axis, "group_size": 8}


class Float16Spec(Cast):
    """A cast to float16 and back."""

    dtype = Dtype.float16


class Bfloat16Spec(Cast):
    """A cast to bfloat16 and back."""

    dtype = Dtype.bfloat16


# ---- two stages ------------------------------------------------------------------------------------------------------

FirstOrSecond = DataTypeSpec | QTensorConfig


def single(spec: FirstOrSecond, name: str) -> QTensorConfig:
    """A stage as one tensor configuration."""
    config = spec.to_quantization_spec() if isinstance(spec, DataTypeSpec) else spec
    if not isinstance(config, QTensorConfig):
        raise ConfigError(f"{name} must be one spec or QTensorConfig, not {spec!r}")
    return config


@dataclass
class ProgressiveSpec(DataTypeSpec):
    """The second stage quantizes the values that the first has made (int4 on FP8).

    Args:
        first_stage: a helper or a ``QTensorConfig`` for the values of the tensor.
        second_stage: the same for the values that the first stage can represent.
    """

    first_stage: FirstOrSecond
    second_stage: FirstOrSecond

    def to_quantization_spec(self) -> list[QTensorConfig]:
        """Both stages."""
        return [single(self.first_stage, "first_stage"), single(self.second_stage, "second_stage")]


@dataclass
class ScaleQuantSpec(DataTypeSpec):
    """The second stage quantizes the scales of the first (NVFP4).

    Args:
        first_stage: a helper or a ``QTensorConfig`` for the values of the tensor.
        second_stage: the same for the scales of the first stage.
    """

    first_stage: FirstOrSecond
    second_stage: FirstOrSecond

    def to_quantization_spec(self) -> list[QTensorConfig]:
        """Both stages, the second marked."""
        second = replace(single(self.second_stage, "second_stage"), is_scale_quant=True)
        return [single(self.first_stage, "first_stage"), second]


TwoStageSpec = ProgressiveSpec | ScaleQuantSpec

__all__ = [
    *sorted(name for name, value in list(globals().items()) if name.endswith("Spec") and name[0] != "_"),
]
