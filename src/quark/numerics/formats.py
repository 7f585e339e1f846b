"""The table of number formats: one row is one format.

Nothing outside ``quark.numerics`` asks which format it holds; it asks a row for ``bits``, ``min``, ``max``, the name of
the ONNX or torch type that carries it, or hands it to ``quantize`` and ``fake_quantize``.
"""

from __future__ import annotations

from typing import TypeAlias

from quark.errors import ConfigError, unknown
from quark.numerics.elements import Int

Format: TypeAlias = Int

ROWS: tuple[Format, ...] = (
    #   name      bits signed  ONNX       torch     ml_dtypes
    Int("int2", 2, True, "INT2", None, "int2"),
    Int("int3", 3, True),
    Int("int4", 4, True, "INT4", None, "int4"),
    Int("int8", 8, True, "INT8", "int8", "int8"),
    Int("int16", 16, True, "INT16", "int16", "int16"),
    Int("int32", 32, True, "INT32", "int32", "int32"),
    Int("uint2", 2, False, "UINT2", None, "uint2"),
    Int("uint3", 3, False),
    Int("uint4", 4, False, "UINT4", None, "uint4"),
    Int("uint8", 8, False, "UINT8", "uint8", "uint8"),
    Int("uint16", 16, False, "UINT16", "uint16", "uint16"),
    Int("uint32", 32, False, "UINT32", "uint32", "uint32"),
)

FORMATS: dict[str, Format] = {row.name: row for row in ROWS}


def get_format(name: str | Format) -> Format:
    """The row named ``name`` (a row is returned as it is).

    Raises:
        ConfigError: no such row; the message gives the nearest name.
    """
    if not isinstance(name, str):
        return name
    if name not in FORMATS:
        raise ConfigError(unknown("data type", name, FORMATS))
    return FORMATS[name]
