"""Other ways to the least squared error, for those who ask for them by ``MinMSEModePof2Scale`` and ``…FloatScale``.

Activations with power-of-two scales
    MostCommon   every sample votes for the scale that changes it least; the most frequent one wins, of equally frequent
                 ones the smallest
    Percentile   the search of ``mse`` on the values within a percentile of |x|: what lies outside has no say
Weights with float scales
    Percentile   the best of four ranges, those that keep 99.9, 99.99, 99.999 and 99.9999 percent of the values
    HistCenter   the search of ``mse`` on a histogram instead of on the values, which only polish what it found

``All``, the search of ``mse`` on all values, has an error at least as small as that of any of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from quark.errors import ConfigError
from quark.numerics.affine import Grid
from quark.numerics.formats import get_format
from quark.observers import mse
from quark.observers.histogram import Histogram
from quark.observers.mse import Rows, Span
from quark.observers.percentile import DEFAULT, share_of
from quark.observers.statistics import MinMax, State

PERCENTILES = (99.9, 99.99, 99.999, 99.9999)


class Votes:
    """How many samples found which range best.

    Args:
        grid: the tensor's quantizer.
        symmetric: each sample's range is symmetric around 0 (``CalibTensorRangeSymmetric``); it always is where the
            grid has no free zero point.
    """

    def __init__(self, grid: Grid, symmetric: bool = True) -> None:
        self.grid = grid
        self.symmetric = symmetric
        self.extremes = MinMax()
        self.ranges: Counter[tuple[float, float]] = Counter()

    @property
    def lo(self) -> float:
        """Smallest value."""
        return self.extremes.lo

    @property
    def hi(self) -> float:
        """Largest value."""
        return self.extremes.hi

    @property
    def count(self) -> int:
        """Values seen."""
        return self.extremes.count

    def update(self, x: np.ndarray) -> None:
        """Add the vote of one sample."""
        if x.size:
            self.extremes.update(x)
            lo, hi = mse.search_rows(x.reshape(1, -1), self.grid, self.symmetric or self.grid.centred)
            self.ranges[(float(lo[0]), float(hi[0]))] += 1

    def merge(self, other: Votes) -> None:
        """Add the votes of ``other``."""
        self.extremes.merge(other.extremes)
        self.ranges.update(other.ranges)

    def state(self) -> State:
        """The votes, the extremes and the fields of the grid."""
        grid = [self.grid.format.name, str(int(self.grid.symmetric)), str(int(self.grid.narrow)), self.grid.scale_rule]
        ranges = np.array(list(self.ranges), np.float64).reshape(-1, 2)
        votes = np.array(list(self.ranges.values()), np.int64)
        told = {"grid": np.array(grid), "symmetric": np.array(self.symmetric)}
        return {"ranges": ranges, "votes": votes, **told, **self.extremes.state()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Votes:
        """The statistic that ``state()`` described."""
        name, symmetric, narrow, rule = (str(part) for part in state["grid"])
        new = cls(Grid(get_format(name), symmetric == "1", narrow == "1", rule), bool(state["symmetric"]))
        new.extremes = MinMax.from_state(state)
        pairs = zip(np.asarray(state["ranges"]).tolist(), np.asarray(state["votes"]).tolist(), strict=True)
        new.ranges.update({(lo, hi): votes for (lo, hi), votes in pairs})
        return new


def most_common(statistic: Votes, grid: Grid) -> tuple[float, float]:
    """The scale with most votes, of several the smallest; the zero point that most of its voters have, if it is free.

    Raises:
        ConfigError: scales that are not powers of two: hardly two samples would agree.
    """
    if grid.scale_rule != "power_of_two":
        raise ConfigError("MinMSEModePof2Scale: MostCommon needs power-of-two scales")
    votes: Counter[float] = Counter()
    scales = {span: float(grid.parameters(*span)[0]) for span in statistic.ranges}
    for span, scale in scales.items():
        votes[scale] += statistic.ranges[span]
    chosen = min(votes, key=lambda scale: (-votes[scale], scale))
    agreed = [span for span, scale in scales.items() if scale == chosen]
    return min(agreed, key=lambda span: (-statistic.ranges[span], span[1]))


def within_percentile(
    statistic: Histogram, grid: Grid, percentile: float = DEFAULT, symmetric: bool | None = None
) -> tuple[float, float]:
    """The range of least squared error of the values within a percentile of |x|.

    Raises:
        ConfigError: the percentile is outside 0..100.
    """
    values, weights = statistic.points()
    inside = np.abs(values) <= statistic.magnitude_quantile(share_of(percentile))
    if not inside.any():
        return mse.search(statistic, grid, symmetric)
    lo, hi = mse.search_points(values[inside], weights[inside], grid, symmetric)
    return lo, hi


def rows_by_percentile(values: np.ndarray, grid: Grid) -> Span:
    """The best of the four percentile ranges for rows that each have their own scale.

    Args:
        values: [..., n], one row per scale; finite, n > 0.
        grid: the quantizer of every row.
    """
    rows = values.reshape(-1, values.shape[-1]).astype(np.float32, copy=False)
    judge = Rows(rows, grid, narrow=grid.narrow, unit=mse.unit_of(mse.extremes_of(rows)))
    shares = [(100 - percentile) / 2 for percentile in PERCENTILES]
    quantiles = np.percentile(rows, [*shares, *(100 - share for share in shares)], axis=-1)
    lows, highs = np.minimum(quantiles[: len(shares)], 0), np.maximum(quantiles[len(shares) :], 0)
    errors = np.stack([judge.error((low, high)) for low, high in zip(lows, highs, strict=True)])
    best = errors.argmin(0)[None]
    lo, hi = (np.take_along_axis(side, best, 0)[0] for side in (lows, highs))
    return lo.reshape(values.shape[:-1]), hi.reshape(values.shape[:-1])


def rows_by_histogram(values: np.ndarray, grid: Grid) -> Span:
    """The search of ``mse`` on a histogram of each row; arguments of ``rows_by_percentile``."""
    rows = values.reshape(-1, values.shape[-1]).astype(np.float32, copy=False)
    found = []
    for row in rows:
        histogram = Histogram()
        histogram.update(row)
        found.append(mse.search(histogram, grid))
    lo, hi = np.array(found, np.float64).T
    judge = Rows(rows, grid, narrow=grid.narrow, unit=mse.unit_of(mse.extremes_of(rows)))
    lo, hi = mse.polished(judge, (lo, hi))
    return lo.reshape(values.shape[:-1]), hi.reshape(values.shape[:-1])


#: MinMSEModeFloatScale -> the search of weights.
ROW_SEARCHES = {"All": mse.search_rows, "HistCenter": rows_by_histogram, "Percentile": rows_by_percentile}
