"""What the block operators share: block maxima, infinities and NaN set aside, parameters spread over their blocks.

Blocks are [M, size, inner..] (see ``facts``), or [M, sub-blocks, size, inner..] for two levels; maxima and parameters
keep their axes with length 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from quark.numerics.blocks import BLOCKS, Block, named
from quark.operators.arithmetic import at_least, floor_power
from quark.operators.body import Body
from quark.operators.views import View

SMALLEST_EXPONENT = -127
#: Blocks along the last axis up to this length: a product with a row of ones beats broadcasting, which ONNX Runtime
#: does one block at a time (measured at 8: 0.5 against 1.1 ms per 0.8 M elements; equal at 32).
_SHORT = 16


def block_of(attributes: Mapping) -> Block:
    """The format that ``format`` and, where blocks have another length than its row, ``block_size`` name."""
    row = BLOCKS[attributes["format"]]
    return replace(row, size=attributes.get("block_size", row.size))


def format_attributes(block: Block) -> dict[str, int | str]:
    """What ``block_of`` reads, as short as it can be."""
    row = named(block)
    return {"format": row.name} if row.size == block.size else {"format": row.name, "block_size": block.size}


def all_finite(body: Body, blocks: str) -> str:
    """A scalar: no element is infinite or NaN (and their sum does not overflow)."""
    total = body.op("ReduceSum", body.reduce("ReduceSum", blocks, 1), attributes={"keepdims": 0})
    return is_finite(body, body.op("Abs", total))


def is_finite(body: Body, magnitude: str) -> str:
    """Whether ``magnitude`` (>= 0) is neither infinite nor NaN."""
    return body.op("Less", magnitude, float("inf"))


def largest(body: Body, blocks: str, axis: int) -> str:
    """max |x| along ``axis`` of finite values: two reductions that read are cheaper than an Abs that writes."""
    low = body.op("Neg", body.reduce("ReduceMin", blocks, axis))
    return body.op("Max", body.reduce("ReduceMax", blocks, axis), low)


def copy_nonfinite(body: Body, blocks: str, view: View, quantize: Callable[[Body, str, str], str]) -> str:
    """``quantize(body, blocks, peaks)``, where infinities and NaN do not count for the peaks and are copied.

    The masks cost more than the quantization, so they stand in a branch of their own that runs only where the sum of
    the elements is not finite. The peaks cannot tell: ``ReduceMax`` of ONNX Runtime loses values beside a NaN.
    """

    def ordinary(inner: Body) -> str:
        return quantize(inner, blocks, largest(inner, blocks, 1))

    def masked(inner: Body) -> str:
        finite = is_finite(inner, inner.op("Abs", blocks))
        values = inner.op("Where", finite, blocks, 0.0)
        return inner.op("Where", finite, quantize(inner, values, largest(inner, values, 1)), blocks)

    if view.finite:
        return ordinary(body)
    return body.branch(all_finite(body, blocks), ordinary, masked)


def shared_power(body: Body, peaks: str, exponent: int = 0, unit: int = 0) -> str:
    """max(2**(floor(log2 peak) + exponent), 2**-127) * 2**unit."""
    return at_least(body, floor_power(body, peaks, exponent + unit), 2.0 ** (SMALLEST_EXPONENT + unit))


def spread(body: Body, parameter: str, view: View, size: int) -> str:
    """``parameter`` as something that broadcasts quickly over blocks of ``size`` elements."""
    if view.axis != -1 or size > _SHORT:
        return parameter
    return body.op("MatMul", parameter, np.ones((1, size), np.float32))
