"""Distribution: give the values the spread that the codes of an 8-bit float format have.

    "same":  s = σ(x) / σ(codes)          "p3":  s = (σ(∛x) / σ(∛codes))³
    range = [-s max, s max]   with max the largest value of the format

σ(codes) is over all finite values of the format. A small float format has most of its codes near zero, as the data
have, so matching spreads uses the codes well; the largest values may be clipped. FP8 only.
"""

from __future__ import annotations

import numpy as np

from quark.errors import ConfigError, check_name
from quark.numerics.affine import Coding, Grid
from quark.numerics.formats import FORMATS, Float, Format
from quark.observers.histogram import Histogram

SPREADS = {"same": 1.0, "p3": 1 / 3}
BITS = 8  # of a code: few enough to list, enough for a distribution


def fits(row: Format) -> bool:
    """Whether a format has codes whose spread can be matched."""
    return isinstance(row, Float) and row.bits == BITS


def search(statistic: Histogram, grid: Grid, scenario: str = "same") -> tuple[float, float]:
    """The range under which the data spread like the codes.

    Args:
        statistic: histogram of the values.
        grid: a quantizer to an 8-bit float.
        scenario: "same", or "p3" to compare cube roots.

    Raises:
        ConfigError: another format, or an unknown scenario.
    """
    if not fits(grid.format):
        known = ", ".join(name for name, row in FORMATS.items() if fits(row))
        raise ConfigError(
            f"the calibration method Distribution works for the FP8 data types only ({known}), and this tensor is "
            f"{grid.format.name}: choose MinMax, Percentile, MinMSE or Entropy for it"
        )
    check_name("Scenario", scenario, SPREADS)
    power = SPREADS[scenario]
    codes = _codes(grid)
    values, weights = statistic.points()
    scale = (_spread(values, weights, power) / _spread(codes, np.ones(codes.size), power)) ** (1 / power)
    largest = scale * grid.format.max
    return -largest, largest


def _codes(grid: Grid) -> np.ndarray:
    """All finite values of the format."""
    values = Coding(grid.format).dequantize(np.arange(256, dtype=np.uint8), np.float32(1), 0)
    return values[np.isfinite(values)]


def _spread(values: np.ndarray, weights: np.ndarray, power: float) -> float:
    """Weighted standard deviation of sign(x) |x|^power."""
    bent = np.sign(values) * np.abs(values, dtype=np.float64) ** power
    mean = np.average(bent, weights=weights)
    return float(np.sqrt(np.average(np.square(bent - mean), weights=weights)))
