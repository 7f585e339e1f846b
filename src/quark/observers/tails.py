"""The smallest and the largest values of a tensor, as they are: all that a percentile far out needs.

The p-th percentile of n values lies among the (1 - p/100) n outermost ones. Where the number of samples is known
beforehand, so many are kept from each end and nothing else is counted: the result is exact, and a sample costs its
extremes per block of 1024 values (a tenth of a histogram), since only blocks that reach into a tail are looked at.

n is foreseen as twice what samples as large as the largest so far would make. Where a later one is larger still, values
that now count may be gone; if the percentile lies among those, the answer is the outermost value that may be missing (a
range no narrower than asked), and the log says so. Samples of one size never come to that.

Memory: 1/32 of a sample, or 512 values of each end. Not handled: percentiles further in (they take a histogram).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from quark.observers.histogram import PER_OCTAVE, Blocks, Histogram, block_extremes, rank_of, within
from quark.observers.statistics import State, extremes, flattened
from quark.observers.values import Store, counted

log = logging.getLogger(__name__)
#: The most that is asked for, of each end, as a share of a sample.
SHARE = 1 / 64
FEWEST, SLACK = 512, 2
#: Values of a piece of which the largest is taken, to bound what the largest of all are.
DEEP = 64


class Tail:
    """The largest values of one tensor.

    Attributes:
        values: float32, descending.
        gone: no value that is missing is larger.
    """

    def __init__(self) -> None:
        self.values = np.empty(0, np.float32)
        self.gone = np.float32(-np.inf)

    def add(self, flat: np.ndarray, sign: int, largest: np.ndarray, size: int) -> None:
        """Add the values ``flat`` times ``sign``; ``largest``: those of its blocks; keep ``size`` values."""
        full = self.values.size >= size
        bound = self.values[-1] if full else _below(self.gone)
        blocks = np.flatnonzero(largest > bound)
        missing = 0
        if not full or blocks.size >= size:
            peaks = largest if full else _peaks(flat, sign, size)
            reached = np.partition(peaks, -size)[-size] if peaks.size >= size else bound
            missing = size if reached > bound else 0  # so many pieces reach this far, and so do as many values
            bound = max(bound, reached)
            blocks = np.flatnonzero(largest > bound)
        if not (blocks.size or missing):
            return
        if blocks.size < largest.size // 4:
            flat = within(flat, blocks)
        found = flat[flat > bound] if sign > 0 else -flat[flat < -bound]
        self.join(np.concatenate([found, np.full(max(missing - found.size, 0), bound, np.float32)]), size)

    def join(self, values: np.ndarray, size: int) -> None:
        """Add values; keep the ``size`` largest."""
        values = np.concatenate([self.values, values])
        if values.size > size:
            values = np.partition(values, values.size - size)[-size:]
        self.values = np.sort(values)[::-1]
        if self.values.size == size:
            self.gone = max(self.gone, self.values[-1])


class Tails:
    """Both ends of the values of one tensor.

    Args:
        outside: share of the values beyond the quantile that will be asked for.
        samples: how many samples there will be.

    Attributes:
        lo, hi: smallest and largest value seen.
        count: values seen.
    """

    def __init__(self, outside: float, samples: int) -> None:
        self.outside, self.samples = outside, samples
        self.count = self._largest_sample = 0
        self._high, self._low = Tail(), Tail()  # the low one holds opposites

    @property
    def lo(self) -> float:
        """The smallest value."""
        return 0.0 - float(self._low.values[0]) if self.count else np.inf

    @property
    def hi(self) -> float:
        """The largest value."""
        return float(self._high.values[0]) if self.count else -np.inf

    def _size(self) -> int:
        """How many values are kept of each end."""
        foreseen = SLACK * max(self.samples * self._largest_sample, self.count)
        return max(math.ceil(self.outside * foreseen) + 2, FEWEST)

    def update(self, x: np.ndarray) -> None:
        """Add the values of one sample (any shape and float type).

        Raises:
            DataError: NaN or infinity.
        """
        self.add(flattened(x))

    def add(self, flat: np.ndarray) -> Blocks:
        """The same of float32 values [n]; the extremes of their blocks.

        Raises:
            DataError: NaN or infinity.
        """
        lowest, highest = block_extremes(flat)
        if not flat.size:
            return lowest, highest
        if not (np.isfinite(lowest.min()) and np.isfinite(highest.max())):
            extremes(flat)  # says how many there are
        self.count += flat.size
        self._largest_sample = max(self._largest_sample, flat.size)
        self._high.add(flat, 1, highest, self._size())
        self._low.add(flat, -1, -lowest, self._size())
        return lowest, highest

    @property
    def outermost(self) -> tuple[np.ndarray, np.ndarray]:
        """The largest values and the opposites of the smallest, descending."""
        return self._high.values, self._low.values

    def merge(self, other: Tails) -> None:
        """Add what ``other`` has seen; ``other`` stays as it is."""
        self.count += other.count
        self._largest_sample = max(self._largest_sample, other._largest_sample)
        for own, its in ((self._high, other._high), (self._low, other._low)):
            own.gone = max(own.gone, its.gone)
            own.join(its.values, self._size())

    def state(self) -> State:
        """Both tails, and what they were made for."""
        plain = {"outside": self.outside, "samples": self.samples, "count": self.count, "each": self._largest_sample}
        tails = {"high": self._high.values, "low": self._low.values}
        return {
            **{name: np.array(value) for name, value in plain.items()},
            **tails,
            "gone": np.array([self._high.gone, self._low.gone], np.float32),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Tails:
        """The statistic that ``state()`` described."""
        new = cls(float(state["outside"]), int(state["samples"]))
        new.count, new._largest_sample = int(state["count"]), int(state["each"])
        for tail, name, gone in zip((new._high, new._low), ("high", "low"), state["gone"], strict=True):
            tail.values, tail.gone = np.array(state[name], np.float32), np.float32(gone)
        return new

    def quantile(self, share: float) -> float:
        """The value that ``share`` (0..1) of all values do not exceed."""
        rank = rank_of(share, self.count)
        if 2 * rank > self.count:
            return _at(self._high.values, self._high.gone, self.count - rank)
        return 0.0 - _at(self._low.values, self._low.gone, rank - 1)

    def magnitude_quantile(self, share: float) -> float:
        """The same for |x|."""
        high, low = self._high, self._low
        inner = low.values[: self.count - high.values.size]  # of few values both ends hold the same
        outer = np.sort(np.abs(np.concatenate([high.values, inner])))[::-1]
        return _at(outer, max(high.gone, low.gone), self.count - rank_of(share, self.count))


def quantiles(
    bins: int = PER_OCTAVE,
    keep: Callable[[], Store] | None = None,
    percentile: float = 0.0,
    samples: int | None = None,
) -> Histogram | Tails:
    """The statistic of a method that asks for percentiles.

    Args:
        bins, keep: of ``counted``.
        percentile: the one that will be asked for.
        samples: how many samples there will be, or None if nobody knows.
    """
    outside = 1 - percentile / 100
    plain = bins == PER_OCTAVE and keep is None
    return Tails(outside, samples) if plain and samples and outside * samples <= SHARE else counted(bins, keep)


def _at(values: np.ndarray, gone: np.float32, place: int) -> float:
    if place < values.size and values[place] >= gone:
        return float(values[place])
    log.warning("samples grew during calibration; a percentile near %.6g is only known not to be further out", gone)
    return float(gone)


def _peaks(flat: np.ndarray, sign: int, size: int) -> np.ndarray:
    """The largest of pieces of ``flat`` times ``sign``, at least ``size`` of them where there are twice as many values.

    What most values equal, as zeros after a Relu, is bounded by them, and no value is sorted for it. A piece has up to
    ``DEEP`` values, which lie far apart: neighbours are alike, and the fewer of the largest share a piece, the closer
    the ``size``-th largest piece comes to the ``size``-th largest value.
    """
    if flat.size < 2 * size:
        return np.empty(0, np.float32)
    deep = min(DEEP, flat.size // size)
    pieces = flat[: flat.size - flat.size % deep].reshape(deep, -1)
    return pieces.max(0) if sign > 0 else -pieces.min(0)


def _below(value: np.float32) -> np.float32:
    return np.nextafter(value, np.float32(-np.inf), dtype=np.float32)
