"""A histogram of a part of the values beside both ends of all of them: percentiles are exact, errors are sums.

Choosing between percentiles asks for the percentiles themselves, which the outermost values tell
(``quark.observers.tails``), and for the sum of the errors under each, which one of every p values tells
(``quark.observers.sampled``). Both together take two thirds of the time of counting every value. As long as no sample
is so large that values are passed over, everything is read from the histogram.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from quark.observers.histogram import PER_OCTAVE, Histogram
from quark.observers.sampled import Sampled
from quark.observers.statistics import State
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

    def update(self, x: np.ndarray) -> None:
        """Add the values of one sample."""
        super().update(x)
        self.ends.update(x)

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
