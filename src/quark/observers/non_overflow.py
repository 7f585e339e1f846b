"""NonOverflow: the observed range, under a scale that no value overflows.

A power-of-two scale is rounded to the nearest power, so it can come out too small for the range; then the next one up
is taken: pos = floor(-log2 scale) instead of round(-log2 scale). Other scale rules give the observed range as it is.
"""

from __future__ import annotations

import numpy as np

from quark.numerics.affine import Grid
from quark.numerics.array import Operand
from quark.observers import minmax
from quark.observers.mse import representable
from quark.observers.statistics import Statistic


def search(statistic: Statistic, grid: Grid, symmetric: bool = True) -> tuple[float, float]:
    """The observed range, or the wider one of the next power-of-two scale where the nearest would overflow.

    Args:
        statistic: any statistic with ``lo`` and ``hi``.
        grid: the tensor's quantizer.
        symmetric: mirror the wider side before anything else.
    """
    lo, hi = fitted(*minmax.search(statistic, grid, symmetric), grid)
    return float(lo), float(hi)


def fitted(lo: Operand, hi: Operand, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """The ranges [lo, hi] (any shape), widened to those of the next power-of-two scale where the nearest overflows."""
    lo, hi = np.asarray(lo, np.float64), np.asarray(hi, np.float64)
    if grid.scale_rule != "power_of_two":
        return lo, hi
    scale, zero_point = grid.parameters(lo, hi)
    low, high = representable(scale, zero_point, grid)
    fits = (low <= lo) & (hi <= high)
    wider_low, wider_high = representable(2 * scale, zero_point, grid)
    return np.where(fits, lo, wider_low), np.where(fits, hi, wider_high)
