"""The distance of two tensors as running sums over samples: one sample is in memory at a time.

Over all samples, with reference values ``x`` and others ``y``:

    SQNR   10 log10(Σ x² / Σ (x − y)²), dB        cosine   Σ xy / √(Σ x² Σ y²)
    L2     √Σ (x − y)²                            PSNR     10 log10(max|x|² / mean (x − y)²), dB

    ± of the SQNR, dB: 10 / ln 10 · √(n / (n − 1) Σ (noiseᵢ / noise − signalᵢ / signal)²), the standard error of a ratio
    of sums over n samples: a few samples that are silent, or that one value decides, say little of others

and of each channel about its mean, which says whether one of them has lost all though the whole is near:

    10 log10(Σ (x − mean x)² / Σ (x − y)²), dB

A regression of several figures in different units, or a detector's raw boxes, objectness and classes, hold their
channels in one tensor, whose decibels are those of the largest. A channel that never moves says nothing, nor does one
that hardly moves beside its own mean, such as the score of a class that never occurs. The channels are along axis 1 or
the last one, the shorter of them, in square maps 1, where they are few; many in few rows are features or a state, not
figures.
"""

from __future__ import annotations

import math
from dataclasses import field, fields

import numpy as np

from quark.dataclass import dataclass
from quark.numerics import metrics

#: Values that are looked at in float64 at a time.
PIECE = 1 << 23


@dataclass
class Distance:
    """The measures above, as running sums over samples."""

    signal: float = 0.0
    noise: float = 0.0
    product: float = 0.0
    other: float = 0.0
    peak: float = 0.0
    count: int = 0
    samples: int = field(default=0, compare=False)  # how values come in samples makes no other distance
    signals: float = field(default=0.0, compare=False)  # Σ signalᵢ², Σ signalᵢ · noiseᵢ and Σ noiseᵢ²
    mixed: float = field(default=0.0, compare=False)
    noises: float = field(default=0.0, compare=False)

    def update(self, reference: np.ndarray, value: np.ndarray) -> None:
        """Add one sample's values of a tensor. Infinities that both have (masks) agree and are left out."""
        whole, other, signal, noise, before = np.ravel(reference), np.ravel(value), 0.0, 0.0, self.count
        for start in range(0, whole.size, PIECE):
            x, y = (one[start : start + PIECE].astype(np.float64) for one in (whole, other))
            if not np.isfinite(_peak(x)):
                x, y = metrics.without_masks(x, y)
            with np.errstate(invalid="ignore", over="ignore"):  # an infinity that only one has is infinite noise
                error = x - y
                signal, noise = signal + _dot(x, x), noise + _dot(error, error)
                self.product, self.other = self.product + _dot(x, y), self.other + _dot(y, y)
            self.peak = max(self.peak, _peak(x))
            self.count += x.size
        with np.errstate(invalid="ignore", over="ignore"):
            self.signal, self.noise = self.signal + signal, self.noise + noise
            self.signals, self.noises = self.signals + signal * signal, self.noises + noise * noise
            self.mixed += signal * noise
        self.samples += self.count > before

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
    def sqnr_error(self) -> float:
        """Standard error of ``sqnr`` over samples, dB; NaN from a single sample, and where there is no noise."""
        if self.samples < 2 or self.broken or not (self.signal > 0 and self.noise > 0):
            return float("nan")
        noise, signal = self.noise, self.signal  # divided one by one: their squares may be out of range
        parts = self.noises / noise / noise - 2 * self.mixed / noise / signal + self.signals / signal / signal
        spread = max(parts, 0.0)  # where all samples are alike it is 0 but for rounding
        return 10 / math.log(10) * math.sqrt(self.samples / (self.samples - 1) * spread)

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


# ---- channels --------------------------------------------------------------------------------------------------------

MOST = 128
"""Channels that are told apart: a detector has 85, a vocabulary thousands."""
FIGURES = 32
"""The same of an output with fewer rows than channels."""
FEWEST = 16
"""Values from which a channel's movement is known."""
LOST = 3.0
"""dB about the mean, below which hardly more is left than the mean."""
STILL = 1e-6
"""Movement beside the energy of the channel, below which it is none: a thousandth of its own mean."""


@dataclass
class ChannelSums:
    """Running sums over samples, a number per channel of each."""

    axis: int | None = None
    count: int = 0
    sums: np.ndarray | float = 0.0
    squares: np.ndarray | float = 0.0
    noise: np.ndarray | float = 0.0
    highest: np.ndarray | int = 0

    def update(self, reference: np.ndarray, value: np.ndarray) -> None:
        """Add one sample of an output of the float model and of the other; of one without channels nothing."""
        axis = self.axis if self.count else axis_of(reference)
        sums = None if axis is None else _sums(reference, value, axis)
        if axis is None or sums is None or (self.count and np.shape(self.sums) != np.shape(sums[0])):
            self.axis = None
            return
        self.axis, self.count = axis, self.count + reference.size // len(sums[0])
        self.sums, self.squares, self.noise = self.sums + sums[0], self.squares + sums[1], self.noise + sums[2]
        winners = np.moveaxis(reference, axis, 0).reshape(len(sums[0]), -1).argmax(0)
        self.highest = self.highest + np.bincount(winners, minlength=len(sums[0]))

    @property
    def alone(self) -> bool:
        """Whether one channel is the highest everywhere: no class is, that others are compared with."""
        return self.axis is not None and bool(np.max(self.highest) == self.count)

    @property
    def lost(self) -> tuple[int, float] | None:
        """The channel that has lost most and its SQNR about its mean, in dB; None where none has lost all."""
        if self.axis is None or self.count < FEWEST:
            return None
        movement, squares = np.asarray(self.squares - np.square(self.sums) / self.count), np.asarray(self.squares)
        moving = movement > STILL * squares
        ratio = np.divide(movement, self.noise, out=np.full(movement.shape, np.inf), where=moving & (self.noise > 0))
        worst = int(ratio.argmin())
        found = metrics.decibel(float(movement[worst]), float(np.asarray(self.noise)[worst]))
        return (worst, found) if moving[worst] and found < LOST else None


def axis_of(x: np.ndarray) -> int | None:
    """The axis of an output's channels: 1 or the last one, the shorter; None where it has none that are few."""
    if x.dtype.kind != "f" or x.ndim < 2:
        return None
    axes = (1,) if x.ndim == 2 or x.shape[-1] == x.shape[-2] else (1, x.ndim - 1)
    most = {axis: MOST if x.size >= x.shape[axis] ** 2 else FIGURES for axis in axes}
    fit = [axis for axis in axes if 2 <= x.shape[axis] <= most[axis]]
    return min(fit, key=lambda axis: x.shape[axis], default=None)


def _sums(x: np.ndarray, y: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Of each channel: values, their squares, squared errors; None for other shapes, and for what is no number."""
    if x.shape != y.shape or axis >= x.ndim or not x.size:
        return None
    one, other = (np.moveaxis(array, axis, 0).reshape(x.shape[axis], -1).astype(np.float64) for array in (x, y))
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return None
    squares, noise = (np.einsum("cn,cn->c", array, array) for array in (one, one - other))
    return one.sum(1), squares, noise
