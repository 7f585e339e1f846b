"""Least squared error: the range whose quantizer changes the values least.

    argmin_{lo, hi}  Σ w (x - Q_{lo,hi}(x))²

Power-of-two scales: with s0 the scale of the full range, the candidates 2 s0, s0, s0/2, s0/4, s0/8 in this order
(first minimum wins, zero point of the full range), and finer ones as long as the finest is the best. The result is
the range that the codes can express. Other scales: the range is shrunk from the full one, in steps of 1/8 octave and
then of 1/64 around the best; both sides together, or one after the other where the zero point is free. Going down
ends when the error has passed four times the least: by then the clipped part alone exceeds the least, and it only
grows. Few values make a rugged error, so weights are polished: scales within 16/1024 of the best and, where the zero
point is free, zero points within 2 of it; then s ← s Σxy / Σy² with y = Q(x), the best scale for the codes that are.

Activations are searched on a histogram, weights on their own values (large tensors with one scale: on a histogram
too).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from quark.dataclass import dataclass
from quark.numerics.affine import Coding, Grid
from quark.numerics.granularity import Channel
from quark.observers.histogram import Histogram
from quark.observers.values import Values

POWERS = {"mae": 1, "mse": 2}
COARSE_STEPS = tuple(2.0 ** (-k / 8) for k in range(1, 161))
FINE_STEPS = tuple(2.0 ** (sign / k) for k in (16, 32, 64) for sign in (1, -1))
CANDIDATES = (2.0, 1.0, 0.5, 0.25, 0.125)
HOPELESS = 4.0
#: Ratio of two errors that joined bins, which tell each within a percent, may have the wrong way round.
CLOSE = 1.02
#: Magnitudes whose errors have squares that float32 holds.
SAFE = 2.0**-40, 2.0**50
NEAR = tuple(1 + k / 1024 for k in range(-16, 17))
SHIFTS = (0, 1, -1, 2, -2)
FITS = 4
LARGE = 1 << 15
#: Values that are rounded under all candidates at once.
SMALL = 1 << 15

Span = tuple[np.ndarray, np.ndarray]
Sides = tuple[bool, bool]
BOTH: Sides = (True, True)
LOWER: Sides = (True, False)
UPPER: Sides = (False, True)


@dataclass(frozen=True)
class Rows:
    """Values that are quantized row by row, and how the error is measured.

    Attributes:
        values: float32 [rows, n].
        grid: the quantizer of every row.
        weights: float64 [n], how often each value stands; once for None.
        narrow: leave the lowest code unused, as stored weights do (at run time activations use all codes).
        power: of the distance that is summed.
        unit: ``unit_of`` the values: a distance is multiplied by it before it is squared.
    """

    values: np.ndarray
    grid: Grid
    weights: np.ndarray | None = None
    narrow: bool = False
    power: int = 2
    unit: np.ndarray | None = None

    def error(self, span: Span) -> np.ndarray:
        """The error of every row, float64 [rows], under ranges of its own."""
        return self.error_of(*self.grid.parameters(*span))

    def error_of(self, scale: np.ndarray, zero_point: np.ndarray) -> np.ndarray:
        """The same under given scales and zero points."""
        quantized = self._quantized(scale, zero_point)
        off = np.subtract(self.values, quantized, out=quantized)
        if self.unit is not None:
            np.multiply(off, self.unit, out=off)
        off = np.abs(off, out=off) if self.power == 1 else np.square(off, out=off)
        return off.sum(-1, dtype=np.float64) if self.weights is None else off @ self.weights

    def errors_of(self, scales: np.ndarray, zero_point: np.ndarray) -> np.ndarray:
        """The same under several scales [k, rows] at once, float64 [k, rows]: small rows cost less in one piece."""
        count = len(scales)
        if count * self.values.size > SMALL:
            return np.stack([self.error_of(scale, zero_point) for scale in scales])
        unit = None if self.unit is None else np.tile(self.unit, (count, 1))
        every = replace(self, values=np.tile(self.values, (count, 1)), unit=unit)
        return every.error_of(scales.reshape(-1), np.tile(zero_point, count)).reshape(scales.shape)

    def fitted(self, scale: np.ndarray, zero_point: np.ndarray) -> np.ndarray:
        """The scale of every row, float32 [rows], of least squared error for the codes that ``scale`` gives."""
        quantized, values = self._quantized(scale, zero_point), self.values
        if self.unit is not None:
            quantized, values = quantized * self.unit, values * self.unit
        power = np.square(quantized).sum(-1, dtype=np.float64)
        shared = np.multiply(quantized, values, out=quantized).sum(-1, dtype=np.float64)
        usable = power > 0  # codes have the signs of their values: then shared is, too
        return np.where(usable, scale * shared / np.where(usable, power, 1), scale).astype(np.float32)

    def _quantized(self, scale: np.ndarray, zero_point: np.ndarray) -> np.ndarray:
        narrow = self.narrow and self.grid.symmetric
        return Coding(self.grid.format, Channel(0), narrow=narrow).fake_quantize(self.values, scale, zero_point)


@dataclass(frozen=True)
class Kept:
    """The values themselves as one row, read again for every question; ``error`` and ``error_of`` as in ``Rows``."""

    statistic: Values
    grid: Grid
    power: int = 2

    @property
    def unit(self) -> np.ndarray | None:
        """``unit_of`` the values."""
        return unit_of(_extremes(self.statistic))

    def error(self, span: Span) -> np.ndarray:
        """The error under one range, float64 [1]."""
        return self.error_of(*self.grid.parameters(*span))

    def error_of(self, scale: np.ndarray, zero_point: np.ndarray) -> np.ndarray:
        """The same under a given scale and zero point."""
        unit = self.unit
        rows = (Rows(part[None], self.grid, power=self.power, unit=unit) for part in self.statistic.parts())
        return np.sum([row.error_of(scale, zero_point) for row in rows], axis=0)

    def errors_of(self, scales: np.ndarray, zero_point: np.ndarray) -> np.ndarray:
        """The same under several scales [k, 1], float64 [k, 1]."""
        return np.stack([self.error_of(scale, zero_point) for scale in scales])


def unit_of(extremes: Span) -> np.ndarray | None:
    """Powers of two, float32 [rows, 1], that bring rows with these extremes near 1.

    ``None`` where all squares of their errors, down to a 65536th of the largest value, are normal float32 numbers.
    """
    largest = np.maximum(-extremes[0], extremes[1])
    if ((largest == 0) | ((largest > SAFE[0]) & (largest < SAFE[1]))).all():
        return None
    _, exponents = np.frexp(np.where(largest == 0, 1, largest))
    return np.asarray(np.ldexp(1.0, np.clip(-exponents, -126, 127))[:, None], np.float32)


def _extremes(statistic: Histogram) -> Span:
    return np.array([statistic.lo]), np.array([statistic.hi])


def search(statistic: Histogram, grid: Grid, symmetric: bool | None = None) -> tuple[float, float]:
    """The range of least squared error of everything the histogram counted.

    Args:
        statistic: histogram of the values.
        grid: the tensor's quantizer.
        symmetric: judge both sides by one threshold. Default: for power-of-two scales and symmetric grids; otherwise
            each side finds its own. Ranges for float scales end where the data end.
    """
    if grid.scale_rule == "power_of_two" and statistic.lo == statistic.hi == 0:
        return 0.0, 0.0  # every scale holds zeros: the range says that the choice is free
    values, weights = statistic.points()
    extremes = _extremes(statistic)
    rows = Rows(values[None], grid, weights, unit=unit_of(extremes))
    span = _search(rows, extremes, symmetric)
    if isinstance(statistic, Values):
        span = _second_look(Kept(statistic, grid), span, extremes, symmetric)
    elif grid.scale_rule == "power_of_two":
        span = _told_apart(statistic, rows, span)
    return float(span[0][0]), float(span[1][0])


def search_points(
    values: np.ndarray, weights: np.ndarray, grid: Grid, symmetric: bool | None = None
) -> tuple[float, float]:
    """The range of least squared error of values [n] that stand ``weights`` [n] times."""
    extremes = extremes_of(values[None])
    lo, hi = _search(Rows(values[None], grid, weights, unit=unit_of(extremes)), extremes, symmetric)
    return float(lo[0]), float(hi[0])


def search_rows(values: np.ndarray, grid: Grid, symmetric: bool | None = None) -> Span:
    """The ranges of least squared error of rows that each have their own scale (weights).

    Args:
        values: [..., n], one row per scale; finite, n > 0.
        grid: the quantizer of every row.
        symmetric: as for ``search``; but the zero point of power-of-two scales is free where the grid's is: that of the
            full range, which an outlier moves away from the others, or the middle code.

    Returns:
        lo and hi, float64 [...].
    """
    free = symmetric is None and grid.scale_rule == "power_of_two" and not grid.centred
    ways = (False, True) if free else (symmetric,)
    rows = values.reshape(-1, values.shape[-1]).astype(np.float32, copy=False)
    extremes = extremes_of(rows)
    judge = Rows(rows, grid, narrow=grid.narrow, unit=unit_of(extremes))
    if len(rows) == 1 and rows.size > LARGE:
        histogram = Histogram()
        histogram.update(rows)
        bounds = (search(histogram, grid, one) for one in ways)
        found = [(np.array([lo]), np.array([hi])) for lo, hi in bounds]
    else:
        found = [polished(judge, _search(judge, extremes, one)) for one in ways]
    lo, hi = _better(found[0], judge.error(found[0]), found[1], judge.error(found[1]))[0] if free else found[0]
    return lo.reshape(values.shape[:-1]), hi.reshape(values.shape[:-1])


def extremes_of(rows: np.ndarray) -> Span:
    """Smallest and largest value of every row, float64 [rows]."""
    return rows.min(-1).astype(np.float64), rows.max(-1).astype(np.float64)


def polished(rows: Rows, span: Span) -> Span:
    """``span`` moved to the least error in its neighbourhood, row by row; snapped scales stay as they are."""
    grid = rows.grid
    if grid.scale_rule != "float32" or grid.format.unit_scale:
        return span
    found, zero_point = grid.parameters(*span)
    best, least = span, rows.error_of(found, zero_point)
    for shift in SHIFTS[:1] if grid.centred else SHIFTS:
        zero = np.clip(zero_point + shift, grid.format.min, grid.format.max).astype(zero_point.dtype)
        scale, error = _nearby(rows, found, zero)
        best, least = _better(best, least, _range_of(scale, zero, grid), error)
    return best


def _nearby(rows: Rows, start: np.ndarray, zero_point: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best scale near ``start`` under fixed zero points, and its error."""
    best, least = start, rows.error_of(start, zero_point)
    for step in (*NEAR, *(None,) * FITS):
        scale = rows.fitted(best, zero_point) if step is None else (start * np.float32(step)).astype(np.float32)
        error = rows.error_of(scale, zero_point)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return best, least


def _range_of(scale: np.ndarray, zero_point: np.ndarray, grid: Grid) -> Span:
    """The range whose scale and zero point these are."""
    if grid.centred:
        half = scale.astype(np.float64) * grid.divisor
        return -half, half
    return representable(scale, zero_point, grid)


def range_errors(
    statistic: Histogram, grid: Grid, ranges: Iterable[tuple[float, float]], power: int = 2
) -> Iterator[float]:
    """Σ |x - Q(x)|^power of everything the histogram counted, under the quantizer of each range (lo, hi), in turn.

    Of very large or very small values, times a factor that is the same for all ranges (``unit_of``).
    """
    values, weights = statistic.points()
    whole = Kept(statistic, grid, power) if isinstance(statistic, Values) else None
    rows = whole or Rows(values[None], grid, weights, power=power, unit=unit_of(_extremes(statistic)))
    return (float(rows.error((np.array([lo]), np.array([hi])))[0]) for lo, hi in ranges)


def representable(scale: np.ndarray, zero_point: np.ndarray, grid: Grid) -> Span:
    """The lowest and the highest value that the codes express, float64."""
    wide, shift = np.asarray(scale, np.float64), np.asarray(zero_point, np.float64)
    lo, hi = (grid.format.min - shift) * wide, (grid.format.max - shift) * wide
    return (np.maximum(lo, -hi) if grid.symmetric and grid.narrow else lo), hi


def _search(rows: Rows, extremes: Span, symmetric: bool | None) -> Span:
    """Ranges [rows] for values with these extremes."""
    data = np.minimum(extremes[0], 0), np.maximum(extremes[1], 0)
    grid = rows.grid
    if grid.scale_rule == "power_of_two":
        return _powers(rows, data, centred=symmetric is not False)
    if grid.symmetric or symmetric:
        return _one_threshold(rows, data)
    return _two_thresholds(rows, data)


def _second_look(kept: Kept, found: Span, extremes: Span, symmetric: bool | None) -> Span:
    """``found`` on the histogram, judged on the values: moved by every fine step that helps, or the whole range."""
    data = np.minimum(extremes[0], 0), np.maximum(extremes[1], 0)
    if kept.grid.scale_rule == "power_of_two":
        return _powers(kept, data, centred=symmetric is not False)
    for side in (BOTH,) if kept.grid.symmetric or symmetric else (UPPER, LOWER):
        found = _within(_refined(kept, found, data, side), data)
    return _better(data, kept.error(data), found, kept.error(found))[0]


def _told_apart(statistic: Histogram, rows: Rows, found: Span) -> Span:
    """``found``, or the range of twice or half its scale: the one of least error by all bins, where two are near."""
    scale, zero_point = rows.grid.parameters(*found)
    scales = np.stack([scale, 2 * scale, scale / 2])
    errors = rows.errors_of(scales, zero_point)
    if errors[1:].min() > CLOSE * errors[0].max():
        return found
    values, weights = statistic.points(whole=True)
    errors = Rows(values[None], rows.grid, weights, unit=rows.unit).errors_of(scales, zero_point)
    return representable(scales[errors.argmin()], zero_point, rows.grid)


def _mirrored(span: Span) -> Span:
    widest = np.maximum(-span[0], span[1])
    return -widest, widest


def _within(span: Span, data: Span) -> Span:
    return np.maximum(span[0], data[0]), np.minimum(span[1], data[1])


def _powers(rows: Rows | Kept, data: Span, centred: bool) -> Span:
    """The power-of-two scale of least error, as the range of its codes; ``centred``: with the middle code as zero."""
    full, zero_point = rows.grid.parameters(*(_mirrored(data) if centred else data))
    if centred:
        zero_point = np.full_like(zero_point, rows.grid.format.middle)
    best, least = full, np.full(full.shape, np.inf)
    scales = np.multiply.outer(np.array(CANDIDATES, np.float32), full).astype(np.float32)
    going = np.ones(full.shape, bool)  # rows whose finest scale so far is the best
    while going.any():
        better = going
        for scale, error in zip(scales, rows.errors_of(scales, zero_point), strict=True):
            better = (error < least) & going
            best, least = np.where(better, scale, best), np.where(better, error, least)
        going = better & (scales[-1] > np.finfo(np.float32).tiny)
        scales = (scales[-1:] / 2).astype(np.float32)
    return representable(best, zero_point, rows.grid)


def _one_threshold(rows: Rows, data: Span) -> Span:
    """Shrink both sides by one threshold."""
    return _within(_refined(rows, _shrunk(rows, _mirrored(data), data, BOTH), data, BOTH), data)


def _two_thresholds(rows: Rows, data: Span) -> Span:
    """Shrink one side, then the other, coarsely and then finely; a side without values stays at 0."""
    sides = [side for side, bound in ((UPPER, data[1]), (LOWER, data[0])) if bound.any()]
    best = data
    for step in (_shrunk, _refined, _refined)[: len(sides) + 1]:
        for side in sides:
            best = step(rows, best, data, side)
    return _within(best, data)


def _shrunk(rows: Rows, span: Span, data: Span, sides: Sides) -> Span:
    """The best of ``span`` and of it with ``sides`` multiplied by each coarse step, row by row."""
    best, least = span, rows.error(_within(span, data))
    for factor in COARSE_STEPS:
        moved = _scaled(span, factor, sides)
        found = rows.error(_within(moved, data))
        best, least = _better(best, least, moved, found)
        if (found > HOPELESS * least).all():
            break
    return best


def _refined(rows: Rows | Kept, span: Span, data: Span, sides: Sides) -> Span:
    """``span`` with ``sides`` moved by each fine step that helps, row by row."""
    best, least = span, rows.error(_within(span, data))
    for factor in FINE_STEPS:
        moved = _scaled(best, factor, sides)
        best, least = _better(best, least, moved, rows.error(_within(moved, data)))
    return best


def _scaled(span: Span, factor: float, sides: Sides) -> Span:
    return (span[0] * factor if sides[0] else span[0]), (span[1] * factor if sides[1] else span[1])


def _better(best: Span, least: np.ndarray, moved: Span, found: np.ndarray) -> tuple[Span, np.ndarray]:
    """The better of two spans in every row, and its error."""
    better = found < least
    joined = np.where(better, moved[0], best[0]), np.where(better, moved[1], best[1])
    return joined, np.minimum(found, least)
