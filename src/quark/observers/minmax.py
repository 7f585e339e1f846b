"""MinMax: the range is what was seen.

    lo = min x,  hi = max x;   symmetric: hi = max |x|, lo = -hi

With ``MovingMinMax`` as the statistic the extremes are averages over the samples.
"""

from __future__ import annotations

from quark.numerics.affine import Grid
from quark.observers.statistics import Statistic


def search(statistic: Statistic, grid: Grid, symmetric: bool = False) -> tuple[float, float]:
    """The observed range.

    Args:
        statistic: any statistic with ``lo`` and ``hi``.
        grid: not looked at.
        symmetric: mirror the wider side (``CalibTensorRangeSymmetric``).
    """
    if not symmetric:
        return statistic.lo, statistic.hi
    widest = max(-statistic.lo, statistic.hi)
    return -widest, widest
