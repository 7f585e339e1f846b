"""The enumerations of the torch dialect. Configurations store members by name, so the names never change."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from quark.errors import ConfigError, unknown


class Dtype(Enum):
    """Data type of a quantized tensor."""

    int8 = "int8"
    uint8 = "uint8"
    uint16 = "uint16"
    int16 = "int16"
    int32 = "int32"
    int4 = "int4"
    uint4 = "uint4"
    int3 = "int3"
    int2 = "int2"
    uint2 = "uint2"
    bfloat16 = "bfloat16"
    float16 = "float16"
    fp8_e5m2 = "fp8_e5m2"
    fp8_e4m3 = "fp8_e4m3"
    fp8_e5m3 = "fp8_e5m3"
    fp6_e3m2 = "fp6_e3m2"
    fp6_e2m3 = "fp6_e2m3"
    fp4 = "fp4"
    mx = "mx"
    mx6 = "mx6"
    mx9 = "mx9"
    bfp16 = "bfp16"

    @staticmethod
    def from_str(name: str) -> Dtype:
        """The member called ``name`` in any case."""
        return member(Dtype, "dtype", name.lower() if isinstance(name, str) else name)

    @staticmethod
    def from_torch_dtype(dtype: torch.dtype) -> Dtype:
        """The member that a torch type carries, such as ``torch.float8_e4m3fn``."""
        if dtype not in FROM_TORCH:
            raise ConfigError(unknown("torch data type", dtype, [str(known) for known in FROM_TORCH]))
        return FROM_TORCH[dtype]

    def to_bitwidth(self) -> int:
        """Bits per value, without shared scales."""
        return BITS[self]

    def to_torch_packed_dtype(self) -> torch.dtype:
        """The torch type of the stored (packed) tensor.

        Raises:
            ConfigError: the peer's files have no layout for this type.
        """
        if self not in PACKED:
            raise ConfigError(f"{self.name} has no packed storage type; {', '.join(d.name for d in PACKED)} have one")
        return PACKED[self]


class QSchemeType(Enum):
    """Which elements share a scale."""

    per_tensor = "per_tensor"
    per_channel = "per_channel"
    per_group = "per_group"
    per_block = "per_block"


class ScaleType(Enum):
    """Which numbers a scale may be."""

    float = "float"
    pof2 = "pof2"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float8_e5m3 = "float8_e5m3"
    float8_e8m0fnu = "float8_e8m0fnu"


class RoundType(Enum):
    """Rounding of the elements: ``round`` takes ties away from zero, ``half_even`` to the even neighbour."""

    round = 2
    floor = 3
    half_even = 8


class ZeroPointType(Enum):
    """An integer zero point, or a real one that puts the smallest value exactly on the lowest code."""

    int32 = "int32"
    float32 = "float32"


class DeviceType(Enum):
    """What the model will run on; recorded, not used."""

    CPU = "CPU"
    IPU = "IPU"


class QuantizationMode(Enum):
    """Quantized modules, or an exported graph."""

    eager_mode = "eager_mode"
    fx_graph_mode = "fx_graph_mode"


class QuantFlow(Enum):
    """A model in memory, a checkpoint file by file, or block by block."""

    standard = "standard"
    file2file = "file2file"
    per_block = "per_block"


class TQTThresholdInitMeth(Enum):
    """How a trained threshold starts: three standard deviations, or least divergence."""

    _3SD = "_3SD"
    _KL_J = "_KL_J"


def member(enumeration: type[Enum], field: str, name: object) -> Any:
    """The member of ``enumeration`` called ``name`` (a member is returned as it is, None too).

    Raises:
        ConfigError: no such member; the nearest name is shown.
    """
    if name is None or isinstance(name, enumeration):
        return name
    if not isinstance(name, str) or name not in enumeration.__members__:
        raise ConfigError(unknown(f"{enumeration.__name__} in the field {field}", name, enumeration.__members__))
    return enumeration[name]


FROM_TORCH = {
    torch.int8: Dtype.int8,
    torch.uint8: Dtype.uint8,
    torch.int16: Dtype.int16,
    torch.uint16: Dtype.uint16,
    torch.int32: Dtype.int32,
    torch.float16: Dtype.float16,
    torch.bfloat16: Dtype.bfloat16,
    torch.float8_e4m3fn: Dtype.fp8_e4m3,
    torch.float8_e5m2: Dtype.fp8_e5m2,
}

BITS = {
    Dtype.int2: 2,
    Dtype.uint2: 2,
    Dtype.int3: 3,
    Dtype.int4: 4,
    Dtype.uint4: 4,
    Dtype.int8: 8,
    Dtype.uint8: 8,
    Dtype.int16: 16,
    Dtype.uint16: 16,
    Dtype.int32: 32,
    Dtype.bfloat16: 16,
    Dtype.float16: 16,
    Dtype.fp8_e5m2: 8,
    Dtype.fp8_e4m3: 8,
    Dtype.fp8_e5m3: 8,
    Dtype.fp6_e3m2: 6,
    Dtype.fp6_e2m3: 6,
    Dtype.fp4: 4,
    Dtype.mx: 8,
    Dtype.mx6: 6,
    Dtype.mx9: 9,
    Dtype.bfp16: 16,
}

PACKED = {
    **dict.fromkeys((Dtype.int4, Dtype.uint4, Dtype.int2, Dtype.int32), torch.int32),
    **dict.fromkeys((Dtype.uint2, Dtype.int3, Dtype.uint8), torch.uint8),
    **dict.fromkeys((Dtype.fp4, Dtype.fp6_e3m2, Dtype.fp6_e2m3, Dtype.fp8_e5m3), torch.uint8),
    **dict.fromkeys((Dtype.int16, Dtype.uint16), torch.int16),
    Dtype.int8: torch.int8,
    Dtype.float16: torch.float16,
    Dtype.bfloat16: torch.bfloat16,
    Dtype.fp8_e4m3: torch.float8_e4m3fn,
    Dtype.fp8_e5m2: torch.float8_e5m2,
}
