"""Whether one tensor is another one times a scale per channel, as equalization and smoothing leave it.

With running sums over samples, for channels along the second and along the last axis: the scale of channel c is what
its values vary by, cov(x_c, y_c) / var(y_c). A scale holds for the mean too: hardly any Σ (x_c − s_c y_c)² is left.
A shift, which quantization gives channels that hardly vary, leaves all of it; noise leaves much of the signal too. The
scale that then makes y_c the most like x_c is Σ x_c y_c / Σ y_c², and leaves the error Σ x_c² − (Σ x_c y_c)² / Σ y_c².
"""

from __future__ import annotations

from dataclasses import field

import numpy as np

from quark.dataclass import dataclass
from quark.numerics import metrics

FITTED = 0.1  # a scale that leaves less than this part of the error, and of the values, is what was done
EVIDENCE = 4  # values per channel, below which a scale fits anything
AXES = (1, -1)
TINY = 1e-9  # a variance, of the energy, that is rounding


@dataclass
class Scaling:
    """The sums: ``[5, channels]`` of xx, xy, yy, x and y by axis, and of all values the error as it stands."""

    sums: dict[int, np.ndarray] = field(default_factory=dict)
    noise: float = 0.0
    count: int = 0

    def update(self, x: np.ndarray, y: np.ndarray) -> None:
        """Add one sample's values of both, of one shape."""
        x, y = x.astype(np.float64), y.astype(np.float64)
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            x, y = np.full_like(x, np.nan), np.full_like(y, np.nan)  # no scale explains it
        self.noise += float(np.square(x - y).sum())
        self.count += x.size
        one = np.ones(())
        for axis in AXES if x.ndim > 1 else ():
            over = tuple(k for k in range(x.ndim) if k != axis % x.ndim)
            found = np.stack([(a * b).sum(over) for a, b in ((x, x), (x, y), (y, y), (x, one), (y, one))])
            before = self.sums.get(axis)
            if before is not None and before.shape == found.shape:
                found += before
            self.sums[axis] = found

    @property
    def found(self) -> bool:
        """Whether a scale per channel explains nearly all of the difference."""
        return self.sqnr is not None

    @property
    def sqnr(self) -> float | None:
        """SQNR in dB once the scale is undone; None where no scale explains the difference."""
        found = []
        for xx, xy, yy, x, y in self.sums.values():
            each = self.count / len(xx)
            varied = yy - y * y / each
            scale = np.divide(xy - x * y / each, varied, out=np.ones_like(xy), where=varied > TINY * yy)
            scaled = float((xx - 2 * scale * xy + scale * scale * yy).sum())
            if each >= EVIDENCE and scaled < FITTED * min(self.noise, float(xx.sum())):
                left = float((xx - np.divide(xy * xy, yy, out=np.zeros_like(xy), where=yy > 0)).sum())
                found.append(metrics.decibel(float(xx.sum()), max(left, 0.0)))
        return max(found, default=None)
