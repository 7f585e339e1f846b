"""Integer and floating-point element formats, as values that round, encode and decode.

``Int``    codes min..max; a value is a code.
``Float``  sign, exponent (bias 2**(e-1) - 1), mantissa; gradual underflow; rounding happens on the grid of step
           2**(max(exponent, emin) - m) around each value.

Sources: OCP 8-bit floating point v1.0 and OCP Microscaling (MX) v1.0 for the 8-, 6- and 4-bit types, IEEE 754 for
float16, the upper half of float32 for bfloat16. NaN stays NaN in ``round``; a code for it exists only where the format
has one.
"""

from __future__ import annotations

from dataclasses import dataclass

from quark.numerics.array import Array, cast, float32, namespace
from quark.numerics.rounding import round_


@dataclass(frozen=True)
class Int:
    """An integer format.

    Attributes:
        name: its name in ``FORMATS``.
        bits: width of a code.
        signed: two's complement, or unsigned.
        onnx_type: name of the ``TensorProto`` data type that stores it, or None.
        torch_dtype, ml_dtype: names of the types of torch and ml_dtypes (or NumPy) that store it, or None.
    """

    name: str
    bits: int
    signed: bool
    onnx_type: str | None = None
    torch_dtype: str | None = None
    ml_dtype: str | None = None

    @property
    def min(self) -> int:
        """The lowest code."""
        return -(1 << self.bits - 1) if self.signed else 0

    @property
    def max(self) -> int:
        """The highest code."""
        return (1 << self.bits - self.signed) - 1

    @property
    def code_dtype(self) -> str:
        """The narrowest NumPy (and torch) integer type that holds a code."""
        width = next(n for n in (8, 16, 32) if n >= self.bits)
        return f"int{width}" if self.signed else f"uint{width}"

    @property
    def work_dtype(self) -> str:
        """The float type that holds every code and every difference of codes exactly."""
        return "float64" if self.bits > 23 else "float32"

    @property
    def zero_dtype(self) -> str:
        """The type of zero points: int32, or int64 for a format whose codes int32 cannot hold."""
        return "int64" if self.max > 0x7FFFFFFF else "int32"

    def middle(self) -> int:
        """The code of 0 under a symmetric grid: 0, or half the range of an unsigned format."""
        return 0 if self.signed else 1 << self.bits - 1

    def round(self, x: Array, rounding: str = "half_even") -> Array:
        """``x`` rounded to the nearest code, as float32; NaN stays NaN.

        Args:
            x: real values in units of one code, any shape.
            rounding: name of a row of ``quark.numerics.rounding.ROUNDINGS``.
        """
        return float32(self.place(float32(x) + 0, None, rounding))

    def place(self, x: Array, zero_point: Array | None, rounding: str, narrow: bool = False) -> Array:
        """``clip(round(x) + zero_point)`` for float32 ``x`` (overwritten); float64 where float32 cannot hold a code."""
        x = round_(x, rounding)
        x = cast(x, self.work_dtype)
        x += 0 if zero_point is None else zero_point
        return namespace(x).clip(x, self.min + narrow, self.max, out=x)

    def encode(self, values: Array) -> Array:
        """Codes (``code_dtype``) of ``values`` that ``round`` or ``place`` returned."""
        return cast(cast(values, "int64"), self.code_dtype)

    def decode(self, codes: Array) -> Array:
        """Values of ``codes``: float32, or float64 where float32 cannot hold a code."""
        return cast(codes, self.work_dtype)
