"""Scale rules: which numbers a scale may be, and which of them a block's largest magnitude asks for.

``snap(scale)`` moves a positive scale to the nearest allowed one, never to zero. ``of(amax, largest, bits)`` is the
scale of a block whose largest magnitude is amax, for elements up to ``largest`` with ``bits`` mantissa bits:
snap(amax / largest), but for the three published ways to a shared exponent (emax = floor(log2 largest)):

    e8m0_floor   2**(floor(log2 amax) - emax)                       OCP Microscaling v1.0, section 6.3
    e8m0_even    the same after amax is rounded to ``bits`` mantissa bits, ties up
    e8m0_ceil    2**(ceil(log2 amax) - emax)

``power_of_two`` is 2**-pos, pos = round(-log2 scale) in -127..127; ``int16``: M / 2**N with M in 1..32767, N in 0..16.
``e4m3_of_row``: along the last axis FP8 E4M3 values under one factor, of which the largest is 56, each a bfloat16. That
is what kernels for int4 on FP8 make of scales (vLLM: convert_bf16_scales_to_fp8); scales of this rule they keep. They
round what a code makes of such a value to FP8 again (CUTLASS: packed_scale_t), and ``parts`` says with what.
Exponents come from the bits; a logarithm would round wrongly just below powers of two.
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor, log2

from quark.dataclass import dataclass
from quark.numerics.array import (
    INFINITY,
    Array,
    Same,
    as_array,
    as_parameter,
    block_max,
    cast,
    clip,
    float32,
    from_bits,
    namespace,
    pow2,
    to_bits,
)
from quark.numerics.chunks import quiet
from quark.numerics.elements import ELEMENTS, Element
from quark.numerics.rounding import half_even

SQRT2_FRACTION = 0x3504F4  # the first float32 fraction field above sqrt(2): 0xB504F3 squared is below 2**47


@dataclass(frozen=True)
class ScaleRule:
    """A set of allowed scales.

    Attributes:
        name: its name in ``SCALE_RULES``.
        nearest: positive float32 vector -> the allowed values next to it, float32.
        storage: the format that stores such a scale in fewer bits than float32, or None.
        bump: for a shared exponent: (bits of amax, mantissa bits of the elements) -> the bits whose exponent is taken;
            None for all other rules.
        parts: scales [.., n] -> (FP8 values [.., n], factor [.., 1]) whose product they are; codes times such a value
            are rounded to FP8. None: codes times scales are what is computed with. ``nearest`` takes such scales in any
            shape, for those along the last axis depend on each other.
    """

    name: str
    nearest: Callable[[Array], Same]
    storage: Element | None = None
    bump: Callable[[Array, int], Same] | None = None
    parts: Callable[[Array], tuple[Array, Array]] | None = None

    def snap(self, scale: Array) -> Same:
        """The allowed scales nearest to ``scale`` (positive, any shape; NumPy, torch or a number), as float32."""
        scale = float32(as_array(scale))
        if self.nearest is itself:
            return scale
        if self.parts is not None and len(scale.shape):
            return self.nearest(scale)
        return self.nearest(scale.reshape(-1)).reshape(scale.shape)

    def of(self, amax: Array, largest: Same, bits: int) -> Same:
        """Scales of blocks with largest magnitudes ``amax`` (float32, finite, >= 0, any shape), as float32."""
        if self.bump is None:
            return self.snap(amax / as_parameter(largest, amax))
        return shared_exponent(self.bump(to_bits(amax), bits), floor(log2(largest)))


def itself(scale: Array) -> Same:
    """Every float32 is allowed."""
    return scale


def shared_exponent(bits: Array, emax: int) -> Same:
    """2**(exponent of the float32 ``bits`` - emax), clamped to what E8M0 holds, 2**-127..2**127."""
    exponents = (bits & INFINITY) - (emax << 23)
    return from_bits(namespace(bits).clip(exponents, 0x400000, 254 << 23))  # 2**-127 is subnormal: 0x400000


def even_bump(bits: Array, mantissa_bits: int) -> Same:
    """``bits`` after a rounding to ``mantissa_bits`` has carried into their exponent, ties up."""
    return bits + ((1 << 22) >> mantissa_bits)  # float32 has 23: more round nothing


def ceil_bump(bits: Array, mantissa_bits: int) -> Same:
    """``bits`` after anything above a power of two has carried into their exponent."""
    return bits + 0x3FFFFF + cast(bits >= 0x800000, "int32") * 0x400000


def position(scale: Array) -> Same:
    """round(-log2(scale)), limited to -127..127: the ``pos`` of scale = 2**-pos. ``scale`` float32 vector; int32."""
    bits = to_bits(scale)
    exponent = (bits >> 23) - 127 + cast((bits & 0x7FFFFF) >= SQRT2_FRACTION, "int32")
    tiny = 127 - cast(bits >= 0x5A827A, "int32")  # subnormal: 127 below 2**-126.5, else 126
    xp = namespace(scale)
    return xp.where(bits >> 23 == 0, tiny, clip(-exponent, -127, 127))


def int16_fraction(scale: Array) -> Same:
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


def of_format(name: str) -> Callable[[Array], Same]:
    """The nearest positive value of the element format ``name``: at least its smallest, at most its largest."""
    element = ELEMENTS[name]
    codes = as_parameter([1 if name != "e8m0" else 0], None)
    smallest = float(element.decode(codes)[0])

    def nearest(scale: Array) -> Same:
        with quiet():
            return element.snap(namespace(scale).clip(scale, smallest, element.max), 0, half_even)

    return nearest


def parts_of_row(scale: Array) -> tuple[Same, Same]:
    """FP8 values and a factor of each row of ``scale``, whose largest becomes 56 times that factor.

    The factor has four significant bits, so that a product is a bfloat16. Kernels bound it from below.
    """
    xp, largest = namespace(scale), block_max(scale, -1)
    bits = to_bits(largest / ROW_TOP) + (1 << 19)
    rounded = from_bits(bits - bits % (1 << 20))
    factor = xp.clip(rounded, SMALLEST_FACTOR, None)
    inside = E4M3(xp.clip(scale / factor, None, ROW_TOP))
    return xp.where((scale == largest) & (rounded == factor), ROW_TOP, inside), factor


def of_row(scale: Array) -> Same:
    """The products of ``parts_of_row``; under a factor at its bound the nearest bfloat16 (0.4 % off at most)."""
    if not scale.shape[-1]:
        return scale
    inside, factor = parts_of_row(scale)
    return BFLOAT16(inside * factor)


ROW_TOP = 56.0  # an eighth of the largest FP8 value: eight times a scale, the farthest code of int4, is one too
SMALLEST_FACTOR = 8 / (448 * 512)
E4M3, BFLOAT16 = of_format("fp8_e4m3"), of_format("bfloat16")
E8M0, FP8 = ELEMENTS["e8m0"], ELEMENTS["fp8_e4m3"]  # the second: what kernels round products to
ROWS: tuple[ScaleRule, ...] = (
    ScaleRule("float32", itself),
    ScaleRule("float16", of_format("float16"), ELEMENTS["float16"]),
    ScaleRule("bfloat16", BFLOAT16, ELEMENTS["bfloat16"]),
    ScaleRule("power_of_two", lambda scale: pow2(-position(scale)), E8M0),
    ScaleRule("int16", int16_fraction),
    ScaleRule("e8m0", of_format("e8m0"), E8M0),
    ScaleRule("e8m0_floor", lambda scale: shared_exponent(to_bits(scale), 0), E8M0, lambda bits, mantissa_bits: bits),
    ScaleRule("e8m0_even", of_format("e8m0"), E8M0, even_bump),
    ScaleRule("e8m0_ceil", lambda scale: shared_exponent(ceil_bump(to_bits(scale), 0), 0), E8M0, ceil_bump),
    ScaleRule("e4m3", E4M3, FP8),
    ScaleRule("e4m3_of_row", of_row, parts=parts_of_row),
    ScaleRule("e5m3", of_format("e5m3"), ELEMENTS["e5m3"]),
)

SCALE_RULES: dict[str, ScaleRule] = {rule.name: rule for rule in ROWS}
