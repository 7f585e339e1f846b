"""A histogram that counts one of every p values of large samples, and keeps the outermost values of all of them.

A least-squares search asks for sums over all values. What is clipped comes from a few hundred outermost values, and
those are kept as they are; what is rounded comes from the bulk, of which 65536 values of a sample tell the sum within
half a percent (0.02 dB), and several samples closer still. Counting is what such a calibration spends its time on.

    Σ f(x)  ≈  Σ_{x beyond the tail's bound} f(x)  +  p Σ_{one in p of the others} f(x)

p is a prime that does not divide the size of the sample, so it shares no factor with any of its axes and no column or
channel is passed over. Which of every p values is taken changes along the sample, each as often as the others, and,
by the largest values of its blocks, from sample to sample: no place is passed over for good. Nothing is drawn at
random: the same data give the same counts. Samples of fewer than 3 x 65536 values are counted whole, and so is every
value where ``NumBins`` asks for other bins.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import numpy as np

from quark.observers.histogram import PER_OCTAVE, TAIL, Blocks, Histogram, outer_blocks
from quark.observers.statistics import State
from quark.observers.tails import Tail
from quark.observers.values import Store, Values

ENOUGH = 1 << 16
PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
#: Values below it are of the other sign, or zero.
SMALLEST = np.finfo(np.float32).smallest_subnormal

Own = TypeVar("Own", bound="Sampled")


class Sampled(Histogram):
    """Counts of a part of the values of one tensor, with exact extremes and exact tails.

    Args:
        bins: bins in every octave.
    """

    def __init__(self, bins: int = PER_OCTAVE) -> None:
        super().__init__(bins)
        self._thinned = False

    def _insert(self, flat: np.ndarray) -> None:
        """Put values, or every p-th, into bins, and the outermost into the tails."""
        step = step_of(flat.size)
        if step == 1:
            super()._insert(flat)
            return
        self._thinned = True
        whole = flat.size - flat.size % step
        self._thin(flat[:whole], step)
        self._postpone(flat[whole:])  # a step is no divisor: something is left

    def _thin(self, flat: np.ndarray, step: int) -> None:
        """Count every ``step``-th value for ``step`` of them, and look at the outermost of all."""
        lowest, highest = self._block_extremes(flat)
        negative = self._widen(flat, lowest, highest)
        self._count(one_in(flat, step, zlib.crc32(highest.data)), negative, step)
        for sign, largest in ((1, highest), (-1, -lowest)):
            self._keep_outermost(sign, flat, largest)

    def _block_extremes(self, flat: np.ndarray) -> Blocks:
        """As ``outer_blocks``."""
        return outer_blocks(flat)

    def _keep_outermost(self, sign: int, flat: np.ndarray, largest: np.ndarray) -> None:
        """Take over what ``flat`` adds to the largest magnitudes of one sign; ``largest``: those of its blocks."""
        side = 0 if sign > 0 else 1
        tail = Tail()
        tail.values, tail.gone = self._tails[side], SMALLEST
        if largest.max() > 0:
            tail.add(flat, sign, largest, TAIL)
            self._tails[side] = tail.values

    def merge(self, other: Histogram) -> None:
        """Add what ``other`` has seen; ``other`` stays as it is."""
        super().merge(other)
        self._thinned |= isinstance(other, Sampled) and other._thinned

    def state(self) -> State:
        """The histogram's state, and whether values were passed over."""
        return {**super().state(), "thinned": np.array(self._thinned)}

    @classmethod
    def from_state(cls: type[Own], state: Mapping[str, Any]) -> Own:
        """The statistic that ``state()`` described."""
        new = super().from_state(state)
        new._thinned = bool(state["thinned"])
        return new

    def points(self, whole: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """As of ``Histogram``; where values were passed over, the outermost stand for themselves."""
        if not self._thinned:
            return super().points(whole)
        self._settle()
        tails = self._outermost()
        inner = [self._without(counts, tail) for counts, tail in zip(self._counts, tails, strict=False)]
        values, weights = self._points_of(inner, whole)
        outer = np.concatenate([tails[0], -tails[1]])
        return np.concatenate([values, outer]), np.concatenate([weights, np.ones(outer.size)])

    def _without(self, counts: np.ndarray, tail: np.ndarray) -> np.ndarray:
        """Counts of the values that are not in ``tail``; of those that equal its last one some may be."""
        edges = self._edges()
        full = tail.size == TAIL  # otherwise it holds all values of its sign
        bound = int(np.searchsorted(edges, tail[-1] if full else 0, side="right")) - 1
        inside = counts.copy()
        inside[bound + 1 :] = 0
        inside[bound] = max(inside[bound] - int((tail < edges[bound + 1]).sum()), 0)
        return inside


def one_in(flat: np.ndarray, step: int, key: int) -> np.ndarray:
    """One of every ``step`` values of [n step], [n].

    In each of ``step`` stretches it is always the same one, so that every column is met as often as the others; each
    has its turn. Which one begins, ``key`` says.
    """
    picked, order = np.empty(flat.size // step, flat.dtype), _scattered(step)
    for place in range(step):
        start, stop = picked.size * place // step, picked.size * (place + 1) // step
        picked[start:stop] = flat[start * step + order[(place + key) % step] : stop * step : step]
    return picked


@cache
def _scattered(count: int) -> list[int]:
    """0 .. ``count`` - 1 without an order."""
    return sorted(range(count), key=lambda place: zlib.crc32(b"%d" % place))


def step_of(size: int) -> int:
    """Every how many-th of ``size`` values is counted: 1, or a prime that leaves ``ENOUGH`` of them."""
    fitting = [prime for prime in PRIMES if prime * ENOUGH <= size and size % prime]
    return max(fitting, default=1)


def sampled(bins: int = PER_OCTAVE, keep: Callable[[], Store] | None = None) -> Histogram:
    """The statistic of a method that sums errors over all values.

    Args:
        bins, keep: of ``quark.observers.values.counted``; where one is given, every value counts.
    """
    if keep is not None:
        return Values(bins, keep())
    return Sampled(bins) if bins == PER_OCTAVE else Histogram(bins)
