"""The table of number formats: one row is one format.

Elements are the rows of ``quark.numerics.elements``, formats with a shared scale those of ``quark.numerics.blocks``.
Types of GGML (``quark.numerics.ggml``) have names beside them and are no rows: ONNX files cannot carry them.
Nothing outside ``quark.numerics`` asks which format it holds; it asks a row for ``bits``, ``min``, ``max``, the name of
the ONNX or torch type that carries it, or hands it to ``quantize`` and ``fake_quantize``. So ``register_format`` is all
that a further format needs: both flows, their files and their exports go by the row.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from quark.errors import ConfigError, unknown
from quark.numerics.blocks import BLOCK_RULES, BLOCKS, Block
from quark.numerics.elements import ELEMENTS, Element, Float, Int, Power
from quark.numerics.ggml import GGML

Format: TypeAlias = Element | Block

FORMATS: dict[str, Format] = {**ELEMENTS, **BLOCKS}
BUILT_IN = frozenset(FORMATS)
#: Names, without underscores, that a dialect gives to something else.
RESERVED = {"float": "float", "fp4": "fp4_e2m1", "fp8e5m3": "e5m3", "mxfp4e2m1": "mxfp4", "mx": "the family mx"}
#: Widest code of a registered element: wider ones have no stored form in ONNX.
WIDEST = 8

__all__ = ["FORMATS", "Block", "Float", "Format", "Int", "Power", "get_format", "register_format", "unregister_format"]


def get_format(name: str | Format) -> Format:
    """The row named ``name`` (a row is returned as it is).

    Raises:
        ConfigError: no such row; the message gives the nearest name.
    """
    if not isinstance(name, str):
        return name
    if name not in FORMATS and name not in GGML:
        raise ConfigError(unknown("data type", name, FORMATS))
    return FORMATS.get(name) or GGML[name]


def register_format(row: Int | Float | Block) -> None:
    """Add a number format to both flows under ``row.name``.

    From the row come the data type and spec classes of ``quark.onnx``, the member of ``quark.torch``'s ``Dtype`` and
    its schemes, how codes are stored and packed, and the operators that carry it in ONNX files.

    Args:
        row: an ``Int`` or ``Float`` of at most 8 bits, or a one-level ``Block`` of a format that is there already.

    Raises:
        ConfigError: a name that is taken or no identifier, or a row that is not a format: its largest value is none of
            its values, a code does not come back, a type of ONNX or torch is claimed.
    """
    if not isinstance(row, Int | Float | Block):
        raise ConfigError(f"a format is an Int, a Float or a Block of quark.numerics.formats, not {row!r:.80}")
    if not (isinstance(row.name, str) and row.name.isidentifier() and row.name == row.name.lower()):
        raise ConfigError(f"the name of a format must be an identifier in lower case, not {row.name!r}")
    squeezed = (
        RESERVED | {name.replace("_", ""): name for name in GGML} | {name.replace("_", ""): name for name in FORMATS}
    )  # the names of classes have no underscores
    taken = squeezed.get(row.name.replace("_", ""))
    if taken is not None:
        raise ConfigError(f"the format {row.name!r} cannot be told from {taken!r}, which is there: choose another name")
    if isinstance(row, Block):
        _check_block(row)
        BLOCKS[row.name] = row
    else:
        _check_element(row)
        ELEMENTS[row.name] = row
    FORMATS[row.name] = row


def unregister_format(name: str) -> None:
    """Forget a registered format.

    Args:
        name: under which it was added.

    Raises:
        ConfigError: a format that is built in, not there, or the element of a registered block format.
    """
    if name in BUILT_IN or name not in FORMATS:
        registered = sorted(set(FORMATS) - BUILT_IN)
        kind = "built in and stays" if name in BUILT_IN else "not registered"
        raise ConfigError(f"the format {name!r} is {kind}; registered: {', '.join(registered) or 'none'}")
    readers = [row.name for row in BLOCKS.values() if row.element == FORMATS[name]]
    if readers:
        raise ConfigError(f"the format {name!r} is the element of {', '.join(readers)}: unregister that first")
    for table in (FORMATS, ELEMENTS, BLOCKS):
        table.pop(name, None)


def _check_element(row: Int | Float) -> None:
    """Every code of a new element decodes to a value that rounds to itself and encodes to the code."""
    if not 2 <= row.bits <= WIDEST:
        raise ConfigError(f"the format {row.name!r} has {row.bits} bits; a registered format has 2 to {WIDEST}")
    claimed = [field for field in ("onnx_type", "torch_dtype") if getattr(row, field) is not None]
    if claimed:
        raise ConfigError(f"the format {row.name!r}: leave out {', '.join(claimed)}; its codes are stored as bytes")
    if isinstance(row, Int):
        return
    if row.exponent_bits < 2 or row.mantissa_bits < 0 or row.unit_scale or not (row.saturates and row.signed):
        raise ConfigError(
            f"the format {row.name!r} must have a sign and two exponent bits or more, saturate, and have a scale "
            "(unit_scale=False)"
        )
    if row.has_infinity and not row.mantissa_bits:
        raise ConfigError(f"the format {row.name!r}: has_infinity needs a mantissa bit, which tells infinity from NaN")
    codes = np.arange(1 << row.bits, dtype=np.uint8)
    values = row.decode(codes)
    kept = np.abs(values) <= row.max
    finite = values[kept]
    if float(np.max(finite, initial=0.0)) != row.max:
        raise ConfigError(f"the format {row.name!r}: max={row.max} is not the value of one of its codes")
    if not (np.array_equal(row.round(finite), finite) and np.array_equal(row.encode(finite), codes[kept])):
        raise ConfigError(f"the format {row.name!r}: its codes and values do not belong together")


def _check_block(row: Block) -> None:
    """A block of elements that are there, with a scale format that is there."""
    if FORMATS.get(row.element.name) not in (row.element, None) or isinstance(row.element, Power):
        raise ConfigError(f"the format {row.name!r}: its element {row.element.name!r} is not the format of that name")
    if row.rule not in BLOCK_RULES:
        raise ConfigError(f"the format {row.name!r}: {unknown('scale rule of blocks', row.rule, BLOCK_RULES)}")
    if not row.element.signed:
        raise ConfigError(
            f"the format {row.name!r}: its element {row.element.name!r} has no sign, and blocks no offset"
        )
    if row.element.bits > WIDEST or row.sub_block or row.carry or row.tensor_scale or row.size < 1:
        raise ConfigError(
            f"the format {row.name!r} must have elements of at most {WIDEST} bits, one level of scales and blocks of "
            "one element or more"
        )
