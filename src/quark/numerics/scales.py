"""Scale rules: which numbers a scale may be, and which of them a block's largest magnitude asks for.

``snap(scale)`` moves a positive scale to the nearest allowed one, never to zero. ``of(amax, largest, bits)`` is the
scale of a block whose largest magnitude is amax, for elements up to ``largest`` with ``bits`` mantissa bits:
snap(amax / largest), but for the three published ways to a shared exponent (emax = floor(log2 largest)):

    e8m0_floor   2**(floor(log2 amax) - emax)                       OCP Microscaling v1.0, section 6.3
    e8m0_even    the same after amax is rounded to ``bits`` mantissa bits, ties up
    e8m0_ceil    2**(ceil(log2 amax) - emax)

``power_of_two`` is 2**-pos, pos = round(-log2 scale) in -127..127; ``int16``: M / 2**N with M in 1..32767, N in 0..16.
Exponents come from the bits; a logarithm would round wrongly just below powers of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import floor, log2

from quark.numerics.array import (
    Array,
    as_array,
    as_parameter,
    cast,
    float32,
    namespace,
    pow2,
    to_bits,
)
from quark.numerics.elements import ELEMENTS, Element

SQRT2_FRACTION = 0x3504F4  # the first float32 fraction field above sqrt(2): 0xB504F3 squared is below 2**47


@dataclass(frozen=True)
class ScaleRule:
    """A set of allowed scales.

    Attributes:
        name: its name in ``SCALE_RULES``.
        nearest: positive float32 vector -> the allowed values next to it, float32.
        storage: the format that stores such a scale in fewer bits than float32, or None.
        bump: for a shared exponent: what is added to the bits of amax before its exponent is read, given the mantissa
            bits of the elements; None for all other rules.
    """

    name: str
    nearest: Callable[[Array], Array]
    storage: Element | None = None
    bump: Callable[[int], int] | None = None

    def snap(self, scale: Array) -> Array:
        """The allowed scales nearest to ``scale`` (positive, any shape; NumPy, torch or a number), as float32."""
        scale = float32(as_array(scale))
        return self.nearest(scale.reshape(-1)).reshape(scale.shape)

    def of(self, amax: Array, largest: float, bits: int) -> Array:
        """Scales of blocks with largest magnitudes ``amax`` (float32, finite, >= 0, any shape), as float32."""
        if self.bump is None:
            return self.snap(amax / as_parameter(largest, amax))
        return shared_exponent(amax, self.bump(bits), floor(log2(largest)))


def shared_exponent(amax: Array, bump: int, emax: int) -> Array:
    """2**(exponent of amax after ``bump`` is added to its bits, less ``emax``), clamped to 2**-127..2**127."""
    xp = namespace(amax)
    tiny = cast(amax < 2.0**-126, "int32") * 24
    exponent = (to_bits(amax * pow2(tiny)) + bump >> 23) - 127 - tiny
    return pow2(xp.clip(exponent - emax, -127, 127))


def position(scale: Array) -> Array:
    """round(-log2(scale)), limited to -127..127: the ``pos`` of scale = 2**-pos. ``scale`` float32 vector; int32."""
    bits = to_bits(scale)
    exponent = (bits >> 23) - 127 + cast((bits & 0x7FFFFF) >= SQRT2_FRACTION, "int32")
    tiny = 127 - cast(bits >= 0x5A827A, "int32")  # subnormal: 127 below 2**-126.5, else 126
    xp = namespace(scale)
    return xp.where(bits >> 23 == 0, tiny, xp.clip(-exponent, -127, 127))


def int16_fraction(scale: Array) -> Array:
    """The M / 2**N nearest to ``scale``; of equally near ones the smaller N, then the smaller M."""
    xp = namespace(scale)
    exact = cast(scale, "float64")
    best = xp.zeros_like(exact)
    for n in range(17):
        scaled = exact * 2.0**n
        for whole in (xp.floor(scaled), xp.ceil(scaled)):
            candidate = xp.clip(whole, 1, 32767) / 2.0**n
            nearer = (xp.abs(candidate - exact) < xp.abs(best - exact)) | (best == 0)
            best = xp.where(nearer, candidate, best)
    return float32(best)


def of_format(name: str) -> Callable[[Array], Array]:
    """The nearest positive value of the element format ``name``: at least its smallest, at most its largest."""
    element = ELEMENTS[name]
    codes = as_parameter([1 if name != "e8m0" else 0], None)
    smallest = float(element.decode(codes, 0)[0])

    def nearest(scale: Array) -> Array:
        bounded = namespace(scale).clip(scale, smallest, element.max)
        return float32(element.round(bounded))

    return nearest


def floor_power(scale: Array) -> Array:
    """The largest power of two at or below ``scale``."""
    return shared_exponent(scale, 0, 0)


def ceil_power(scale: Array) -> Array:
    """The smallest power of two at or above ``scale``."""
    return shared_exponent(scale, 0x7FFFFF, 0)


E8M0 = ELEMENTS["e8m0"]
ROWS: tuple[ScaleRule, ...] = (
    ScaleRule("float32", lambda scale: scale),
    ScaleRule("float16", of_format("float16"), ELEMENTS["float16"]),
    ScaleRule("bfloat16", of_format("bfloat16"), ELEMENTS["bfloat16"]),
    ScaleRule("power_of_two", lambda scale: pow2(-position(scale)), E8M0),
    ScaleRule("int16", int16_fraction),
    ScaleRule("e8m0", of_format("e8m0"), E8M0),
    ScaleRule("e8m0_floor", floor_power, E8M0, lambda bits: 0),
    ScaleRule("e8m0_even", of_format("e8m0"), E8M0, lambda bits: 1 << 22 - bits),
    ScaleRule("e8m0_ceil", ceil_power, E8M0, lambda bits: 0x7FFFFF),
    ScaleRule("e4m3", of_format("fp8_e4m3"), ELEMENTS["fp8_e4m3"]),
    ScaleRule("e5m3", of_format("e5m3"), ELEMENTS["e5m3"]),
)

SCALE_RULES: dict[str, ScaleRule] = {rule.name: rule for rule in ROWS}
