"""The data type classes of the ONNX dialect: names that a spec carries. The arithmetic is in ``quark.numerics``."""

from __future__ import annotations

from typing import ClassVar

from quark.numerics.blocks import Block
from quark.numerics.formats import Format, get_format


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


def _bitwidth(row: Format) -> int:
    if not isinstance(row, Block):
        return row.bits
    whole = row.sub_block or row.name == "bfp16"
    return row.element.bits + (_SHARED_EXPONENT_BITS if whole else 0)


def _data_type(name: str, format_name: str) -> type[BaseDataType]:
    row = get_format(format_name)
    element = row.element if isinstance(row, Block) else row
    members = {
        "format": format_name,
        "bitwidth": _bitwidth(row),
        "min_value": element.min,
        "max_value": element.max,
        "onnx_proto_dtype": _PROTO.get(row.onnx_type or "", 0),
        "__doc__": f"The {format_name} row of the table of formats.",
        "__module__": __name__,
    }
    return type(name, (BaseDataType,), members)


Int2 = _data_type("Int2", "int2")
UInt2 = _data_type("UInt2", "uint2")
Int3 = _data_type("Int3", "int3")
UInt3 = _data_type("UInt3", "uint3")
Int4 = _data_type("Int4", "int4")
UInt4 = _data_type("UInt4", "uint4")
Int8 = _data_type("Int8", "int8")
UInt8 = _data_type("UInt8", "uint8")
Int16 = _data_type("Int16", "int16")
UInt16 = _data_type("UInt16", "uint16")
Int32 = _data_type("Int32", "int32")
UInt32 = _data_type("UInt32", "uint32")
Float16 = _data_type("Float16", "float16")
BFloat16 = _data_type("BFloat16", "bfloat16")
FP8E4M3 = _data_type("FP8E4M3", "fp8_e4m3")
FP8E5M2 = _data_type("FP8E5M2", "fp8_e5m2")
FP6E3M2 = _data_type("FP6E3M2", "fp6_e3m2")
FP6E2M3 = _data_type("FP6E2M3", "fp6_e2m3")
FP4E2M1 = _data_type("FP4E2M1", "fp4_e2m1")
BFP16 = _data_type("BFP16", "bfp16")
MX4 = _data_type("MX4", "mx4")
MX6 = _data_type("MX6", "mx6")
MX9 = _data_type("MX9", "mx9")
MXFP8E5M2 = _data_type("MXFP8E5M2", "mxfp8_e5m2")
MXFP8E4M3 = _data_type("MXFP8E4M3", "mxfp8_e4m3")
MXFP6E3M2 = _data_type("MXFP6E3M2", "mxfp6_e3m2")
MXFP6E2M3 = _data_type("MXFP6E2M3", "mxfp6_e2m3")
MXFP4E2M1 = _data_type("MXFP4E2M1", "mxfp4")
MXInt8 = _data_type("MXInt8", "mxint8")
NVFP4 = _data_type("NVFP4", "nvfp4")
AMDFP4 = _data_type("AMDFP4", "amdfp4")
AMDFP4G32 = _data_type("AMDFP4G32", "amdfp4_g32")
