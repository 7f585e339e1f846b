"""Entropy: the clipping threshold whose quantized distribution is nearest to the distribution itself.

    t* = argmin_t  KL(P_t || Q_t),   KL(p || q) = Σ p log(p / q)

over 2048 to 4096 equal bins of |x| (Migacz, "8-bit inference with TensorRT", GTC 2017). P_t is the histogram up to t
with everything beyond added to its last bin. Q_t is what quantization keeps of the histogram up to t: the count of
all bins that share a code, spread evenly over those that are not empty. Codes come from the tensor's own quantizer,
so 8 bits are 8 bits. Two corrections to the original: values that count as zero are left out (zero is always exact,
and a ReLU makes so many that they drown the rest), and what chance alone adds to the divergence is taken off: (filled
bins - filled codes) / 2n, the mean of the likelihood-ratio statistic (Wilks 1938; Miller 1955), without which few
samples clip half of the range. A threshold whose squared error exceeds that of the full range is not taken.
Thresholds go from where every bin has a code of its own up to the largest |x|: first in steps of 1/8 octave, then bin
by bin at most 1/64 octave apart around the best.

Not handled: a threshold for each side.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from quark.numerics.affine import Grid, fake_quantize
from quark.observers.histogram import Histogram
from quark.observers.mse import range_error
from quark.observers.percentile import clipped

LEAST_BINS = 2048
NEVER = 1e-4
COARSE = 2.0 ** (-1 / 8)


def search(statistic: Histogram, grid: Grid, levels: int = 128) -> tuple[float, float]:
    """The range of least divergence, no wider than the data.

    Args:
        statistic: histogram of the values.
        grid: the tensor's quantizer.
        levels: the smallest threshold keeps this many bins (``NumQuantizedBins``).
    """
    counts, width = magnitudes(statistic)
    if counts.size <= levels or not width:
        return statistic.lo, statistic.hi
    find = partial(_best, statistic, grid, counts, width)
    first = find(_coarse(levels, counts.size))
    fine = np.unique(np.rint(first * 2.0 ** (np.arange(-8, 9) / 64)).astype(int))
    return clipped(statistic, width * find(fine[(fine >= levels) & (fine <= counts.size)]))


def _coarse(levels: int, most: int) -> np.ndarray:
    """Numbers of bins from all of them down to ``levels``, 8 to the octave."""
    steps = np.arange(int(np.log2(most / levels) * 8) + 1)
    return np.unique([*np.rint(most * COARSE**steps).astype(int), levels])


def magnitudes(statistic: Histogram) -> tuple[np.ndarray, float]:
    """Counts of |x| in equal bins from 0 on, and their width: a power of two, in which the histogram's bins nest.

    The last bin holds the largest |x|.
    """
    largest = max(-statistic.lo, statistic.hi)
    if not largest:
        return np.zeros(0), 0.0
    width = 2.0 ** (np.floor(np.log2(largest)) + 1) / (2 * LEAST_BINS)
    left, _, counts = statistic.magnitude_bins()
    counts = np.where(left > 0, counts, 0)
    return np.bincount((left / width).astype(np.int64), weights=counts), float(width)


def _best(statistic: Histogram, grid: Grid, counts: np.ndarray, width: float, candidates: np.ndarray) -> int:
    """The number of bins of least divergence that is no worse than clipping nothing; the largest of equals."""
    centers = ((np.arange(counts.size) + 0.5) * width).astype(np.float32)
    divergence = {}
    for bins in candidates[::-1]:
        scale, zero_point = grid.parameters(*clipped(statistic, bins * width))
        codes = fake_quantize(centers[:bins], scale, zero_point, grid.format)
        divergence[int(bins)] = _divergence(counts, bins, codes)
    bound = range_error(statistic, grid, statistic.lo, statistic.hi)
    ranked = sorted(divergence, key=divergence.__getitem__)
    fair = (bins for bins in ranked if range_error(statistic, grid, *clipped(statistic, bins * width)) <= bound)
    return next(fair, counts.size)


def _divergence(counts: np.ndarray, bins: int, codes: np.ndarray) -> float:
    """KL(P || Q) when the first ``bins`` bins are kept and quantized to ``codes``."""
    slice_, beyond = counts[:bins], counts[bins:].sum()
    if not slice_.any():
        return np.inf
    p = slice_.copy()
    p[-1] += beyond
    starts = np.flatnonzero(np.diff(codes, prepend=np.nan))
    lengths = np.diff(starts, append=bins)
    full = np.add.reduceat((p > 0).astype(np.float64), starts)
    mass = np.add.reduceat(slice_, starts) / np.maximum(full, 1)
    seen = p > 0
    q = np.maximum(np.repeat(mass, lengths)[seen], NEVER)
    chance = (seen.sum() - np.count_nonzero(full)) / (2 * p.sum())
    p = p[seen] / p.sum()
    return float(np.sum(p * np.log(p * q.sum() / q))) - chance
