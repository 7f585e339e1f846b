"""Cross-layer equalization: scale channels between two layers so that both can share one scale per tensor.

    y = W2 · f(W1 x + b1) = (W2 S⁻¹) · f(S W1 x + S b1)      for every f with f(s·x) = s·f(x), s > 0 (ReLU)

With r1 the largest magnitude that makes channel c in W1 and r2 the one that reads it in W2, s = sqrt(r2 / r1) gives
both
the range sqrt(r1 r2). For a depthwise layer between two others, t = (r1 r2 r3)^(1/3) and all three get the range t.

Source: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section 4.1.

Beyond the paper, as AMD Quark does it: the bias counts as one more weight of its channel, divided by a factor that
depends on how large it is, so that a channel is not blown up until its bias needs a coarse scale; and a channel whose
weights are small on both sides is left alone.

Not handled: activation functions that do not scale with their input (SiLU, Clip with an upper bound).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

PIECE = 1 << 14  # weights that are looked at together


def magnitudes(weight: np.ndarray, bias: np.ndarray | None = None, axis: int = 0) -> np.ndarray:
    """Largest magnitude of every channel.

    Args:
        weight: the weights, channel c where ``axis`` is at c; not transposed, which takes longer than all else.
        bias: [C]; counts as one more weight, divided by ``bias_divisor``.
        axis: along which the channels lie.
    """
    first = (weight.min(0), weight.max(0)) if axis else (weight, weight)
    others = tuple(place for place in range(first[0].ndim) if place != max(axis - 1, 0))
    largest = np.maximum(first[1].max(others), -first[0].min(others)).astype(np.float64)
    if bias is not None:
        column = np.abs(bias.astype(np.float64)).reshape(-1, 1)
        divisor = bias_divisor(np.moveaxis(weight, axis, 0).reshape(len(largest), -1), column)
        largest = np.maximum(largest, column[:, 0] / divisor)
    return largest


def bias_divisor(weights: np.ndarray, bias: np.ndarray) -> float:
    """How much less a bias counts than a weight; larger for biases that are large beside their weights.

    Args:
        weights: [C, n]; their magnitudes count.
        bias: [C, 1], magnitudes.
    """
    largest, widest = bias.max(), float(max(weights.max(), -weights.min()))
    small = bool(largest < 10 and widest and largest / widest < 20)
    mean, above = _factors(weights, bias, (100,) if small else (30, 15))
    if mean is None:
        return 2
    if small:
        return 5 if mean > 1000 or above[0] else 2
    if mean > 500 or above[0]:
        return 20
    return 10 if mean > 100 or above[1] else 5


def _factors(weights: np.ndarray, bias: np.ndarray, bounds: tuple[float, ...]) -> tuple[float | None, tuple[bool, ...]]:
    """The mean of bias / |weight| over the weights that are not zero, and whether their median exceeds each bound.

    In pieces that stay in the cache. A median is found by counting; only where a bound lies between both middles, all
    are sorted. Without a weight the mean is None.
    """
    count, total, more = 0, 0.0, [0] * len(bounds)
    for found in _pieces(weights, bias):
        count, total = count + found.size, total + float(found.sum())
        more = [before + int(np.count_nonzero(found > bound)) for before, bound in zip(more, bounds, strict=True)]
    if not count:
        return None, (False,) * len(bounds)
    above = (
        2 * many > count if 2 * many != count else _median(weights, bias) > bound
        for many, bound in zip(more, bounds, strict=True)
    )
    return total / count, tuple(above)


def _pieces(weights: np.ndarray, bias: np.ndarray) -> Iterator[np.ndarray]:
    """bias / |weight| where the weight is not zero, float64, some channels at a time."""
    step = max(1, PIECE // max(weights.shape[1], 1))
    for start in range(0, len(weights), step):
        rows = np.abs(weights[start : start + step].astype(np.float64))
        alive = rows != 0
        if alive.all():
            yield (bias[start : start + step] / rows).reshape(-1)
        else:
            yield (np.broadcast_to(bias[start : start + step], rows.shape)[alive]) / rows[alive]


def _median(weights: np.ndarray, bias: np.ndarray) -> float:
    return float(np.median(np.concatenate(list(_pieces(weights, bias)))))


def pair_scales(head: np.ndarray, tail: np.ndarray, threshold: float = 0.0, part: float = 1.0) -> np.ndarray:
    """s for two layers: multiply the head's channels by it, divide the tail's.

    Args:
        head, tail: [C], magnitudes of the channels.
        threshold: channels whose magnitudes sum to less stay as they are.
        part: how far to go, as an exponent of s: 1 makes both sides equal, 0 changes nothing.
    """
    live = (head > 0) & (tail > 0) & (head + tail >= threshold)
    return (np.where(live, tail, 1) / np.where(live, head, 1)) ** (part / 2)


def triple_scales(
    head: np.ndarray, depthwise: np.ndarray, tail: np.ndarray, part: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """(s1, s2) for three layers: multiply the head by s1, the depthwise layer by s2 / s1, divide the tail by s2.

    Args:
        head, depthwise, tail: [C], magnitudes of the channels.
        part: how far to go, as in ``pair_scales``.
    """
    live = (head > 0) & (depthwise > 0) & (tail > 0)
    first, middle, last = (np.where(live, side, 1) for side in (head, depthwise, tail))
    mean = np.cbrt(first * middle * last)
    return (mean / first) ** part, (last / mean) ** part
