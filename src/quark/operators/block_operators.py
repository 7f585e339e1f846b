"""Which operator quantizes and dequantizes the blocks of a format, and with which attributes: read off its row.

    two levels                                   com.amd.quark BFPQuantizeDequantize, to_bfp_prime
    narrow integers under a shared exponent      com.amd.quark BFPQuantizeDequantize, to_bfp
    OCP elements under a shared exponent         com.amd.quark MXQuantizeDequantize
    everything else                              org.openquark BlockQuantizeDequantize

Blocks of another length than the row's keep the operator of the row and say their length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from quark.dataclass import dataclass
from quark.numerics.blocks import Block, named
from quark.numerics.elements import Int
from quark.operators import mx
from quark.operators.blockwise import format_attributes

SHARED_EXPONENT = "e8m0_floor"
EXPONENT_BITS = 8
AMD, OWN = "com.amd.quark", "org.openquark"
#: Rounding of a spec -> the attribute rounding_mode.
ROUNDING_MODES = {"half_away": 0, "half_up": 1, "half_even": 2}


@dataclass(frozen=True)
class BlockOperator:
    """The operator that quantizes and dequantizes blocks of one format."""

    domain: str
    name: str
    attributes: Mapping[str, int | str] = field(default_factory=dict)
    rounds: bool = False


def operator_of(block: Block) -> BlockOperator:
    """The operator of a block format, with the length of its blocks.

    Raises:
        ConfigError: no operator has such block scales.
    """
    row = named(block)
    element, plain = row.element, row.rule == SHARED_EXPONENT and not (row.carry or row.tensor_scale)
    whole = isinstance(element, Int) and element.signed and row.unit == 2.0 ** (2 - element.bits)
    if plain and whole and row.narrow:
        method = "to_bfp_prime" if row.sub_block else "to_bfp"
        width = element.bits + EXPONENT_BITS
        return BlockOperator(
            AMD,
            "BFPQuantizeDequantize",
            {"bfp_method": method, "bit_width": width, "block_size": block.size},
            rounds=True,
        )
    unit = 2.0 ** (2 - element.bits) if isinstance(element, Int) else 1.0
    if plain and element.name in mx.ELEMENT_TYPES and not row.narrow and row.unit == unit:
        kept: dict[str, int | str] = {"element_dtype": element.name, "block_size": block.size}
        return BlockOperator(AMD, "MXQuantizeDequantize", kept, rounds=True)
    return BlockOperator(OWN, "BlockQuantizeDequantize", format_attributes(block))
