"""What the block operators share: block maxima, infinities and NaN set aside, parameters spread over their blocks.

Blocks are [M, size, inner..] (see ``site``), or [M, sub-blocks, size, inner..] for two levels; maxima and parameters
keep their axes with length 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quark.operators.arithmetic import floor_power
from quark.operators.body import Body
from quark.operators.site import View

SMALLEST_EXPONENT = -127
#: Blocks along the last axis up to this length: a product with a row of ones beats broadcasting, which ONNX Runtime
#: does one block at a time (measured at 8: 0.5 against 1.1 ms per 0.8 M elements; equal at 32).
_SHORT = 16


def total(body: Body, magnitude: str) -> str:
    """The sum of all magnitudes, a scalar: finite exactly when none is NaN or infinite (or it overflows)."""
    sums = body.reduce("ReduceSum", magnitude, 1)
    return body.op("ReduceSum", sums, attributes={"keepdims": 0})


def is_finite(body: Body, magnitude: str) -> str:
    """Whether ``magnitude`` (>= 0) is neither infinite nor NaN."""
    return body.op("Less", magnitude, float("inf"))


def copy_nonfinite(body: Body, blocks: str, quantize: Callable[[Body, str, str], str]) -> str:
    """``quantize(body, blocks, peaks)``, where infinities and NaN do not count for the peaks and are copied.

    The masks cost more than the quantization, so they stand in a branch of their own that runs only where the sum of
    the magnitudes is not finite. The peaks cannot tell: ``ReduceMax`` of ONNX Runtime loses values beside a NaN.
    """
    magnitude = body.op("Abs", blocks)

    def ordinary(inner: Body) -> str:
        return quantize(inner, blocks, inner.reduce("ReduceMax", magnitude, 1))

    def masked(inner: Body) -> str:
        finite = is_finite(inner, magnitude)
        peaks = inner.reduce("ReduceMax", inner.op("Where", finite, magnitude, 0.0), 1)
        return inner.op("Where", finite, quantize(inner, inner.op("Where", finite, blocks, 0.0), peaks), blocks)

    return body.branch(is_finite(body, total(body, magnitude)), ordinary, masked)


def shared_power(body: Body, peaks: str, exponent: int = 0) -> str:
    """2**(floor(log2 peak) + exponent), at least 2**-127."""
    power = floor_power(body, peaks)
    if exponent:
        power = body.op("Mul", power, 2.0**exponent)
    return body.op("Max", power, 2.0**SMALLEST_EXPONENT)


def spread(body: Body, parameter: str, view: View, size: int) -> str:
    """``parameter`` as something that broadcasts quickly over blocks of ``size`` elements."""
    if view.axis != -1 or size > _SHORT:
        return parameter
    return body.op("MatMul", parameter, np.ones((1, size), np.float32))
