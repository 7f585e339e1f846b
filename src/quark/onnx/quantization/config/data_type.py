"""The data type classes of the ONNX dialect: names that a spec carries. The arithmetic is in ``quark.numerics``."""

from __future__ import annotations

from typing import ClassVar

from quark.numerics.formats import get_format


class BaseDataType:
    """A data type by name; never instantiated. ``format`` is its row in ``quark.numerics.formats.FORMATS``."""

    format: ClassVar[str]
    bitwidth: ClassVar[int]
    min_value: ClassVar[float]
    max_value: ClassVar[float]
    onnx_proto_dtype: ClassVar[str | None]


DataType = BaseDataType


def _data_type(name: str, format_name: str) -> type[BaseDataType]:
    row = get_format(format_name)
    members = {
        "format": format_name,
        "bitwidth": row.bits,
        "min_value": row.min,
        "max_value": row.max,
        "onnx_proto_dtype": row.onnx_type,
        "__doc__": f"The {format_name} row of the table of formats.",
        "__module__": __name__,
    }
    return type(name, (BaseDataType,), members)


Int2 = _data_type("Int2", "int2")
UInt2 = _data_type("UInt2", "uint2")
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
