"""The distance of two tensors as running sums over samples: one sample is in memory at a time.

Over all samples, with reference values ``x`` and others ``y``:

    SQNR   10 log10(Σ x² / Σ (x − y)²), dB        cosine   Σ xy / √(Σ x² Σ y²)
    L2     √Σ (x − y)²                            PSNR     10 log10(max|x|² / mean (x − y)²), dB
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from quark.dataclass import dataclass
from quark.numerics import metrics


@dataclass
class Distance:
    """The measures above, as running sums over samples."""

    signal: float = 0.0
    noise: float = 0.0
    product: float = 0.0
    other: float = 0.0
    peak: float = 0.0
    count: int = 0

    def update(self, reference: np.ndarray, value: np.ndarray) -> None:
        """Add one sample's values of a tensor. Infinities that both have (masks) agree and are left out."""
        x, y = reference.astype(np.float64).ravel(), value.astype(np.float64).ravel()
        if not np.isfinite(_peak(x)):
            x, y = metrics.without_masks(x, y)
        if not x.size:
            return
        with np.errstate(invalid="ignore", over="ignore"):  # an infinity that only one has is infinite noise
            error = x - y
            self.signal += _dot(x, x)
            self.noise += _dot(error, error)
            self.product += _dot(x, y)
            self.other += _dot(y, y)
        self.peak = max(self.peak, _peak(x))
        self.count += x.size

    def __add__(self, other: Distance) -> Distance:
        """The distance over the samples of both."""
        sums = {one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)}
        return Distance(**{**sums, "peak": max(self.peak, other.peak)})

    @property
    def broken(self) -> bool:
        """Whether one of the tensors is NaN or infinite where the other is not, or both are NaN."""
        return not np.isfinite(self.noise)

    @property
    def relative(self) -> float:
        """Noise over signal, which adds up over layers; infinite where a value that is not finite differs."""
        if self.broken:
            return float("inf")
        return self.noise / self.signal if self.signal else float(self.noise > 0)

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise, dB."""
        return metrics.decibel(self.signal, self.noise)

    @property
    def cosine(self) -> float:
        """Cosine similarity, -1..1; two zero tensors agree."""
        lengths = float(np.sqrt(self.signal * self.other))
        return float(np.clip(self.product / lengths, -1, 1)) if lengths else float(self.signal == self.other)

    @property
    def l2(self) -> float:
        """Euclidean distance."""
        return float(np.sqrt(self.noise))

    @property
    def psnr(self) -> float:
        """Peak signal to noise, dB."""
        return metrics.decibel(self.peak * self.peak, self.noise / max(self.count, 1))


def _peak(x: np.ndarray) -> float:
    """The largest magnitude; without an array of magnitudes beside it."""
    return float(np.maximum(x.max(), -x.min())) if x.size else 0.0


def _dot(x: np.ndarray, y: np.ndarray) -> float:
    """Without BLAS, whose threads would fight for the cores with those of ONNX Runtime."""
    return float(np.einsum("i,i->", x, y))
