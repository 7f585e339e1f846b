"""Layerwise percentile: of a few percentiles, take the one whose range quantizes this tensor best.

    p* = argmin_p  mean |x - Q_p(x)|  ("mae")   or   mean (x - Q_p(x))²  ("mse")

Q_p is the tensor's own quantizer (format, symmetry and scale rule) on the range of percentile p; ties take the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from quark.errors import ConfigError, check_name
from quark.numerics.affine import Grid
from quark.observers import percentile
from quark.observers.histogram import Histogram
from quark.observers.mse import POWERS, range_errors

CANDIDATES = (99.99, 99.999, 99.99999)


def search(
    statistic: Histogram,
    grid: Grid,
    metric: str = "mae",
    candidates: Sequence[float] = CANDIDATES,
    symmetric: bool = True,
) -> tuple[float, float]:
    """The range of the best candidate.

    Args:
        statistic: histogram of the values.
        grid: the tensor's quantizer.
        metric: "mae" or "mse".
        candidates: percentiles, 0..100.
        symmetric: as for ``percentile``.

    Raises:
        ConfigError: an unknown metric, no candidate, or one outside 0..100.
    """
    check_name("LWPMetric", metric, POWERS)
    if not candidates:
        raise ConfigError("PercentileCandidates is empty; give at least one percentile")
    ranges = [percentile.search(statistic, grid, p, symmetric) for p in candidates]
    errors = list(range_errors(statistic, grid, ranges, POWERS[metric]))
    return ranges[errors.index(min(errors))]
