"""Affine quantization: x is stored as q = clip(round(x / scale) + zero_point) and read as (q - zero_point) * scale.

``Grid`` turns a range [lo, hi] into scale and zero point; a ``Coding`` makes codes and values under them.
The division and the product are float32, as in ONNX ``QuantizeLinear`` and ``DequantizeLinear``, on every device.

A NaN stays NaN in ``fake_quantize``; ``quantize`` refuses it where the format has no code for it. An infinity, or a
quotient beyond every code, becomes the highest or the lowest code. float64 input is rounded to float32 first.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np

from quark.dataclass import dataclass
from quark.errors import DataError
from quark.numerics.array import (
    Array,
    Operand,
    Same,
    as_array,
    as_parameter,
    cast,
    clip,
    float32,
    has_nan,
    is_torch,
    namespace,
)
from quark.numerics.blocks import Block
from quark.numerics.chunks import blockwise, like_input, quiet
from quark.numerics.elements import Element
from quark.numerics.formats import Format
from quark.numerics.granularity import Channel, Granularity, Group, Tensor
from quark.numerics.rounding import RULES, Rounding, Rule
from quark.numerics.scales import FP8, SCALE_RULES

SMALLEST_NORMAL = np.finfo(np.float32).tiny
LARGEST_BOUND = np.finfo(np.float32).max / 2
#: Codes of a bias in 32 bits: the products that are added to it in 32 bits as well have the other half. Beside a bias
#: at the end of the type the sum wraps around, and a channel gets the wrong sign.
LARGEST_BIAS = 2.0**30
#: How far codes may reach beyond a Clip that ONNX Runtime (1.31) takes for superfluous in front of them, and drops.
CLIP_SLACK = float(np.finfo(np.float32).eps)


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

    def parameters(self, lo: Operand, hi: Operand) -> tuple[Same, Same]:
        """Scale (float32) and zero point (int32; int64 for uint32) that map [lo, hi] onto the codes.

        0 is forced into the range; bounds beyond half of the largest float32 are clipped there; an all-zero range, or
        one whose scale is below the smallest normal float32, gets scale 1.

        Args:
            lo, hi: arrays of one shape (NumPy; numbers too; tensors, which stay on their device), lo <= hi.

        Raises:
            DataError: a bound is NaN or infinite, or lo > hi.
        """
        low, high = bounds(lo, hi)
        xp = namespace(low)
        widest = xp.maximum(-low, high)
        exact = (widest if self.centred else high - low) / self.divisor
        exact = xp.where((exact < SMALLEST_NORMAL) | self.format.unit_scale, 1.0, exact)
        if self.centred:
            zero_point = xp.full_like(exact, self.format.middle)
        else:
            zero_point = xp.clip(xp.round(self.format.min - low / exact), self.format.min, self.format.max)
        return self.snap(widest, float32(exact)), cast(zero_point, self.format.zero_dtype)

    def scales(self, widest: Array) -> Same:
        """The scales of ``parameters``, where the grid is ``centred``, for many small arrays of ranges.

        Args:
            widest: the larger bounds of ranges, at least one, not negative, float64; NumPy or a tensor.

        Raises:
            DataError: a bound is NaN or infinite.
        """
        exact = widest / self.divisor
        usual = float(exact.min()) >= SMALLEST_NORMAL and float(exact.max()) < LARGEST_BOUND / self.divisor
        if not usual or self.format.unit_scale:
            return self.parameters(-widest, widest)[0]
        return self.snap(widest, float32(exact))

    @property
    def centred(self) -> bool:
        """Whether the zero point is fixed: a symmetric grid, or a format without zero points."""
        return self.symmetric or not self.format.has_zero_point

    @property
    def divisor(self) -> float:
        """What the range (centred: its half) is divided by."""
        return self.format.divisor(self.centred, self.narrow)

    def snap(self, amax: Array, scale: Array) -> Same:
        """``scale`` under the scale rule; a shared exponent is read from ``amax`` itself."""
        rule = SCALE_RULES[self.scale_rule]
        if self.centred and rule.bump is not None:
            return rule.of(float32(amax), self.divisor, self.format.rounding_bits)
        return rule.snap(scale)


def bounds(lo: Operand, hi: Operand) -> tuple[Same, Same]:
    """``lo`` and ``hi`` as finite float64 arrays around 0 whose difference a float32 can hold."""
    low, high = (cast(as_array(bound), "float64") for bound in (lo, hi))
    xp = namespace(low)
    if low.shape != high.shape:
        low, high = (xp.broadcast_tensors if is_torch(low) else xp.broadcast_arrays)(low, high)
    if not (xp.isfinite(low).all() and xp.isfinite(high).all()):
        raise DataError(f"a range must be finite, and this one is {summary(low)} .. {summary(high)}")
    if (low > high).any():
        raise DataError(f"a range must not be empty, and this one is {summary(low)} .. {summary(high)}")
    return clip(low, -LARGEST_BOUND, 0.0) + 0.0, clip(high, 0.0, LARGEST_BOUND) + 0.0  # no -0


def summary(values: Array) -> str:
    """The value, or the first few of many."""
    shown = values.cpu().numpy() if is_torch(values) else values
    return np.array2string(shown, threshold=6, edgeitems=3)


@dataclass(frozen=True)
class Coding:
    """How real values become codes under scales, and codes values.

    ``x`` are real values of any shape: float32, float16, bfloat16 (torch, ml_dtypes) or float64. ``scale`` and
    ``zero_point`` are of ``granularity.parameter_shape(x.shape)``, in any shape of that many elements. A block format
    takes its axis from ``granularity`` (the last one where that has none) and its scale, if it has one per tensor, from
    ``scale``.

    Attributes:
        format: of the codes.
        granularity: which elements share a scale.
        rounding: name of a row of ``ROUNDINGS``.
        narrow: leave the lowest integer code unused (-127..127 for int8).
        scale_rule: of the scales; under some rules kernels round products to FP8 again (``ScaleRule.parts``).
    """

    format: Format
    granularity: Granularity = Tensor()
    rounding: Rounding = "half_even"
    narrow: bool = False
    scale_rule: str = "float32"

    def quantize(self, x: Array, scale: Operand | None, zero_point: Operand | None) -> Same:
        """The codes of ``x``, in ``format.code_dtype``; ``Encoded`` of a block format.

        Raises:
            DataError: ``x`` has a NaN and the format has no code for it.
        """
        if isinstance(self.format, Block):
            return self.format.encode(x, axis_of(self.granularity), self.rounding, scale)
        element: Element = self.format

        def codes(part: Array, scale: Array, zero_point: Array, rule: Rule, out: Array) -> None:
            values = float32(part) / scale
            if not element.has_nan and has_nan(values):
                raise DataError(f"a NaN has no code in {element.name}")
            element.put(out, values, zero_point, rule, self.narrow)

        x = as_array(x)
        known = operands(x, scale, zero_point, element)
        return blockwise(codes, x, known, self.granularity, self.rounding, element.code_dtype)

    def dequantize(self, codes: Same, scale: Operand | None, zero_point: Operand | None) -> Same:
        """``(codes - zero_point) * scale`` as float32, of codes as ``quantize`` returned them."""
        if isinstance(self.format, Block):
            return self.format.decode(codes, axis_of(self.granularity), scale if self.format.tensor_scale else None)
        element: Element = self.format

        def values(part: Array, scale: Array, zero_point: Array, rule: Rule, out: Array) -> None:
            decoded = float32(element.decode(part, zero_point))
            namespace(decoded).multiply(decoded, scale, out=out)

        def products(part: Array, inside: Array, zero_point: Array, factor: Array, rule: Rule, out: Array) -> None:
            made = FP8.place(float32(element.decode(part, zero_point)) * inside, 0, rule)
            namespace(made).multiply(made, factor, out=out)

        codes = as_array(codes)
        known, parts = operands(codes, scale, zero_point, element), SCALE_RULES[self.scale_rule].parts
        if parts is None or not known[0].shape or not known[0].shape[-1]:
            return blockwise(values, codes, known, self.granularity, "half_even", "float32")
        inside, factor = parts(known[0])
        split = inside, known[1], factor + 0 * inside
        return blockwise(products, codes, split, self.granularity, "half_even", "float32")

    def fake_quantize(self, x: Array, scale: Operand | None, zero_point: Operand | None) -> Same:
        """``dequantize(quantize(x))`` without the codes, in the type of ``x``; NaN stays NaN."""
        if isinstance(self.format, Block):
            return self.format.round(x, axis_of(self.granularity), self.rounding, scale)
        element: Element = self.format
        if SCALE_RULES[self.scale_rule].parts is not None:
            return like_input(self.dequantize(self.quantize(x, scale, zero_point), scale, zero_point), as_array(x))

        def values(part: Array, scale: Array, zero_point: Array, rule: Rule, out: Array) -> None:
            quotient = float32(part) / scale
            placed = element.place(quotient, zero_point, rule, self.narrow, quotient)
            namespace(placed).multiply(placed, scale, out=out)

        x = as_array(x)
        known = operands(x, scale, zero_point, element)
        return like_input(blockwise(values, x, known, self.granularity, self.rounding, "float32"), x)

    @property
    def alone(self) -> bool:
        """Whether an element is rounded by its scale and its zero point alone, in float32."""
        whole = not isinstance(self.format, Block) and SCALE_RULES[self.scale_rule].parts is None
        return whole and self.format.work_dtype == "float32" and self.rounding in RULES

    def beside(self, x: Array, scale: Array, zero_point: Operand, out: Same | None = None) -> Same:
        """``fake_quantize`` of float32 under parameters that broadcast against ``x``, where elements are ``alone``.

        Without what large tensors need: for many small ones, which are rounded thousands of times. ``out``: where to;
        it may be ``x``.
        """
        element: Element = self.format  # type: ignore[assignment]
        xp = namespace(x)
        if not isinstance(zero_point, int | float):
            zero_point = cast(as_array(zero_point), element.work_dtype)
        with quiet() if xp is np else nullcontext():
            quotient = xp.divide(x, scale, out=out)
            placed = element.place(quotient, zero_point, RULES[str(self.rounding)], self.narrow, quotient)
            return xp.multiply(placed, scale, out=quotient)


def axis_of(granularity: Granularity) -> int:
    """The axis that ``granularity`` names, or the last."""
    return granularity.axis if isinstance(granularity, Group | Channel) else -1


def operands(x: Array, scale: Operand | None, zero_point: Operand | None, format: Format) -> tuple[Same, Same]:
    """Scale and zero point beside ``x``, in the types of the arithmetic."""
    return cast(as_parameter(scale, x), "float32"), cast(as_parameter(zero_point, x), format.work_dtype)


def loses_clip(bounds: tuple[float, float], scale: np.ndarray | None, zero: np.ndarray | None) -> bool:
    """Whether ONNX Runtime drops a Clip in front of a QuantizeLinear whose codes tell what it cuts off.

    Args:
        bounds: the lower and the upper one of the Clip.
        scale: one number; None, or several: the Clip stays.
        zero: the zero point of the type of the codes; None: uint8 from 0 on.
    """
    if scale is None or scale.size != 1:
        return False
    shift = np.zeros((), np.uint8) if zero is None else zero
    if shift.dtype.kind not in "iu":
        return False
    step, ends = float(scale.reshape(())), np.iinfo(shift.dtype)
    least, most = (step * (end - float(shift.reshape(()))) for end in (ends.min, ends.max))
    return step / 2 < max(bounds[0] - least, most - bounds[1]) <= CLIP_SLACK
