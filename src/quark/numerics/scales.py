"""Scale rules: which numbers a scale may be.

``snap(scale)`` moves a positive float32 scale to the nearest allowed one, never to zero.

``float32``       every float32
``power_of_two``  2**-pos with pos = round(-log2(scale)) in -127..127. The rounding point is scale = 2**(k + 1/2);
                  2 * m**2 is compared with 2**48 for the 24-bit significand m, so no logarithm rounds the wrong way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quark.numerics.array import Array, as_array, cast, float32, from_bits, namespace, to_bits

SQRT2_FRACTION = 0x3504F4  # the first float32 fraction field above sqrt(2): 0x3504F3 squared is below 2**47


@dataclass(frozen=True)
class ScaleRule:
    """A set of allowed scales.

    Attributes:
        name: its name in ``SCALE_RULES``.
        nearest: positive float32 array -> nearest allowed values, float32.
    """

    name: str
    nearest: Callable[[Array], Array]

    def snap(self, scale: Array) -> Array:
        """The allowed scales nearest to ``scale`` (positive, any shape), as float32 of the same shape."""
        scale = float32(as_array(scale))
        return self.nearest(scale.reshape(-1)).reshape(scale.shape)


def pow2(exponent: Array) -> Array:
    """2.0**exponent as float32, exactly, for int32 exponents -149..127 (below: 0)."""
    xp = namespace(exponent)
    normal = (xp.clip(exponent, -126, 127) + 127) << 23
    subnormal = xp.ones_like(exponent) << xp.clip(exponent + 149, 0, 23)
    return from_bits(xp.where(exponent >= -126, normal, xp.where(exponent < -149, 0 * subnormal, subnormal)))


def position(scale: Array) -> Array:
    """round(-log2(scale)), exactly, limited to -127..127: the ``pos`` of scale = 2**-pos. int32."""
    xp = namespace(scale)
    bits = to_bits(scale)
    exponent = (bits >> 23) - 127 + cast((bits & 0x7FFFFF) >= SQRT2_FRACTION, "int32")
    return xp.where(exponent < -126, tiny_position(bits), xp.clip(-exponent, -127, 127))


def tiny_position(bits: Array) -> Array:
    """``position`` of subnormal scales: 127 below 2**-126.5, else 126."""
    return 127 - cast(bits >= 0x5A827A, "int32")


def power_of_two(scale: Array) -> Array:
    """The power of two nearest to ``scale`` on a logarithmic axis, in 2**-127..2**127."""
    return pow2(-position(scale))


SCALE_RULES: dict[str, ScaleRule] = {
    "float32": ScaleRule("float32", lambda scale: scale),
    "power_of_two": ScaleRule("power_of_two", power_of_two),
}
