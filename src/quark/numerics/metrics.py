"""Distances between a reference tensor and its quantized form, in float64.

mse = mean((x - y)^2)        l2 = |x - y|           cosine = <x, y> / (|x| |y|)
sqnr = 10 log10(sum(x^2) / sum((x - y)^2))  [dB]    psnr = 10 log10(peak^2 / mse)  [dB], peak = max|x|

Equal arrays have sqnr = psnr = inf, an infinity that only one of them has makes both -inf, a NaN makes them NaN.
Infinities that both have (masks) agree and are left out. Arrays of unlike shape are an error.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from quark.errors import DataError


def pair(reference: ArrayLike, other: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Both arrays as flat float64, after a check that they have one shape and at least one element.

    Infinities that both have at one place are left out.
    """
    x, y = np.asarray(reference), np.asarray(other)
    if x.shape != y.shape or x.size == 0:
        raise DataError(f"a metric needs two arrays of one shape with elements, not {x.shape} and {y.shape}")
    return without_masks(x.astype(np.float64).ravel(), y.astype(np.float64).ravel())


def without_masks(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two flat arrays without the infinities that both have at one place."""
    masked = np.isinf(x) & (x == y)
    return (x[~masked], y[~masked]) if masked.any() else (x, y)


def energy(x: np.ndarray) -> float:
    """Sum of the squares of a flat float64 array; inf where they do not fit."""
    with np.errstate(over="ignore"):
        return float(np.sum(np.square(x)))


def mse(reference: ArrayLike, other: ArrayLike) -> float:
    """Mean of the squared differences."""
    x, y = pair(reference, other)
    return energy(x - y) / max(x.size, 1)


def l2(reference: ArrayLike, other: ArrayLike) -> float:
    """Euclidean length of the difference."""
    x, y = pair(reference, other)
    return math.sqrt(energy(x - y))


def cosine(reference: ArrayLike, other: ArrayLike) -> float:
    """Cosine of the angle between the two, -1..1; two zero vectors agree (1), a zero and another do not (0).

    NaN where only one has an infinity, or either a NaN.
    """
    x, y = pair(reference, other)
    lengths = math.sqrt(energy(x)) * math.sqrt(energy(y))
    if lengths == 0:
        return float(not (x.any() or y.any()))
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.clip(np.dot(x, y) / lengths, -1, 1))


def sqnr(reference: ArrayLike, other: ArrayLike) -> float:
    """Signal-to-quantization-noise ratio in dB."""
    x, y = pair(reference, other)
    return decibel(energy(x), energy(x - y))


def psnr(reference: ArrayLike, other: ArrayLike) -> float:
    """Peak signal-to-noise ratio in dB; the peak is the largest magnitude of the reference."""
    x, y = pair(reference, other)
    peak = float(np.max(np.abs(x), initial=0.0))
    return decibel(peak * peak, energy(x - y) / max(x.size, 1))


def decibel(signal: float, noise: float) -> float:
    """10 log10(signal / noise); inf without noise, -inf without signal or under infinite noise, NaN for a NaN."""
    if math.isnan(signal + noise):
        return math.nan
    if noise == 0:
        return math.inf
    if signal == 0 or noise == math.inf:
        return -math.inf
    return 10 * (math.log10(signal) - math.log10(noise))


def median(values: np.ndarray) -> float:
    """The middle of [n] values, n > 0 (``np.median`` imports masked arrays, which takes longer than all layers of a
    ResNet-50)."""
    ascending = np.sort(values)
    return float(ascending[(len(ascending) - 1) // 2] + ascending[len(ascending) // 2]) / 2


def lowest_tenth(values: np.ndarray) -> float:
    """The value that a tenth of [n] values, n > 0, lies below, between its neighbours (``np.quantile`` takes ten times
    as long)."""
    ascending = np.sort(values)
    place = 0.1 * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return float(ascending[below] + (place - below) * (ascending[above] - ascending[below]))
