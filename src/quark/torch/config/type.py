"""The enumerations of the torch dialect. Configurations store members by name, so the names never change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, EnumMeta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from quark.deferred import when_used
from quark.errors import ConfigError, unknown
from quark.numerics.elements import Element
from quark.numerics.formats import BUILT_IN, FORMATS, Block, Float, Format
from quark.numerics.ggml import GGML

if TYPE_CHECKING:
    import torch
else:
    torch = when_used("torch")

#: The enumerations of the dialect.
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

WORDS = {8: "uint8", 16: "int16", 32: "int32"}  # what holds codes of up to so many bits
MADE: dict[str, Any] = {}


def registered(cls: type[Any], name: object) -> Any:
    """The member of a registered format, always the same object; None: there is no such format."""
    if not isinstance(name, str) or name in BUILT_IN or name not in FORMATS:
        return None
    if name not in MADE:
        MADE[name] = made = object.__new__(cls)
        made._name_ = made._value_ = name
    return MADE[name]


class _Formats(EnumMeta):
    """Makes an enumeration go on with the formats that are registered."""

    def __getattr__(cls, name: str) -> Any:
        spelled = cls.__dict__.get("_member_map_", {})  # Python 3.11 looks members up here
        found = spelled[name] if name in spelled else registered(cls, name)
        if found is None:
            raise AttributeError(f"{cls.__name__} has no member {name!r}")
        return found

    def __getitem__(cls, name: str) -> Any:
        return registered(cls, name) or super().__getitem__(name)

    def __contains__(cls, member: object) -> bool:
        return isinstance(member, cls)

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls.__members__.values())

    def __len__(cls) -> int:
        return len(cls.__members__)

    @property
    def __members__(cls) -> Mapping[str, Any]:  # type: ignore[override]
        more = {name: registered(cls, name) for name in FORMATS if name not in BUILT_IN}
        return MappingProxyType({**super().__members__, **more})


class Dtype(Enum, metaclass=_Formats):
    """Data type of a quantized tensor; a registered format (``quark.register_format``) is a member, too."""

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
    q2_k = "q2_k"
    q3_k = "q3_k"
    q4_0 = "q4_0"
    q4_1 = "q4_1"
    q4_k = "q4_k"
    q5_0 = "q5_0"
    q5_1 = "q5_1"
    q5_k = "q5_k"
    q6_k = "q6_k"
    q8_0 = "q8_0"

    @classmethod
    def _missing_(cls, value: object) -> Any:
        """The member of a registered format."""
        return registered(cls, value)

    @staticmethod
    def from_str(name: str) -> Dtype:
        """The member called ``name`` in any case."""
        return member(Dtype, "dtype", name.lower() if isinstance(name, str) else name)

    @staticmethod
    def from_torch_dtype(dtype: torch.dtype) -> Dtype:
        """The member that a torch type carries, such as ``torch.float8_e4m3fn``."""
        found = [one for one in Dtype if one.row is not None and dtype == of_row(one.row)]
        if not found:
            raise ConfigError(unknown("torch data type", dtype, [str(of_row(one.row)) for one in Dtype if one.row]))
        return found[0]

    @property
    def row(self) -> Format | None:
        """Its format; None for ``mx``, which ``mx_element_dtype`` completes."""
        return FORMATS.get(SPELLED.get(self.value, self.value)) or GGML.get(self.value)

    def to_bitwidth(self) -> int:
        """Bits per value, without shared scales."""
        row = self.row
        if self.value in BITS or row is None:
            return BITS[self.value]
        return int(row.element.bits if isinstance(row, Block) and not row.sub_block else row.bits)

    def to_torch_packed_dtype(self) -> torch.dtype:
        """The torch type of the stored (packed) tensor.

        Raises:
            ConfigError: the peer's files have no layout for this type.
        """
        row = self.row
        if row is None or isinstance(row, Block):
            allowed = ", ".join(one.name for one in Dtype if one.row is not None and not isinstance(one.row, Block))
            raise ConfigError(f"{self.name} has no packed storage type; {allowed} have one")
        return getattr(torch, PACKED[self.value]) if self.value in PACKED else code_type(row)


#: Members whose row has another name.
SPELLED = {"fp4": "fp4_e2m1", "fp8_e5m3": "e5m3"}
#: Widths that the interface gives with the shared exponent, or for a family.
BITS = {"mx": 8, "bfp16": 16}
#: Types whose codes the peer's files pack into words.
PACKED = dict.fromkeys(("int2", "int4", "uint4"), "int32")


def code_type(element: Element) -> torch.dtype:
    """The torch type of a code that is stored alone; a narrower code is stored with others in bytes."""
    if isinstance(element, Float) and element.torch_dtype is not None:
        return getattr(torch, element.torch_dtype)
    if element.bits == 8:
        return torch.int8 if element.code_dtype == "int8" else torch.uint8
    return getattr(torch, next(name for bits, name in WORDS.items() if bits >= element.bits))


def of_row(row: Format) -> torch.dtype | None:
    """The torch type whose values a format's codes are."""
    return None if row.torch_dtype is None else getattr(torch, row.torch_dtype)


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
