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

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.numerics.affine import Coding, Grid
from quark.numerics.formats import Block
from quark.numerics.granularity import Channel
from quark.observers.histogram import Histogram
from quark.observers.mse import range_errors
from quark.observers.percentile import clipped

NEVER = 1e-4
STEPS_PER_OCTAVE = 8
FAVOURITES = 12
FINE_STEPS = (1 / 16, 1 / 32, 1 / 64)
#: Bins that are rounded in one piece.
AT_ONCE = 1 << 18


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
    if levels < 1:
        raise ConfigError(f"the setting levels of the calibration method entropy is {levels}; it must be 1 or more")
    counts, width = magnitudes(statistic)
    if counts.size <= levels or not width:
        return statistic.lo, statistic.hi
    divergences = Divergences(statistic, grid, counts, width, both)
    found = divergences.at(_coarse(levels, counts.size))
    for step in FINE_STEPS:
        best = min(found, key=found.__getitem__)
        near = (round(best * 2.0**way) for way in (step, -step))
        found.update(divergences.at([bins for bins in near if levels <= bins <= counts.size and bins not in found]))
    return _fair(statistic, grid, [clipped(statistic, bins * width) for bins in sorted(found, key=found.__getitem__)])


def _coarse(levels: int, most: int) -> list[int]:
    """Numbers of bins from all of them down to ``levels``; the larger of equals is to win, so it comes first."""
    steps = range(int(np.log2(most / levels) * STEPS_PER_OCTAVE) + 1)
    return sorted({levels, *(round(most * 2.0 ** (-k / STEPS_PER_OCTAVE)) for k in steps)}, reverse=True)


def _fair(statistic: Histogram, grid: Grid, ranges: list[tuple[float, float]]) -> tuple[float, float]:
    """The first range whose squared error does not exceed that of the full range."""
    full = statistic.lo, statistic.hi
    errors = range_errors(statistic, grid, [full, *ranges[:FAVOURITES]])
    bound = next(errors)
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
    """KL(P_t || Q_t) as a function of the number of bins below t.

    With c_i the counts, n their sum, S a set of bins that share a code, c_S and f_S its counts and its bins that are
    not empty, q_S = c_S / f_S and Q = Σ f_S q_S (the last bin counts what lies beyond it as well, in p, not in q):

        KL(P || Q) = 1/n Σ p_i log p_i  -  log n  +  log Q  -  1/n Σ_S p_S log q_S

    Sums over bins are differences of running sums; the sums over i need one pass for all thresholds.
    """

    statistic: Histogram
    grid: Grid
    counts: np.ndarray
    width: float
    both: bool

    def at(self, sizes: Sequence[int]) -> dict[int, float]:
        """The divergence for each number of bins that are kept, to 12 decimals: what is equal ties."""
        found: dict[int, float] = {}
        each = max(AT_ONCE // self.counts.size, 1)
        for start in range(0, len(sizes), each):
            part = sizes[start : start + each]
            firsts = self._first_bins(part)
            found.update((size, round(self._of(size, first), 12)) for size, first in zip(part, firsts, strict=True))
        return found

    @cached_property
    def _running(self) -> np.ndarray:
        """Sums [4, bins + 1] of counts, of bins that are not empty, of c log c and of log c, over the bins below."""
        logs = np.log(np.maximum(self.counts, 1))
        sums = np.zeros((4, self.counts.size + 1))
        np.cumsum([self.counts, self.counts > 0, self.counts * logs, logs], axis=1, out=sums[:, 1:])
        return sums

    def _of(self, size: int, starts: np.ndarray) -> float:
        """The divergence when ``size`` bins are kept and codes begin at ``starts``."""
        kept, total, last = self._running[:, size], self._running[0, -1], self.counts[size - 1]
        if not kept[0]:
            return np.inf
        edges = np.append(starts, size)
        at_edges = self._running[:2, edges]
        mass, filled = at_edges[:, 1:] - at_edges[:, :-1]
        full = last + total - kept[0]
        gained = np.log(full)  # the last bin of all holds the largest value: there is one
        filled[-1] += not last
        shared = mass.copy()
        shared[-1] += total - kept[0]
        level = np.maximum(mass / np.maximum(filled, 1), NEVER)
        height, levels = filled @ level, np.log(level)
        own = kept[2] - last * np.log(max(last, 1)) + full * gained
        one_way = (own - shared @ levels) / total + np.log(height / total)
        if not self.both:
            return float(one_way)
        logs = np.diff(self._running[3, edges])
        logs[-1] += gained - np.log(max(last, 1))
        return float(one_way + (level * (filled * (levels - np.log(height / total)) - logs)).sum() / height)

    def _first_bins(self, sizes: Sequence[int]) -> Iterator[np.ndarray]:
        """The first bin of every code, for each number of bins that are kept."""
        ranges = np.array([clipped(self.statistic, size * self.width) for size in sizes])
        scale, zero_point = self.grid.parameters(*ranges.T)
        centers = ((np.arange(max(sizes)) + 0.5) * self.width).astype(np.float32)
        every = np.broadcast_to(centers, (len(sizes), centers.size))
        for row, size in zip(self._rounded(every, scale, zero_point), sizes, strict=True):
            changes = np.flatnonzero(row[1:size] != row[: size - 1])
            yield np.concatenate([[0], changes + 1])

    def _rounded(self, rows: np.ndarray, scale: np.ndarray, zero_point: np.ndarray) -> np.ndarray:
        """Rows of values, each under a scale and a zero point of its own; blocks lie within a row."""
        form = self.grid.format
        if isinstance(form, Block):
            return np.stack([Coding(form).fake_quantize(*one) for one in zip(rows, scale, zero_point, strict=True)])
        return Coding(form, Channel(0)).fake_quantize(rows, scale, zero_point)
