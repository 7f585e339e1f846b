"""The data type classes of the ONNX dialect: names that a spec carries. The arithmetic is in ``quark.numerics``.

Every row of the table of formats is a class here, ``fp8_e4m3`` the class ``FP8E4M3``, but for two kinds: formats that
only scales have, and the rules for a shared exponent, which the field ``scale_type`` of a spec chooses.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from quark.numerics.blocks import Block
from quark.numerics.formats import FORMATS, Format, Int


class BaseDataType:
    """A data type by name; never instantiated.

    Attributes:
        format: its row in ``quark.numerics.formats.FORMATS``.
        bitwidth: bits of a code; with the shared exponent for BFP16, MX4, MX6 and MX9 (``bit_width`` of the operator).
        min_value, max_value: what an element holds at scale 1.
        onnx_proto_dtype: number of the ONNX type that stores it; 0 (UNDEFINED) where there is none.
    """

    format: ClassVar[str]
    bitwidth: ClassVar[int]
    min_value: ClassVar[float]
    max_value: ClassVar[float]
    onnx_proto_dtype: ClassVar[int]


DataType = BaseDataType

#: Numbers of ONNX's TensorProto.DataType; written out because importing onnx takes as long as all the rest.
_PROTO = {
    "UINT8": 2,
    "INT8": 3,
    "UINT16": 4,
    "INT16": 5,
    "INT32": 6,
    "FLOAT16": 10,
    "UINT32": 12,
    "BFLOAT16": 16,
    "FLOAT8E4M3FN": 17,
    "FLOAT8E5M2": 19,
    "UINT4": 21,
    "INT4": 22,
    "FLOAT4E2M1": 23,
    "UINT2": 25,
    "INT2": 26,
}
_SHARED_EXPONENT_BITS = 8
#: Rows whose class says more than their name.
_NAMED = {"mxfp4": "MXFP4E2M1"}
#: What a shared exponent is rounded by, as the end of a block format's name.
RULE_SUFFIXES = ("_even", "_ceil")


def _bitwidth(row: Format) -> int:
    if not isinstance(row, Block):
        return row.bits
    whole = row.sub_block or (row.narrow and isinstance(row.element, Int))  # the operator's bit_width counts both
    return row.element.bits + (_SHARED_EXPONENT_BITS if whole else 0)


def class_name(format: str) -> str:
    """The name of a format's class: ``uint4`` is ``UInt4``, ``bfloat16`` ``BFloat16``, ``mxint8`` ``MXInt8``."""
    if format in _NAMED:
        return _NAMED[format]
    name = format.replace("_", "").upper()
    for plain, spelled in (("UINT", "UInt"), ("INT", "Int"), ("FLOAT", "Float")):
        name = name.replace(plain, spelled)
    return name


def has_class(row: Format) -> bool:
    """Whether a row is a data type of its own: no format of scales only, no rule for a shared exponent."""
    if isinstance(row, Block):
        return not any(row.name.endswith(end) and row.name.removesuffix(end) in FORMATS for end in RULE_SUFFIXES)
    return isinstance(row, Int) or row.signed


def data_types() -> dict[str, type[BaseDataType]]:
    """Every data type class by its name."""
    return {class_name(row.name): class_of(row) for row in FORMATS.values() if has_class(row)}


@cache
def class_of(row: Format) -> type[BaseDataType]:
    """The class of a row."""
    element = row.element if isinstance(row, Block) else row
    members = {
        "format": row.name,
        "bitwidth": _bitwidth(row),
        "min_value": element.min,
        "max_value": element.max,
        "onnx_proto_dtype": _PROTO.get(row.onnx_type or "", 0),
        "__doc__": f"The {row.name} row of the table of formats.",
        "__module__": __name__,
    }
    return type(class_name(row.name), (BaseDataType,), members)


def __getattr__(name: str) -> Any:
    found = data_types().get(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found


def __dir__() -> list[str]:
    return [*globals(), *data_types()]
