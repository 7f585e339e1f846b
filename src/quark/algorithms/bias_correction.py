"""Bias correction: quantized weights and inputs shift the mean of every output channel; the bias takes it back.

    b' = b + E[y] − E[ŷ]        y = f32 layer on the float model's input, ŷ = quantized layer on the quantized one's

The means come from few samples. What the difference of a channel is worth follows from how it varies between them: with
standard error e a difference d counts as d · max(0, 1 − e² / d²), the positive part of James and Stein's estimate for
one mean, so that chance is not written into the model.

Source: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section 4.2 (here
with means measured on data).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from quark.numerics.formats import Format

#: A channel that shrank or grew by more has another fault.
LARGEST_GAIN = 1.5


def channel_means(samples: Iterable[np.ndarray], axis: int) -> np.ndarray:
    """[C]: the mean of every channel over samples and positions, in float64.

    Args:
        samples: arrays whose ``axis`` holds the channels; sizes elsewhere may differ from sample to sample.
    """
    total: np.ndarray | float = 0.0
    count = 0
    for sample in samples:
        rows = _rows(sample, axis)
        total = total + rows.sum(0, dtype=np.float64)
        count += len(rows)
    return np.asarray(total) / max(count, 1)


def shrunk(expected: np.ndarray, found: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[C]: the mean difference of every channel, less what chance explains.

    Args:
        expected, found: [samples, C], means per sample.
        sizes: [samples], how many positions each sample has. One sample says nothing of chance, and counts in full.
    """
    share = sizes / sizes.sum()
    each = expected - found
    mean = share @ each
    if len(each) < 2:
        return np.asarray(mean)
    square = (share**2 @ np.square(each - mean)) * len(each) / (len(each) - 1)
    return np.asarray(mean * np.maximum(0, 1 - square / np.maximum(np.square(mean), 1e-300)))


def gains(
    pairs: Iterable[tuple[np.ndarray, np.ndarray]], axis: int, means: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """[C]: how much of every channel's deviation from its mean is left, less what chance explains.

        g = Σ (y − E[y]) (ŷ − E[ŷ]) / Σ (y − E[y])²

    Args:
        pairs: (y, ŷ) of every sample.
        means: E[y] and E[ŷ], [C].
    """
    own, common = [], []
    for pair in pairs:
        y, found = (_rows(one, axis).astype(np.float64) - mean for one, mean in zip(pair, means, strict=True))
        own.append(np.square(y).sum(0))
        common.append((y * found).sum(0))
    square, product = np.array(own), np.array(common)
    total = np.maximum(square.sum(0), 1e-300)
    gain = product.sum(0) / total
    lost, count = gain - 1, len(square)
    if count < 2:
        return np.asarray(gain)
    error = np.square((product - gain * square) / total).sum(0) * count / (count - 1)
    return np.asarray(1 + lost * np.maximum(0, 1 - error / np.maximum(np.square(lost), 1e-300)))


def growth(wanted: Sequence[np.ndarray], found: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """[C]: the factors that give the channels of a quantized layer the deviations of the float one, within bounds.

    Args:
        wanted, found: y and ŷ of every sample, with the channels along ``axis``.
    """
    gain = gains(zip(wanted, found, strict=True), axis, (channel_means(wanted, axis), channel_means(found, axis)))
    return np.asarray(1 / np.clip(gain, 1 / LARGEST_GAIN, LARGEST_GAIN))


def room(weight: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, row: Format) -> np.ndarray:
    """By how much each element of a weight could grow before the codes of its grid end.

    Args:
        weight: the weight.
        scale, zero_point: of its elements; shapes that broadcast.
        row: the format, whose codes are taken as narrow ones.
    """
    ends = np.where(weight > 0, row.max - zero_point, zero_point - max(row.min, -row.max))
    return np.asarray(ends * scale / np.maximum(np.abs(weight.astype(np.float64)), 1e-30))


def _rows(sample: np.ndarray, axis: int) -> np.ndarray:
    rows = np.moveaxis(sample, axis, -1)
    return rows.reshape(-1, rows.shape[-1])


def corrected(bias: np.ndarray, lacking: np.ndarray) -> np.ndarray:
    """The bias [C] that moves the channels' means by what they lack."""
    return (bias.astype(np.float64) + lacking).astype(bias.dtype)
