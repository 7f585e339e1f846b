"""``BlockQuantizeDequantize`` (org.openquark, version 1): the block formats that com.amd.quark has no operator for.

    step = scale(amax) * unit [* tensor_scale];   y = element(x / step) * step

``format`` is a one-level row of ``quark.numerics.blocks``: NVFP4 and AMD FP4 (scales in E4M3 and E5M3: the format's
value nearest to amax / largest), the MX formats with their scale rules floor, even and ceil, BFP16. Elements are
rounded half to even. ``block_size`` is there where blocks have another length than the format's row. ``tensor_scale``
(float32 scalar) is an input of NVFP4 only. Infinities and NaN do not count for amax and are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import floor, log2
from typing import cast

from quark.numerics.blocks import BLOCKS, Block
from quark.numerics.elements import ELEMENTS, Float, Int
from quark.numerics.scales import SCALE_RULES
from quark.operators.arithmetic import HALF_EVEN, floor_power, round_float, round_integer
from quark.operators.blockwise import SMALLEST_EXPONENT, block_of, copy_nonfinite, spread
from quark.operators.body import Body
from quark.operators.views import NodeFacts, View, from_blocks, from_float, to_blocks, to_float, view_of

ATTRIBUTES: dict[str, int | str] = {"format": "nvfp4", "axis": -1}


def formats() -> tuple[str, ...]:
    """Names of the formats it has: those of one level."""
    return tuple(name for name, row in BLOCKS.items() if not row.sub_block and not row.carry)


def variant(attributes: Mapping, facts: NodeFacts) -> str:
    """The overload of a node at ``facts``."""
    view = view_of(facts, attributes["axis"], block_of(attributes).size)
    return (View("ragged", 0, view.elem_type, facts.finite) if view.kind == "one" else view).label  # a scalar has no -1


def write(body: Body, attributes: Mapping, label: str) -> str:
    """The body of ``BlockQuantizeDequantize`` on ``x`` and, for NVFP4, ``tensor_scale``."""
    view, block = View.parse(label), block_of(attributes)
    x = to_float(body, "x", view.elem_type)

    def quantize(inner: Body, blocks: str, peaks: str) -> str:
        step = spread(inner, _step(inner, peaks, block), view, block.size)
        return inner.op("Mul", _rounded(inner, inner.op("Div", blocks, step), block), step)

    blocks = copy_nonfinite(body, to_blocks(body, x, view, block.size), view, quantize)
    return from_float(body, from_blocks(body, blocks, x, view, block.size), view.elem_type)


def _rounded(body: Body, values: str, block: Block) -> str:
    if isinstance(block.element, Int):
        codes = body.op("Clip", values, float(block.element.min + block.narrow), float(block.element.max))
        return round_integer(body, codes, HALF_EVEN)
    return round_float(body, values, cast(Float, block.element))


def _step(body: Body, peaks: str, block: Block) -> str:
    if block.rule in SHARED_EXPONENTS:
        emax = floor(log2(block.element.max * block.unit))
        power = SHARED_EXPONENTS[block.rule](body, peaks, block)
        scale = body.op("Clip", body.op("Mul", power, 2.0**-emax), 2.0**SMALLEST_EXPONENT, 2.0**127)
        return body.op("Mul", scale, block.unit)
    largest = float(block.element.max) * block.unit
    divisor = body.op("Mul", "tensor_scale", largest) if block.tensor_scale else body.constant(largest)
    storage = cast(Float, ELEMENTS[_storage_name(block)])
    smallest = 2.0 ** (storage.emin - storage.mantissa_bits)
    ratio = body.op("Clip", body.op("Div", peaks, divisor), smallest, float(storage.max))
    scale = round_float(body, ratio, storage)
    return body.op("Mul", scale, "tensor_scale") if block.tensor_scale else scale


def _storage_name(block: Block) -> str:
    storage = SCALE_RULES[block.rule].storage
    return storage.name if storage is not None else ""


def _floor(body: Body, peaks: str, block: Block) -> str:
    return floor_power(body, peaks)


def _even(body: Body, peaks: str, block: Block) -> str:
    """The exponent of the peak after it is rounded to the mantissa bits of an element, ties up."""
    power = floor_power(body, peaks)
    threshold = body.op("Mul", power, 2.0 - 2.0 ** -(block.element.rounding_bits + 1))
    reached = body.op("Less", peaks, threshold)
    return body.op("Where", reached, power, body.op("Add", power, power))


def _ceil(body: Body, peaks: str, block: Block) -> str:
    power = floor_power(body, peaks)
    above = body.op("Greater", peaks, power)
    return body.op("Where", above, body.op("Add", power, power), power)


SHARED_EXPONENTS: dict[str, Callable[[Body, str, Block], str]] = {
    "e8m0_floor": _floor,
    "e8m0_even": _even,
    "e8m0_ceil": _ceil,
}
