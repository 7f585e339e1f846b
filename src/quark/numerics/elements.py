"""Element formats as values that round, encode and decode: one row of ``ELEMENTS`` is one format.

``Int``    codes min..max; the value of a code is the code.
``Float``  sign, exponent, mantissa, gradual underflow: the grid around x has the step 2**(max(exponent, emin) - m).
``Power``  E8M0, the powers of two 2**-127..2**127, a scale format without sign and without zero.

``snap`` puts float32 values on the grid; ``encode`` and ``decode`` go between grid values and codes. Rounding half to
even adds and subtracts 2**(exponent + 23 - m) (1.5 times that), which leaves exactly m mantissa bits: the float32
adder does the rounding, ties and carries included. Other roundings divide by the step.

Sources: OCP 8-bit Floating Point v1.0 and OCP Microscaling v1.0 (8, 6 and 4 bits, E8M0), IEEE 754 (float16), the upper
half of float32 (bfloat16); E5M3 is unsigned with bias 15 and NaN at 0xFF. NaN stays NaN in ``snap``; ``quantize``
refuses it where the format has no code for it.
"""

from __future__ import annotations

from functools import cache
from math import inf, nan
from typing import TypeAlias

import numpy as np

from quark.dataclass import dataclass
from quark.numerics.array import (
    INFINITY,
    MAGNITUDE,
    SIGN,
    Array,
    Operand,
    Same,
    as_array,
    cast,
    clip,
    float32,
    from_bits,
    is_torch,
    maybe,
    namespace,
    pow2,
    reaches,
    shared,
    to_bits,
)
from quark.numerics.chunks import elementwise, like_input
from quark.numerics.rounding import Rounding, Rule, half_even, half_up

QUIET_NAN = 0x7FC00000
INTEGER_MAGIC = {"float32": 1.5 * 2.0**23, "float64": 1.5 * 2.0**52}  # added to a code, it leaves no fraction bits


def on_grid(self: Element, x: Array, rounding: Rounding = "half_even") -> Same:
    """``x`` (any shape, float32, float16, bfloat16 or float64) on the grid, in the type of ``x``; NaN stays NaN."""
    return like_input(elementwise(lambda part, rule: self.place(float32(part), 0, rule), x, rounding), x)


@dataclass(frozen=True)
class Int:
    """An integer format.

    Attributes:
        name: its name in ``FORMATS``.
        bits: width of a code.
        signed: two's complement, or unsigned.
        onnx_type: name of the ``TensorProto`` data type that stores it, or None.
        torch_dtype, ml_dtype: names of the types of torch and of ml_dtypes (or NumPy) that store it, or None.
    """

    name: str
    bits: int
    signed: bool = True
    onnx_type: str | None = None
    torch_dtype: str | None = None
    ml_dtype: str | None = None

    has_nan = False
    has_zero_point = True
    unit_scale = False

    @property
    def min(self) -> int:
        """The lowest code."""
        return -(1 << self.bits - 1) if self.signed else 0

    @property
    def max(self) -> int:
        """The highest code."""
        return (1 << self.bits - self.signed) - 1

    @property
    def middle(self) -> int:
        """The code of 0 under a symmetric grid: 0, or half the range of an unsigned format."""
        return 0 if self.signed else 1 << self.bits - 1

    @property
    def code_dtype(self) -> str:
        """The narrowest integer type of NumPy and torch that holds a code."""
        width = next(n for n in (8, 16, 32) if n >= self.bits)
        return f"int{width}" if self.signed else f"uint{width}"

    @property
    def work_dtype(self) -> str:
        """The float type that holds every code and every difference of codes exactly."""
        return "float64" if self.bits > 23 else "float32"

    @property
    def zero_dtype(self) -> str:
        """The type of zero points: int32, or int64 for a format whose codes int32 cannot hold."""
        return "int64" if self.max > MAGNITUDE else "int32"

    @property
    def rounding_bits(self) -> int:
        """Mantissa bits below the leading one of the largest value, as the ``even`` scale rule counts them."""
        return self.bits

    def divisor(self, symmetric: bool, narrow: bool) -> float:
        """What a range (symmetric: its half) is divided by to give the scale."""
        if not symmetric:
            return self.max - self.min
        return (1 << self.bits - 1) - 1 if narrow else (self.max - self.min) / 2

    round = on_grid

    def snap(self, x: Array, zero_point: Operand, rule: Rule, narrow: bool = False, room: Same | None = None) -> Same:
        """``clip(round(x) + zero_point) - zero_point`` in ``work_dtype``, never -0; ``x`` is float32 and is kept.

        ``room``: of the shape and type of the result, which may be written there; it may be ``x``, which is lost then.
        """
        x = cast(x, self.work_dtype)
        placed = clip(x, self.min + narrow - zero_point, self.max - zero_point, room)
        if rule is half_even:
            placed += INTEGER_MAGIC[self.work_dtype]
            placed -= INTEGER_MAGIC[self.work_dtype]
            return placed
        placed = rule(placed)
        placed += 0.0
        return placed

    def place(self, x: Array, zero_point: Operand, rule: Rule, narrow: bool = False, room: Same | None = None) -> Same:
        """``snap`` rounded to float32; ``room``: float32, of the shape of the result.

        Half to even needs no float64 for that: x is an integer from 2**23 on, and no float32 lies between a bound and
        the float32 next to it.
        """
        if self.work_dtype == "float32" or rule is not half_even:
            return float32(self.snap(x, zero_point, rule, narrow, room if self.work_dtype == "float32" else None))
        bounds = (float32(as_array(bound - zero_point)) for bound in (self.min + narrow, self.max))
        placed = half_even(clip(x, *bounds))
        placed += 0.0
        return placed

    def put(self, out: Same, x: Array, zero_point: Same, rule: Rule, narrow: bool = False) -> None:
        """The codes of float32 ``x`` (overwritten; no NaN) into ``out``.

        Once the magic number is added, the lowest bits of the float32 are the integer in two's complement.
        """
        if rule is not half_even or self.work_dtype != "float32" or is_torch(x):
            out[...] = self.encode(self.snap(x, zero_point, rule, narrow), zero_point)
            return
        placed = clip(x, self.min + narrow - zero_point, self.max - zero_point)
        placed += INTEGER_MAGIC["float32"]
        np.copyto(out, to_bits(placed), casting="unsafe")
        if zero_point.any():
            np.add(out, zero_point.astype(self.code_dtype), out=out)

    def encode(self, values: Same, zero_point: Operand = 0) -> Same:
        """Codes (``code_dtype``) of ``values`` that ``snap`` returned for the same zero point."""
        return cast(values + zero_point, self.code_dtype)

    def decode(self, codes: Array, zero_point: Operand = 0) -> Same:
        """``codes - zero_point`` in ``work_dtype``."""
        values = cast(codes, self.work_dtype)
        return values - zero_point


@dataclass(frozen=True)
class Float:
    """A small floating-point format.

    Attributes:
        name: its name in ``FORMATS``.
        exponent_bits, mantissa_bits: widths of the fields.
        max: the largest finite value.
        has_infinity, has_nan: whether codes for them exist.
        saturates: values beyond ``max`` (infinity too) become ``max``; otherwise infinity, or NaN without infinity.
        signed: whether there is a sign bit.
        unit_scale: a range does not change the scale: it is 1, because the format spans what data need.
        onnx_type, torch_dtype, ml_dtype: as in ``Int``.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    has_infinity: bool = False
    has_nan: bool = False
    saturates: bool = True
    signed: bool = True
    unit_scale: bool = False
    onnx_type: str | None = None
    torch_dtype: str | None = None
    ml_dtype: str | None = None

    middle = 0
    has_zero_point = False
    work_dtype = "float32"
    zero_dtype = "int32"

    @property
    def bits(self) -> int:
        """Width of a code."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def min(self) -> float:
        """The lowest finite value."""
        return -self.max if self.signed else 0.0

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field."""
        return (1 << self.exponent_bits - 1) - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value."""
        return 1 - self.bias

    @property
    def code_dtype(self) -> str:
        """uint8 or uint16."""
        return "uint8" if self.bits <= 8 else "uint16"

    @property
    def rounding_bits(self) -> int:
        """Mantissa bits, as the ``even`` scale rule counts them."""
        return self.mantissa_bits

    def divisor(self, symmetric: bool, narrow: bool) -> float:
        """What a range (symmetric: its half) is divided by to give the scale."""
        return self.max if symmetric else self.max - self.min

    round = on_grid

    def snap(
        self, x: Array, zero_point: Operand, rule: Rule, narrow: bool | None = None, room: Same | None = None
    ) -> Same:
        """float32 ``x`` (kept) on the grid; the sign of zero stays. All but ``rule`` means nothing here."""
        xp = namespace(x)
        wide = self.exponent_bits == 8  # the range of float32: nothing is beyond, and the adder would overflow
        if self.saturates or not wide:
            beyond = self.max if self.saturates else 4 * self.max
            x = xp.clip(x, -beyond if self.signed else 0.0, beyond)
        if not self.signed:
            x += 0.0
        if rule is not half_even:
            rounded = self.by_step(x, rule)
        else:
            rounded = self.upper_bits(x) if wide else self.by_adder(x)
        return rounded if self.saturates or wide else self.overflow(rounded)

    place = snap

    def by_adder(self, x: Array) -> Same:
        """Half to even: 1.5 * 2**(exponent + 23 - m) added and taken away again. ``x`` is overwritten."""
        bits = to_bits(x)
        magic = bits & INFINITY
        magic = namespace(x).clip(magic, self.emin + 127 << 23, INFINITY, out=magic)
        magic += (23 - self.mantissa_bits << 23) + (1 << 22)
        rounded = x + from_bits(magic)
        rounded -= from_bits(magic)
        bits &= SIGN
        signed = to_bits(rounded)
        signed |= bits
        return rounded

    def upper_bits(self, x: Array) -> Same:
        """Half to even in the bits, for the exponent range of float32, where ``by_adder`` would overflow."""
        drop = 23 - self.mantissa_bits
        bits = to_bits(x)
        rounded = bits >> drop
        rounded &= 1
        rounded += (1 << drop - 1) - 1
        rounded += bits
        rounded &= -(1 << drop)
        rounded = from_bits(rounded)
        return namespace(x).where(x == x, rounded, x) if maybe(x != x) else rounded

    def by_step(self, x: Array, rule: Rule) -> Same:
        """Any rounding: ``rule(x / step) * step`` with the sign of ``x``."""
        xp = namespace(x)
        exponent = (to_bits(x) & INFINITY) >> 23
        step = pow2(xp.clip(exponent - 127, self.emin, None) - self.mantissa_bits)
        rounded = rule(x / step)
        rounded *= step
        rounded = xp.where(xp.isinf(x), x, rounded)
        signed = to_bits(rounded)
        signed |= to_bits(x) & SIGN
        return rounded

    def overflow(self, x: Array) -> Same:
        """Infinity (NaN without infinity), with the sign of ``x``, in the place of values beyond ``max``."""
        xp = namespace(x)
        beyond = xp.abs(x) > self.max
        if not maybe(beyond):
            return x
        special = (to_bits(x) & SIGN) | (INFINITY if self.has_infinity else QUIET_NAN)
        return xp.where(beyond, from_bits(special), x)

    def put(self, out: Same, x: Array, zero_point: Same, rule: Rule, narrow: bool | None = None) -> None:
        """The codes of float32 ``x`` into ``out``."""
        out[...] = self.encode(self.snap(x, zero_point, rule, narrow))

    def encode(self, values: Array, zero_point: Operand | None = None) -> Same:
        """Codes (``code_dtype``) of float32 ``values`` on the grid; infinity and NaN where the format has them.

        The bits of a normal value are its code, but for the bias. A subnormal one becomes normal when 2**emin, the
        smallest normal value, is added; its exponent field is then one too high. Of the two, the larger is right.
        """
        xp = namespace(values)
        bits = to_bits(values)
        size = bits & MAGNITUDE
        code = size - (127 - self.bias << 23)
        if self.bias < 127:
            shifted = to_bits(from_bits(size) + 2.0**self.emin)
            shifted -= 128 - self.bias << 23
            xp.maximum(code, shifted, out=code)
        code >>= 23 - self.mantissa_bits
        if (self.has_infinity or self.has_nan) and reaches(size, INFINITY):
            code = xp.where(size < INFINITY, code, xp.where(size == INFINITY, self.infinity_code, self.nan_code))
        if self.signed:
            bits = bits >> 31
            bits &= 1 << self.bits - 1
            code |= bits
        return cast(code, self.code_dtype)

    @property
    def infinity_code(self) -> int:
        """The code of +infinity (NaN where there is none)."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits if self.has_infinity else self.nan_code

    @property
    def nan_code(self) -> int:
        """The code of a quiet NaN: all ones, or infinity with the top mantissa bit."""
        if self.has_infinity:
            return self.infinity_code | 1 << self.mantissa_bits - 1
        return (1 << self.exponent_bits + self.mantissa_bits) - 1

    def decode(self, codes: Array, zero_point: Operand | None = None) -> Same:
        """float32 values of ``codes``; those that are bytes in the memory of the CPU are looked up."""
        held = shared(codes)
        if isinstance(held, np.ndarray) and held.dtype == np.uint8:
            values = np.take(value_of_bytes(self), held, mode="clip", out=np.empty(held.shape, np.float32))
            return namespace(codes).from_numpy(values) if is_torch(codes) else values
        return self.computed(codes)

    def computed(self, codes: Array) -> Same:
        """``decode`` by arithmetic."""
        xp = namespace(codes)
        codes = cast(codes, "int32")
        size = codes & ((1 << self.exponent_bits + self.mantissa_bits) - 1)
        normal = from_bits((size << 23 - self.mantissa_bits) + (127 - self.bias << 23))
        subnormal = cast(size, "float32") * 2.0 ** (self.emin - self.mantissa_bits)
        value = xp.where(size < 1 << self.mantissa_bits, subnormal, normal)
        if self.has_infinity:
            value = xp.where(size == self.infinity_code, inf, xp.where(size > self.infinity_code, nan, value))
        elif self.has_nan:
            value = xp.where(size == self.nan_code, nan, value)
        value = cast(value, "float32")
        if self.signed:
            bits = to_bits(value)
            bits |= (codes >> self.bits - 1) << 31
        return value


@cache
def value_of_bytes(element: Float) -> np.ndarray:
    """float32 values of the bytes 0 to 255."""
    values: np.ndarray = element.computed(np.arange(256, dtype=np.uint8))
    return values


@dataclass(frozen=True)
class Power:
    """E8M0: the powers of two 2**-127..2**127 and NaN.

    Rounding works on the value, so the midpoint of 2**k and 2**(k+1) is 1.5 * 2**k; the nearest roundings take it up.
    Zero, negative numbers and infinity have no place: they become NaN.
    """

    name: str = "e8m0"
    onnx_type: str | None = "FLOAT8E8M0"
    torch_dtype: str | None = "float8_e8m0fnu"
    ml_dtype: str | None = "float8_e8m0fnu"

    bits = 8
    min, max = 2.0**-127, 2.0**127
    signed = False
    middle = 0
    has_zero_point = False
    has_nan = True
    unit_scale = False
    code_dtype, work_dtype, zero_dtype = "uint8", "float32", "int32"
    rounding_bits = 0

    def divisor(self, symmetric: bool, narrow: bool) -> float:
        """The largest value."""
        return self.max

    round = on_grid

    def snap(
        self, x: Array, zero_point: Operand, rule: Rule, narrow: bool | None = None, room: Same | None = None
    ) -> Same:
        """float32 ``x`` as powers of two; values at or beyond 1.5 * 2**127 become NaN under the nearest roundings."""
        xp = namespace(x)
        exponent = xp.clip(to_bits(x) >> 23, 0, 254) - 127
        below = pow2(exponent)
        up = (half_up if rule is half_even else rule)(xp.clip(x / below - 1, 0.0, 1.0))
        value = pow2(exponent + cast(up, "int32"))
        return cast(xp.where((x > 0) & (value < inf), value, nan), "float32")

    place = snap

    def put(self, out: Same, x: Array, zero_point: Same, rule: Rule, narrow: bool | None = None) -> None:
        """The codes of float32 ``x`` into ``out``."""
        out[...] = self.encode(self.snap(x, zero_point, rule, narrow))

    def encode(self, values: Array, zero_point: Operand | None = None) -> Same:
        """Biased exponents, 255 for NaN."""
        bits = to_bits(values)
        return cast((bits & INFINITY) >> 23, "uint8")

    def decode(self, codes: Array, zero_point: Operand | None = None) -> Same:
        """float32 values of ``codes``."""
        exponent = cast(codes, "int32") - 127
        return cast(namespace(exponent).where(exponent < 128, pow2(exponent), nan), "float32")


Element: TypeAlias = Int | Float | Power

ROWS: tuple[Element, ...] = (
    #   name      bits signed  ONNX      torch     ml_dtypes
    Int("int2", 2, True, "INT2", None, "int2"),
    Int("int3", 3, True),
    Int("int4", 4, True, "INT4", None, "int4"),
    Int("int8", 8, True, "INT8", "int8", "int8"),
    Int("int16", 16, True, "INT16", "int16", "int16"),
    Int("int32", 32, True, "INT32", "int32", "int32"),
    Int("uint2", 2, False, "UINT2", None, "uint2"),
    Int("uint3", 3, False),
    Int("uint4", 4, False, "UINT4", None, "uint4"),
    Int("uint8", 8, False, "UINT8", "uint8", "uint8"),
    Int("uint16", 16, False, "UINT16", "uint16", "uint16"),
    Int("uint32", 32, False, "UINT32", "uint32", "uint32"),
    #     name      e   m  max       inf    nan   saturates signed unit  ONNX       torch      ml_dtypes
    Float("float16", 5, 10, 65504.0, True, True, False, True, True, "FLOAT16", "float16", "float16"),
    Float("bfloat16", 8, 7, 255 * 2.0**120, True, True, False, True, True, "BFLOAT16", "bfloat16", "bfloat16"),
    Float("fp8_e5m2", 5, 2, 57344.0, True, True, True, True, False, "FLOAT8E5M2", "float8_e5m2", "float8_e5m2"),
    Float("fp8_e4m3", 4, 3, 448.0, False, True, True, True, False, "FLOAT8E4M3FN", "float8_e4m3fn", "float8_e4m3fn"),
    Float("fp6_e3m2", 3, 2, 28.0, ml_dtype="float6_e3m2fn"),
    Float("fp6_e2m3", 2, 3, 7.5, ml_dtype="float6_e2m3fn"),
    Float("fp4_e2m1", 2, 1, 6.0, onnx_type="FLOAT4E2M1", ml_dtype="float4_e2m1fn"),
    Float("e5m3", 5, 3, 114688.0, has_nan=True, signed=False),
    Power("e8m0"),
)

ELEMENTS: dict[str, Element] = {row.name: row for row in ROWS}
