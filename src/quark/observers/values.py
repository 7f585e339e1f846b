"""A histogram that also keeps every value, for methods that look twice.

The first look (the histogram) finds the neighbourhood, the second one goes through the values themselves: quantiles are
exact, and errors are those of the values instead of the bins. What is kept goes into a ``Store``: memory here, a file
where the caller gives one. It grows with the data, so nothing is kept unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from quark.errors import ConfigError
from quark.observers.histogram import PER_OCTAVE, Histogram, rank_of
from quark.observers.statistics import State


class Store(Protocol):
    """Where values are kept."""

    def append(self, values: np.ndarray) -> None:
        """Keep float32 values [n]."""

    def parts(self) -> Iterator[np.ndarray]:
        """All values again, in order, in pieces of a limited size."""


class Memory:
    """Values kept in memory."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []

    def append(self, values: np.ndarray) -> None:
        """Keep float32 values [n]."""
        self._parts.append(values)

    def parts(self) -> Iterator[np.ndarray]:
        """All values again, in order."""
        return iter(self._parts)


class Values(Histogram):
    """Counts and values of one tensor.

    Args:
        bins: bins in every octave.
        store: where the values are kept.
    """

    def __init__(self, bins: int = PER_OCTAVE, store: Store | None = None) -> None:
        super().__init__(bins)
        self._store: Store = Memory() if store is None else store

    def update(self, x: np.ndarray) -> None:
        """Add the values of one sample."""
        super().update(x)
        if x.size:
            self._store.append(np.array(x, np.float32).reshape(-1))

    def merge(self, other: Histogram) -> None:
        """Add what ``other`` has seen."""
        if not isinstance(other, Values):
            raise ConfigError("a statistic that keeps its values can only be merged with another one that does")
        super().merge(other)
        for part in other.parts():
            self._store.append(part)

    def state(self) -> State:
        """The histogram's state and all values."""
        return {**super().state(), "values": np.concatenate([np.empty(0, np.float32), *self.parts()])}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Values:
        """The statistic that ``state()`` described, in memory."""
        new = super().from_state(state)
        new._store.append(np.array(state["values"], np.float32))
        return new

    def parts(self) -> Iterator[np.ndarray]:
        """All values, float32 [n] in pieces."""
        return self._store.parts()

    def quantile(self, share: float) -> float:
        """The value that ``share`` (0..1) of all values do not exceed, exactly."""
        rank = rank_of(share, self.count)
        return _at_rank(self.parts(), self.bins(), rank)

    def magnitude_quantile(self, share: float) -> float:
        """The same for |x|."""
        rank = rank_of(share, self.count)
        return _at_rank((np.abs(part) for part in self.parts()), self.magnitude_bins(), rank)


def counted(bins: int = PER_OCTAVE, keep: Callable[[], Store] | None = None) -> Histogram:
    """The statistic of a method that reads values.

    Args:
        bins: bins in every octave (``NumBins``).
        keep: makes the store of the values, for the second look; ``None``: there is none.
    """
    return Histogram(bins) if keep is None else Values(bins, keep())


def _at_rank(parts: Iterator[np.ndarray], bins: tuple[np.ndarray, np.ndarray, np.ndarray], rank: int) -> float:
    """The value of this rank (from 1): the values of its bin are looked up, equal ones counted."""
    left, right, counts = bins
    place = int(np.searchsorted(np.cumsum(counts), rank))
    below, found = 0, []
    for part in parts:
        below += int(np.count_nonzero(part < left[place]))
        inside = part[(part >= left[place]) & (part <= right[place])]
        found.append(np.unique(inside, return_counts=True))
    values, times = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(values, kind="stable")
    return float(values[order][np.searchsorted(np.cumsum(times[order]), rank - below)])
