"""Bias correction: quantized weights and inputs shift the mean of every output channel; the bias takes it back.

    b' = b + E[y] − E[ŷ]        y = f32 layer on the float model's input, ŷ = quantized layer on the quantized one's

The means come from few samples. What the difference of a channel is worth follows from how it varies between them: with
standard error e a difference d counts as d · max(0, 1 − e² / d²), the positive part of James and Stein's estimate for
one mean, so that chance is not written into the model.

Source: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section 4.2 (here
with means measured on data).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def channel_means(samples: Iterable[np.ndarray], axis: int) -> np.ndarray:
    """[C]: the mean of every channel over samples and positions, in float64.

    Args:
        samples: arrays whose ``axis`` holds the channels; sizes elsewhere may differ from sample to sample.
    """
    total: np.ndarray | float = 0.0
    count = 0
    for sample in samples:
        rows = np.moveaxis(sample, axis, -1)
        rows = rows.reshape(-1, rows.shape[-1])
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


def corrected(bias: np.ndarray, lacking: np.ndarray) -> np.ndarray:
    """The bias [C] that moves the channels' means by what they lack."""
    return (bias.astype(np.float64) + lacking).astype(bias.dtype)
