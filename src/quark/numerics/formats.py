"""The table of number formats: one row is one format.

Elements are the rows of ``quark.numerics.elements``, formats with a shared scale those of ``quark.numerics.blocks``.
Nothing outside ``quark.numerics`` asks which format it holds; it asks a row for ``bits``, ``min``, ``max``, the name of
the ONNX or torch type that carries it, or hands it to ``quantize`` and ``fake_quantize``.
"""

from __future__ import annotations

from typing import TypeAlias

from quark.errors import ConfigError, unknown
from quark.numerics.blocks import BLOCKS, Block
from quark.numerics.elements import ELEMENTS, Element, Float, Int, Power

Format: TypeAlias = Element | Block

FORMATS: dict[str, Format] = {**ELEMENTS, **BLOCKS}

__all__ = ["FORMATS", "Block", "Float", "Format", "Int", "Power", "get_format"]


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
