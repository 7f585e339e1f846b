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


Int4 = _data_type("Int4", "int4")
UInt4 = _data_type("UInt4", "uint4")
Int8 = _data_type("Int8", "int8")
UInt8 = _data_type("UInt8", "uint8")
Int16 = _data_type("Int16", "int16")
UInt16 = _data_type("UInt16", "uint16")
Int32 = _data_type("Int32", "int32")
UInt32 = _data_type("UInt32", "uint32")
