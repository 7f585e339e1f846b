"""``Columns``: the grid of a weight matrix whose scales are fixed, written out per element, so that algorithms which
round one column after the other need not know which elements share a scale.

    round(x) = (snap(x / step, zero)) step + offset

``step`` and ``zero`` broadcast to [rows, columns] (a scale per tensor or row takes no memory); ``offset`` is the value
of a real zero point. A block format fixes the steps that its own rule gives for the weights at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from quark.dataclass import dataclass
from quark.errors import ConfigError, DataError
from quark.numerics.affine import Coding, axis_of
from quark.numerics.array import Array, Same, as_parameter, cast, empty, float32, is_torch, namespace
from quark.numerics.chunks import quiet
from quark.numerics.elements import Element
from quark.numerics.formats import Block
from quark.numerics.granularity import Granularity
from quark.numerics.rounding import RULES, Rounding, Rule

TILE = 64


@dataclass(frozen=True)
class Columns:
    """A fixed grid for a matrix.

    Attributes:
        element: format of the codes.
        step: value of one code, [rows, columns] (or what broadcasts to it), float32.
        zero: zero points, of the shape of ``step``, or one number for all.
        offset: added to every value, of the shape of ``step``; None: 0.
        narrow: the lowest integer code is not used.
        rounding: a rounding without noise.
    """

    element: Element
    step: Same
    zero: Same | int = 0
    offset: Same | None = None
    narrow: bool = False
    rounding: Rounding = "half_even"

    def round(self, x: Array) -> Same:
        """The values on the grid nearest to ``x`` (float32, of the grid's shape), as float32."""
        with quiet():
            shifted = x if self.offset is None else x - self.offset
            values = float32(self.element.snap(shifted / self.step, self.zero, self.rule, self.narrow)) * self.step
        return values if self.offset is None else values + self.offset

    def codes(self, values: Array) -> Same:
        """The codes of ``values`` on the grid."""
        shifted = values if self.offset is None else values - self.offset
        return self.element.encode(self.element.snap(shifted / self.step, self.zero, self.rule, self.narrow), self.zero)

    @property
    def rule(self) -> Rule:
        """The function that rounds to integers."""
        return RULES[str(self.rounding)]

    def take(self, index: Array) -> Columns:
        """The columns ``index`` (a slice or integers), in that order."""
        return self.map(lambda part: take(part, index, 1))

    def rows(self, index: Array | slice) -> Columns:
        """The rows ``index``, in that order."""
        return self.map(lambda part: take(part, index, 0))

    def take_row(self, index: int) -> Columns:
        """One row, without its axis."""
        return self.map(lambda part: part[index])

    @property
    def transposed(self) -> Columns:
        """The grid of the transposed matrix."""
        return self.map(lambda part: part.T)

    def spread(self, shape: tuple[int, ...]) -> Columns:
        """The same grid with every array of this shape; what broadcasts becomes a view.

        Raises:
            DataError: an array does not broadcast to ``shape``.
        """
        try:
            return self.map(lambda part: namespace(part).broadcast_to(part, shape))
        except (ValueError, RuntimeError) as error:
            raise DataError(f"a grid with steps of shape {tuple(self.step.shape)} does not fit {shape}") from error

    def map(self, function: Callable[[Same], Same]) -> Columns:
        """The grid with a function of each of its arrays."""
        zero = self.zero if isinstance(self.zero, int) else function(self.zero)
        return replace(
            self, step=function(self.step), zero=zero, offset=None if self.offset is None else function(self.offset)
        )


def columns_of(weight: Array, coding: Coding, scale: Same | None = None, zero_point: Same | None = None) -> Columns:
    """The grid on which ``coding.fake_quantize(weight, scale, zero_point)`` puts a matrix.

    Args:
        weight: [rows, columns]; a block format takes its steps from it.
        coding: format, granularity, rounding and range of the codes.
        scale, zero_point: of ``granularity.parameter_shape(weight.shape)``; None for formats without.

    Raises:
        ConfigError: a rounding by chance, which has no fixed grid.
    """
    format, granularity, rounding = coding.format, coding.granularity, coding.rounding
    if str(rounding) not in RULES:
        raise ConfigError(f"rounding {rounding!r} depends on chance; one of {', '.join(RULES)} gives a fixed grid")
    if isinstance(format, Block):  # the lowest code would double the scale when the block is quantized again
        step = format.steps(weight, axis_of(granularity), scale if format.tensor_scale else None)
        return Columns(format.element, step, narrow=True, rounding=rounding)
    shape = tuple(weight.shape)
    one = float32(as_parameter([1.0], weight))
    step = one if scale is None or format.unit_scale else float32(as_parameter(scale, weight))
    step = granularity.expand(step, shape) if step is not one else namespace(one).broadcast_to(one, shape)
    return Columns(format, step, zero_of(weight, format, granularity, zero_point), None, coding.narrow, rounding)


def zero_of(weight: Array, format: Element, granularity: Granularity, zero_point: Array | None) -> Array | int:
    """Zero points beside ``weight``; a number where they are all the same."""
    if zero_point is None or not format.has_zero_point:
        return 0
    zeros = cast(as_parameter(zero_point, weight), format.work_dtype)
    first = zeros.reshape(-1)[0]
    if bool((zeros == first).all()):
        return int(first)
    return granularity.expand(zeros, tuple(weight.shape))


def contiguous(x: Array) -> Same:
    """``x`` in C order; the transpose of such a matrix is copied in tiles, which spares most misses of the cache."""
    flipped = x.T if x.ndim == 2 else x
    if in_order(x) or not in_order(flipped) or float32(x) is not x:
        return x.contiguous() if is_torch(x) else np.ascontiguousarray(x)
    out = empty(tuple(x.shape), "float32", x)
    for start in range(0, len(flipped), TILE):
        out[:, start : start + TILE] = flipped[start : start + TILE].T
    return out


def in_order(x: Array) -> bool:
    """Whether ``x`` is in C order."""
    return bool(x.is_contiguous() if is_torch(x) else x.flags.c_contiguous)


def take(x: Array, index: Array | slice, axis: int) -> Same:
    """``x`` at some places of an axis."""
    if isinstance(index, slice):
        return x[(slice(None),) * axis + (index,)]
    return namespace(x).index_select(x, axis, index) if is_torch(x) else np.take(x, index, axis)
