"""``MXQuantizeDequantize`` (com.amd.quark, version 1): the OCP Microscaling formats v1.0.

    scale = 2**(floor(log2 amax) - emax) per block, within 2**-127..;  y = element(x / scale) * scale

``element`` rounds small floats half to even with subnormals, saturating (``rounding_mode`` is ignored); ``int8`` rounds
x / scale * 64 by ``rounding_mode`` to -128..127. Infinities and NaN do not count for amax and are copied.

The peer's kernel lets the scale of a block of subnormal numbers fall below 2**-127, which E8M0 cannot hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, log2
from typing import cast

from quark.numerics.elements import ELEMENTS, Float
from quark.operators.arithmetic import round_float, round_integer
from quark.operators.blockwise import copy_nonfinite, shared_power, spread
from quark.operators.body import Body
from quark.operators.views import NodeFacts, View, from_blocks, from_float, to_blocks, to_float, view_of

ELEMENT_TYPES = ("fp8_e5m2", "fp8_e4m3", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8")
ATTRIBUTES: dict[str, int | str] = {"element_dtype": "int8", "axis": 1, "block_size": 32, "rounding_mode": 0}
_INT8_UNIT = -6


def variant(attributes: Mapping, facts: NodeFacts) -> str:
    """The overload of a node at ``facts``."""
    return view_of(facts, attributes["axis"], attributes["block_size"]).label


def write(body: Body, attributes: Mapping, label: str) -> str:
    """The body of ``MXQuantizeDequantize`` on the input ``x``."""
    view, size = View.parse(label), attributes["block_size"]
    x = to_float(body, "x", view.elem_type)
    if view.kind == "one":
        return from_float(body, body.op("Identity", x), view.elem_type)

    def quantize(inner: Body, blocks: str, peaks: str) -> str:
        if attributes["element_dtype"] == "int8":
            return _int8(inner, blocks, peaks, view, attributes)
        element = cast(Float, ELEMENTS[attributes["element_dtype"]])
        scale = spread(inner, shared_power(inner, peaks, -floor(log2(element.max))), view, size)
        return inner.op("Mul", round_float(inner, inner.op("Div", blocks, scale), element), scale)

    blocks = copy_nonfinite(body, to_blocks(body, x, view, size), view, quantize)
    return from_float(body, from_blocks(body, blocks, x, view, size), view.elem_type)


def _int8(body: Body, blocks: str, peaks: str, view: View, attributes: Mapping) -> str:
    step = spread(body, shared_power(body, peaks, unit=_INT8_UNIT), view, attributes["block_size"])
    codes = body.op("Clip", body.op("Div", blocks, step), -128.0, 127.0)
    return body.op("Mul", round_integer(body, codes, attributes["rounding_mode"]), step)
