"""Affine quantization: x is stored as q = clip(round(x / scale) + zero_point) and read as (q - zero_point) * scale.

``Grid`` turns a range [lo, hi] into scale and zero point; ``quantize``, ``dequantize`` and ``fake_quantize`` use them.
The division and the product are float32, as in ONNX ``QuantizeLinear`` and ``DequantizeLinear``, on every device.

A NaN stays NaN in ``fake_quantize``; ``quantize`` refuses it where the format has no code for it. An infinity, or a
quotient beyond every code, becomes the highest or the lowest code. float64 input is rounded to float32 first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quark.errors import DataError
from quark.numerics.array import (
    Array,
    as_array,
    as_parameter,
    cast,
    cast_like,
    chunks,
    empty,
    float32,
    namespace,
    take,
)
from quark.numerics.formats import Format
from quark.numerics.granularity import Granularity, Piece, Tensor
from quark.numerics.scales import SCALE_RULES

SMALLEST_NORMAL = np.finfo(np.float32).tiny
LARGEST_BOUND = np.finfo(np.float32).max / 2


@dataclass(frozen=True)
class Grid:
    """How a range becomes a scale and a zero point.

    Attributes:
        format: a row of ``quark.numerics.formats.FORMATS``.
        symmetric: the zero point is the middle of the codes (0, or half the range of an unsigned format).
        narrow: symmetric integers divide by qmax = 2**(bits-1) - 1 instead of half the full range.
        scale_rule: name of a row of ``SCALE_RULES``.
    """

    format: Format
    symmetric: bool = True
    narrow: bool = True
    scale_rule: str = "float32"

    def parameters(self, lo: Array, hi: Array) -> tuple[Array, Array]:
        """Scale (float32) and zero point (int32; int64 for uint32) that map [lo, hi] onto the codes.

        0 is forced into the range; bounds beyond half of the largest float32 are clipped there; an all-zero range, or
        one whose scale is below the smallest normal float32, gets scale 1.

        Args:
            lo, hi: arrays of one shape (NumPy; numbers too), lo <= hi.

        Raises:
            DataError: a bound is NaN or infinite, or lo > hi.
        """
        lo, hi = bounds(lo, hi)
        widest = np.maximum(-lo, hi)
        steps = self.steps()
        exact = widest / steps if self.symmetric else (hi - lo) / steps
        exact = np.where(exact < SMALLEST_NORMAL, 1.0, exact)
        if self.symmetric:
            zero_point = np.full(exact.shape, self.format.middle())
        else:
            zero_point = np.clip(np.rint(self.format.min - lo / exact), self.format.min, self.format.max)
        return SCALE_RULES[self.scale_rule].snap(exact.astype(np.float32)), zero_point.astype(self.format.zero_dtype)

    def steps(self) -> float:
        """The number of codes that the range (symmetric: its half) is divided by."""
        if not self.symmetric:
            return self.format.max - self.format.min
        return (1 << self.format.bits - 1) - 1 if self.narrow else (self.format.max - self.format.min) / 2


def bounds(lo: Array, hi: Array) -> tuple[np.ndarray, np.ndarray]:
    """``lo`` and ``hi`` as finite float64 arrays around 0 whose difference a float32 can hold."""
    lo, hi = np.broadcast_arrays(np.asarray(lo, np.float64), np.asarray(hi, np.float64))
    if not (np.isfinite(lo).all() and np.isfinite(hi).all()):
        raise DataError(f"a range must be finite, and this one is {summary(lo)} .. {summary(hi)}")
    if (lo > hi).any():
        raise DataError(f"a range must not be empty, and this one is {summary(lo)} .. {summary(hi)}")
    return np.clip(lo, -LARGEST_BOUND, 0), np.clip(hi, 0, LARGEST_BOUND)


def summary(values: np.ndarray) -> str:
    """The value, or the first few of many."""
    return np.array2string(values, threshold=6, edgeitems=3)


def quantize(
    x: Array,
    scale: Array,
    zero_point: Array,
    format: Format,
    granularity: Granularity = Tensor(),  # noqa: B008 (a frozen value)
    rounding: str = "half_even",
    narrow: bool = False,
) -> Array:
    """The codes of ``x``.

    Args:
        x: real values, any shape; float32, float16, bfloat16 (torch, ml_dtypes) or float64.
        scale, zero_point: of ``granularity.parameter_shape(x.shape)``; any shape of that many elements.
        format: the format of the codes.
        granularity: which elements share a scale.
        rounding: name of a row of ``ROUNDINGS``.
        narrow: leave the lowest integer code unused (-127..127 for int8).

    Returns:
        Codes like ``x``, in ``format.code_dtype``.

    Raises:
        DataError: ``x`` has a NaN and the format has no code for it.
    """

    def codes(part: Array, scale: Array, zero_point: Array) -> Array:
        placed = format.place(float32(part) / scale, zero_point, rounding, narrow)
        if bool(namespace(placed).isnan(placed).any()):
            raise DataError(f"a NaN has no code in {format.name}")
        return format.encode(placed)

    x = as_array(x)
    return blockwise(codes, x, scale, zero_point, format, granularity, format.code_dtype)


def dequantize(
    codes: Array,
    scale: Array,
    zero_point: Array,
    format: Format,
    granularity: Granularity = Tensor(),  # noqa: B008 (a frozen value)
) -> Array:
    """``(codes - zero_point) * scale`` as float32.

    Args:
        codes: as ``quantize`` returned them.
        scale, zero_point, format, granularity: as given to ``quantize``.
    """

    def values(part: Array, scale: Array, zero_point: Array) -> Array:
        return float32(format.decode(part) - zero_point) * scale

    return blockwise(values, as_array(codes), scale, zero_point, format, granularity, "float32")


def fake_quantize(
    x: Array,
    scale: Array,
    zero_point: Array,
    format: Format,
    granularity: Granularity = Tensor(),  # noqa: B008 (a frozen value)
    rounding: str = "half_even",
    narrow: bool = False,
) -> Array:
    """``dequantize(quantize(x))`` without the codes, in the type of ``x``; NaN stays NaN. Arguments of ``quantize``."""

    def values(part: Array, scale: Array, zero_point: Array) -> Array:
        placed = format.place(float32(part) / scale, zero_point, rounding, narrow)
        placed -= zero_point
        placed = float32(placed)
        placed *= scale
        return placed

    x = as_array(x)
    return cast_like(blockwise(values, x, scale, zero_point, format, granularity, "float32"), x)


def blockwise(
    function: Callable[[Array, Array, Array], Array],
    x: Array,
    scale: Array,
    zero_point: Array,
    format: Format,
    granularity: Granularity,
    dtype: str,
) -> Array:
    """``function(x, scale, zero_point)`` over cache-sized chunks of ``x``, with each chunk's own parameters."""
    shape = tuple(x.shape)
    grid = granularity.grid(shape)
    scale = cast(as_parameter(scale, x), "float32").reshape(grid)
    zero_point = cast(as_parameter(zero_point, x), format.work_dtype).reshape(grid)
    out = empty(shape, dtype, x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        for piece in granularity.pieces(shape):
            parts = [view(array, piece) for array in (x, out)]
            parameters = [view_parameter(array, piece) for array in (scale, zero_point)]
            for index in chunks(piece.shape):
                parts[1][index] = function(parts[0][index], *(take(p, index) for p in parameters))
    return out


def view(array: Array, piece: Piece) -> Array:
    """The part of ``array`` that ``piece`` names, in its split shape, sharing memory."""
    return (array[piece.part] if piece.part else array).reshape(piece.shape)


def view_parameter(array: Array, piece: Piece) -> Array:
    """The parameters of ``piece``, in the shape that broadcasts against it."""
    return (array[piece.parameter_part] if piece.parameter_part else array).reshape(piece.parameter_shape)
