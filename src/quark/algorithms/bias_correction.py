"""Bias correction: quantized weights and inputs shift the mean of every output channel; the bias takes it back.

    b' = b + E[y] − E[ŷ]        y = f32 layer on the float model's input, ŷ = quantized layer on the quantized one's

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


def corrected(bias: np.ndarray, expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """The bias [C] that moves the channels' means from ``found`` to ``expected``."""
    return (bias.astype(np.float64) + expected - found).astype(bias.dtype)
