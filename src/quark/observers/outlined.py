"""A histogram of a part of the values beside both ends of all of them: percentiles are exact, errors are sums.

Choosing between percentiles asks for the percentiles themselves, which the outermost values tell
(``quark.observers.tails``), and for the sum of the errors under each, which one of every p values tells
(``quark.observers.sampled``). Both together take two thirds of the time of counting every value. As long as no sample
is so large that values are passed over, everything is read from the histogram. What both need of a sample, the extremes
of its blocks and its outermost values, is looked for once, by the ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from quark.observers.histogram import BLOCK, PER_OCTAVE, TAIL, Blocks, Histogram
from quark.observers.sampled import Sampled
from quark.observers.statistics import State, flattened
from quark.observers.tails import SHARE, Tails
from quark.observers.values import Store, counted

ENDS = "ends/"

Own = TypeVar("Own", bound="Outlined")


class Outlined(Sampled):
    """Counts of a part of the values of one tensor, and the outermost of all of them.

    Args:
        bins: bins in every octave.
        outside, samples: of ``Tails``.
    """

    def __init__(self, bins: int = PER_OCTAVE, outside: float = 0.0, samples: int = 1) -> None:
        super().__init__(bins)
        self.ends = Tails(outside, samples)
        self._blocks: Blocks = (np.empty(0, np.float32), np.empty(0, np.float32))  # extremes in the sample at hand

    def update(self, x: np.ndarray) -> None:
        """Add the values of one sample."""
        flat = flattened(x)
        self._blocks = self.ends.add(flat)
        super().update(flat)

    def _block_extremes(self, flat: np.ndarray) -> Blocks:
        """Smallest and largest of every block of ``flat``, which the sample at hand begins with."""
        count, rest = -(-flat.size // BLOCK), flat[flat.size - flat.size % BLOCK :]
        lowest, highest = (found[:count].copy() for found in self._blocks)
        if rest.size:  # the block that goes on in the sample
            lowest[-1], highest[-1] = rest.min(), rest.max()
        return lowest, highest

    def _outermost(self) -> list[np.ndarray]:
        """The largest magnitudes of either sign, descending: the first of what the ends keep."""
        return [values[:TAIL][values[:TAIL] > 0] for values in self.ends.outermost]

    def _keep_tail(self, sign: int, flat: np.ndarray, largest: np.ndarray) -> None:
        """The ends have it."""

    def _keep_outermost(self, sign: int, flat: np.ndarray, largest: np.ndarray) -> None:
        """The ends have it."""

    def merge(self, other: Histogram) -> None:
        """Add what ``other`` has seen; ``other`` stays as it is."""
        super().merge(other)
        if isinstance(other, Outlined):
            self.ends.merge(other.ends)

    def state(self) -> State:
        """The states of both."""
        return {**super().state(), **{ENDS + name: array for name, array in self.ends.state().items()}}

    @classmethod
    def from_state(cls: type[Own], state: Mapping[str, Any]) -> Own:
        """The statistic that ``state()`` described."""
        new = super().from_state(state)
        new.ends = Tails.from_state({name[len(ENDS) :]: state[name] for name in state if name.startswith(ENDS)})
        return new

    def quantile(self, share: float) -> float:
        """The value that ``share`` (0..1) of all values do not exceed."""
        return self.ends.quantile(share) if self._thinned else super().quantile(share)

    def magnitude_quantile(self, share: float) -> float:
        """The same for |x|."""
        return self.ends.magnitude_quantile(share) if self._thinned else super().magnitude_quantile(share)


def outlined(
    bins: int = PER_OCTAVE,
    keep: Callable[[], Store] | None = None,
    candidates: Sequence[float] = (),
    samples: int | None = None,
) -> Histogram:
    """The statistic of a method that chooses between percentiles by the errors they leave.

    Args:
        bins, keep: of ``counted``.
        candidates: the percentiles.
        samples: how many samples there will be, or None if nobody knows.
    """
    outside = 1 - min(candidates, default=0.0) / 100
    if bins == PER_OCTAVE and keep is None and samples and outside * samples <= SHARE:
        return Outlined(bins, outside, samples)
    return counted(bins, keep)
