"""Exact pieces of arithmetic in standard operators: exponents without a logarithm, rounding, small floats.

``floor_power(a) = 2**floor(log2 a)``: with q = (2**52 + 1) a in float64, q - (q - 2**-53 q) is one unit in the last
place of q, which is that power (the "ufp" of Rump, Ogita, Oishi: Accurate Floating-Point Summation I, 2008, alg. 3.5).
Every float32, subnormal or large, is an ordinary float64 there, so it is exact for all of them; 0 gives 0.

``round_float`` computes r = (y + M) - M with M = max((2**t - 1) |y|, 1.5 * 2**(t + emin)), t = 23 - m: the unit in
the last place of y + M is the step of the small float at y, so the float32 adder rounds y to it, half to even
(Veltkamp's splitting, with the factor 2**t - 1 so that neither sign of y carries y + M into another binade; checked for
every mantissa).

Both take operations that every runtime vectorizes; Cast to FLOAT8E8M0 and back (round_mode "down", opset 25) gives the
same power, ten times slower on ONNX Runtime 1.31.
"""

from __future__ import annotations

import numpy as np

from quark.errors import ConfigError, unknown
from quark.numerics.elements import Float
from quark.operators.body import Body

BELOW_HALF = float(np.nextafter(np.float32(0.5), np.float32(0)))
#: ``rounding_mode`` of the block operators.
HALF_AWAY, HALF_UP, HALF_EVEN = 0, 1, 2


def floor_power(body: Body, magnitude: str, exponent: int = 0) -> str:
    """2**(floor(log2 magnitude) + exponent) of float32 values >= 0; 0 for 0, NaN for infinity and NaN."""
    wide = body.cast(magnitude, "DOUBLE")
    scaled = body.op("Mul", wide, np.float64((2.0**52 + 1) * 2.0**exponent))
    below = body.op("Sub", scaled, body.op("Mul", scaled, np.float64(2.0**-53)))
    return body.cast(body.op("Sub", scaled, below), "FLOAT")


def round_integer(body: Body, values: str, mode: int) -> str:
    """float32 ``values`` of magnitude below 2**22 rounded to integers.

    The textbook floor(y + 0.5) is wrong for the float32 just below 0.5, because the sum itself rounds to 1. So half up
    adds that neighbour of 0.5 to what is not negative, and half away adds y itself, up to 0.5, and drops the fraction.

    Args:
        body: where to write.
        values: name of the float32 values.
        mode: 0 half away from zero, 1 half towards +infinity, 2 half to even.
    """
    if mode == HALF_EVEN:
        return body.op("Round", values)
    if mode == HALF_AWAY:
        pushed = body.op("Add", values, body.op("Clip", values, -0.5, 0.5))
        return body.cast(body.cast(pushed, "INT32"), "FLOAT")
    if mode == HALF_UP:
        push = body.op("Clip", body.op("Neg", values), BELOW_HALF, 0.5)
        return body.op("Floor", body.op("Add", values, push))
    raise ConfigError(unknown("rounding_mode", mode, ("0", "1", "2")))


def round_float(body: Body, values: str, element: Float) -> str:
    """float32 ``values`` rounded to a small float: half to even, gradual underflow, saturating; never -0."""
    spread = 23 - element.mantissa_bits
    values = body.op("Clip", values, float(element.min), float(element.max))
    scaled = body.op("Mul", body.op("Abs", values), 2.0**spread - 1)
    magic = at_least(body, scaled, 1.5 * 2.0 ** (spread + element.emin))
    return body.op("Sub", body.op("Add", values, magic), magic)


def at_least(body: Body, values: str, low: float) -> str:
    """max(values, low); ONNX Runtime has a faster kernel for Clip than for Max with a scalar."""
    return body.op("Clip", values, low)
