"""Entropy: the clipping threshold whose quantized distribution is nearest to the distribution itself.

    t* = argmin_t  KL(P_t || Q_t),   KL(p || q) = Σ p log(p / q)

over 2048 to 4096 equal bins of |x| (Migacz, "8-bit inference with TensorRT", GTC 2017). P_t is the histogram up to t
with everything beyond added to its last bin. Q_t is what quantization keeps of the histogram up to t: the count of
all bins that share a code, spread evenly over those that are not empty. Codes come from the tensor's own quantizer,
so 8 bits are 8 bits. Thresholds go from 128 bins up to the largest |x| in steps of 1/8 octave, then by 1/16, 1/32 and
1/64 around the best.

Two departures from the original. Values that count as zero are left out: zero is always exact, and a ReLU makes so
many that they drown the rest. And a threshold under which the squared error exceeds that of the full range is not
taken: with few samples the divergence prefers to clip half of the values.

Not handled: a threshold for each side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quark.numerics.affine import Grid, fake_quantize
from quark.observers.histogram import Histogram
from quark.observers.mse import range_errors
from quark.observers.percentile import clipped

NEVER = 1e-4
STEPS_PER_OCTAVE = 8
FAVOURITES = 12
FINE_STEPS = (1 / 16, 1 / 32, 1 / 64)


def search(statistic: Histogram, grid: Grid, levels: int = 128, symmetric: bool = False) -> tuple[float, float]:
    """The range of least divergence, no wider than the data; ``symmetric``: its wider side on both sides.

    Args:
        statistic: histogram of the values.
        grid: the tensor's quantizer.
        levels: the smallest threshold keeps this many bins.
        symmetric: mirror the wider side (``CalibTensorRangeSymmetric``).
    """
    lo, hi = _least_divergence(statistic, grid, levels, False)
    widest = max(-lo, hi)
    return (-widest, widest) if symmetric else (lo, hi)


def search_both(statistic: Histogram, grid: Grid, levels: int = 128) -> tuple[float, float]:
    """The range of least KL(P || Q) + KL(Q || P) (Jeffreys): where Jain et al. (MLSys 2020) start their thresholds.

    Args:
        statistic, grid, levels: as for ``search``.
    """
    return _least_divergence(statistic, grid, levels, True)


def _least_divergence(statistic: Histogram, grid: Grid, levels: int, both: bool) -> tuple[float, float]:
    """The range of least divergence, one-sided or ``both`` ways."""
    counts, width = magnitudes(statistic)
    if counts.size <= levels or not width:
        return statistic.lo, statistic.hi
    divergences = Divergences(statistic, grid, counts, width, both)
    found = {bins: divergences.at(bins) for bins in _coarse(levels, counts.size)}
    for step in FINE_STEPS:
        best = min(found, key=found.__getitem__)
        near = (round(best * 2.0**way) for way in (step, -step))
        found.update((bins, divergences.at(bins)) for bins in near if levels <= bins <= counts.size)
    return _fair(statistic, grid, [clipped(statistic, bins * width) for bins in sorted(found, key=found.__getitem__)])


def _coarse(levels: int, most: int) -> list[int]:
    """Numbers of bins from all of them down to ``levels``; the larger of equals is to win, so it comes first."""
    steps = range(int(np.log2(most / levels) * STEPS_PER_OCTAVE) + 1)
    return sorted({levels, *(round(most * 2.0 ** (-k / STEPS_PER_OCTAVE)) for k in steps)}, reverse=True)


def _fair(statistic: Histogram, grid: Grid, ranges: list[tuple[float, float]]) -> tuple[float, float]:
    """The first range whose squared error does not exceed that of the full range."""
    full = statistic.lo, statistic.hi
    bound, *errors = range_errors(statistic, grid, [full, *ranges[:FAVOURITES]])
    return next((span for span, error in zip(ranges, errors, strict=False) if error <= bound), full)


def magnitudes(statistic: Histogram) -> tuple[np.ndarray, float]:
    """Counts of |x| in equal bins from 0 on, and their width: a power of two, in which the histogram's bins nest.

    The last bin holds the largest |x|. Values that count as zero are left out.
    """
    largest = max(-statistic.lo, statistic.hi)
    if not largest:
        return np.zeros(0), 0.0
    width = 2.0 ** (np.floor(np.log2(largest)) + 1) / (2 * statistic.per_octave)
    left, _, counts = statistic.magnitude_bins()
    return np.bincount((left / width).astype(np.int64), weights=np.where(left > 0, counts, 0)), float(width)


@dataclass(frozen=True)
class Divergences:
    """KL(P_t || Q_t) as a function of the number of bins below t."""

    statistic: Histogram
    grid: Grid
    counts: np.ndarray
    width: float
    both: bool = False

    def at(self, bins: int) -> float:
        """The divergence when the first ``bins`` bins are kept."""
        kept = self.counts[:bins]
        if not kept.any():
            return np.inf
        p = kept.copy()
        p[-1] += self.counts[bins:].sum()
        starts = self._first_bins(bins)
        filled = np.add.reduceat(p > 0, starts, dtype=np.float64)
        mass = np.add.reduceat(kept, starts) / np.maximum(filled, 1)
        seen = p > 0
        q = np.maximum(np.repeat(mass, np.diff(starts, append=bins))[seen], NEVER)
        p = p[seen] / p.sum()
        weights = p - q / q.sum() if self.both else p
        return float(np.sum(weights * np.log(p * q.sum() / q)))

    def _first_bins(self, bins: int) -> np.ndarray:
        """The first bin of every code."""
        scale, zero_point = self.grid.parameters(*clipped(self.statistic, bins * self.width))
        centers = ((np.arange(bins) + 0.5) * self.width).astype(np.float32)
        codes = fake_quantize(centers, scale, zero_point, self.grid.format)
        return np.flatnonzero(np.diff(codes, prepend=np.nan))
