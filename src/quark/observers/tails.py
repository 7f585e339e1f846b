"""The smallest and the largest values of a tensor, as they are: all that a percentile far out needs.

The p-th percentile of n values lies among the (1 - p/100) n outermost ones. Where n is known beforehand, so many are
kept from each end and nothing else is counted: the result is exact, and a sample costs its extremes per block of 1024
values (a tenth of a histogram), since only blocks that reach into a tail are looked at.

Memory: 4 bytes a kept value. Not handled: percentiles that lie further in than what is kept (``IndexError``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from quark.errors import DataError
from quark.observers.histogram import BLOCK, PER_OCTAVE, Histogram, rank_of
from quark.observers.statistics import State, extremes
from quark.observers.values import Store, counted

CHUNK = 64 * BLOCK
#: The most values of one end: with them tails are no larger than a histogram.
MOST = 1 << 15


class Tails:
    """The ``size`` smallest and the ``size`` largest values of one tensor.

    Args:
        size: values kept of each end.
        expected: the most values there will be; ``size`` was chosen for them.

    Attributes:
        lo, hi: smallest and largest value seen.
        count: values seen.
    """

    def __init__(self, size: int, expected: int) -> None:
        self.size, self.expected = size, expected
        self.count = 0
        self._high = np.empty(0, np.float32)  # descending
        self._low = np.empty(0, np.float32)  # their opposites, descending

    @property
    def lo(self) -> float:
        """The smallest value."""
        return 0.0 - float(self._low[0]) if self.count else np.inf

    @property
    def hi(self) -> float:
        """The largest value."""
        return float(self._high[0]) if self.count else -np.inf

    def update(self, x: np.ndarray) -> None:
        """Add the values of one sample (any shape and float type).

        Raises:
            DataError: NaN or infinity, or more values than expected.
        """
        with np.errstate(over="ignore"):
            flat = np.ascontiguousarray(x, np.float32).reshape(-1)
        if not flat.size:
            return
        lowest, highest = _block_extremes(flat)
        if not (np.isfinite(lowest.min()) and np.isfinite(highest.max())):
            extremes(flat)  # says how many there are
        self._high = self._joined(self._high, flat, highest, 1)
        self._low = self._joined(self._low, flat, -lowest, -1)
        self._add(flat.size)

    def _joined(self, tail: np.ndarray, flat: np.ndarray, largest: np.ndarray, sign: int) -> np.ndarray:
        """``tail`` with what ``flat`` times ``sign`` adds to it; ``largest``: the largest of each of its blocks."""
        bound = tail[-1] if tail.size == self.size else np.float32(-np.inf)
        if largest.size >= self.size:  # so many blocks reach this far, and so do as many values
            reached = np.partition(largest, -self.size)[-self.size]
            bound = max(bound, np.nextafter(reached, np.float32(-np.inf), dtype=np.float32))
        blocks = np.flatnonzero(largest > bound)
        if not blocks.size:
            return tail
        if blocks.size < largest.size // 4:
            flat = np.concatenate([flat[block * BLOCK : (block + 1) * BLOCK] for block in blocks])
        found = flat[flat > bound] if sign > 0 else -flat[flat < -bound]
        return self._largest(np.concatenate([tail, found]))

    def _largest(self, values: np.ndarray) -> np.ndarray:
        if values.size > self.size:
            values = np.partition(values, values.size - self.size)[-self.size :]
        return np.sort(values)[::-1]

    def _add(self, count: int) -> None:
        self.count += count
        if self.count > self.expected:
            raise DataError(
                f"{self.count} values came where the length of the data promised {self.expected}; the reader's __len__ "
                "is the number of its samples"
            )

    def merge(self, other: Tails) -> None:
        """Add what ``other`` has seen; ``other`` stays as it is."""
        self._high = self._largest(np.concatenate([self._high, other._high]))
        self._low = self._largest(np.concatenate([self._low, other._low]))
        self._add(other.count)

    def state(self) -> State:
        """Both tails, and what they were made for."""
        sizes = {"size": self.size, "expected": self.expected, "count": self.count}
        return {**{name: np.array(value) for name, value in sizes.items()}, "high": self._high, "low": self._low}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Tails:
        """The statistic that ``state()`` described."""
        new = cls(int(state["size"]), int(state["expected"]))
        new.count = int(state["count"])
        new._high, new._low = (np.array(state[side], np.float32) for side in ("high", "low"))
        return new

    def quantile(self, share: float) -> float:
        """The value that ``share`` (0..1) of all values do not exceed, exactly."""
        rank = rank_of(share, self.count)
        return float(self._high[self.count - rank]) if 2 * rank > self.count else 0.0 - float(self._low[rank - 1])

    def magnitude_quantile(self, share: float) -> float:
        """The same for |x|."""
        inner = self._low[: self.count - self._high.size]  # of few values both ends hold the same
        outer = np.sort(np.abs(np.concatenate([self._high, inner])))[::-1]
        return float(outer[self.count - rank_of(share, self.count)])


def tail_size(percentile: float, expected: int) -> int | None:
    """How many values of each end the percentile of ``expected`` values needs; None where that is too many."""
    size = math.ceil((1 - percentile / 100) * expected) + 2
    return size if size <= MOST else None


def quantiles(
    bins: int = PER_OCTAVE,
    keep: Callable[[], Store] | None = None,
    tail: int | None = None,
    expected: int = 0,
) -> Histogram | Tails:
    """The statistic of a method that asks for quantiles.

    Args:
        bins, keep: of ``counted``.
        tail: keep so many values of each end and no histogram.
        expected: the most values there will be.
    """
    return counted(bins, keep) if tail is None else Tails(tail, expected)


def _block_extremes(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest of every block, in pieces that stay in the cache."""
    blocks = -(-flat.size // BLOCK)
    lowest, highest = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    for start in range(0, flat.size, CHUNK):
        piece, rows = flat[start : start + CHUNK], slice(start // BLOCK, (start + CHUNK) // BLOCK)
        starts = np.arange(0, piece.size, BLOCK)
        np.minimum.reduceat(piece, starts, out=lowest[rows])
        np.maximum.reduceat(piece, starts, out=highest[rows])
    return lowest, highest
