"""Percentile: clip the outermost values.

    symmetric:   t = the p-th percentile of |x|;   range [max(-t, min x), min(t, max x)]
    otherwise:   range [q((100 - p) / 2), q(100 - (100 - p) / 2)]   with q the percentiles of x

The p-th percentile of n values is the ceil(n p / 100)-th smallest.
"""

from __future__ import annotations

from quark.errors import ConfigError
from quark.numerics.affine import Grid
from quark.observers.histogram import Histogram
from quark.observers.tails import Tails

DEFAULT = 99.999


def search(
    statistic: Histogram | Tails, grid: Grid, percentile: float = DEFAULT, symmetric: bool = True
) -> tuple[float, float]:
    """The range that keeps ``percentile`` percent of the values.

    Args:
        statistic: histogram or tails of the values.
        grid: not looked at.
        percentile: 0..100.
        symmetric: judge both sides by |x|; the range still ends where the data end.

    Raises:
        ConfigError: the percentile is outside 0..100.
    """
    share = share_of(percentile)
    if symmetric:
        return clipped(statistic, statistic.magnitude_quantile(share))
    outside = (100 - percentile) / 200
    return statistic.quantile(outside), statistic.quantile(1 - outside)


def share_of(percentile: float) -> float:
    """The share of the values, 0 to 1, that a percentage is.

    Raises:
        ConfigError: the percentile is outside 0..100.
    """
    if not 0 <= percentile <= 100:
        raise ConfigError(f"Percentile is {percentile}; it must be between 0 and 100")
    return percentile / 100


def clipped(statistic: Histogram | Tails, threshold: float) -> tuple[float, float]:
    """[-threshold, threshold], no wider than the data on either side (one point if all data lie beyond it)."""
    lo, hi = max(-threshold, statistic.lo), min(threshold, statistic.hi)
    return min(lo, threshold), max(hi, -threshold)
