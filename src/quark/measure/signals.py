"""Outputs that are a signal over two axes (the gains of a denoiser over time and frequency): no detections.

A gain is in 0..1 and seldom high, as the scores of a detector are, and comes in as many rows and columns. What tells
them apart: the columns of detections are different things (four coordinates, classes), while in a signal the next
column, and the next row, is the same thing a little further on. Maps of what is there or not (text, masks) are alike
in this, and are nearly always 0 or 1; gains take all values between.
"""

from __future__ import annotations

import numpy as np

PLACES = 8  # along both axes, from which neighbours can be told from others
ALIKE = 0.9  # correlation of neighbours, the middle one of all
LITTLE, MUCH = 0.1, 0.9  # between them a value says neither no nor yes
BETWEEN = 0.5  # share of the values above ``LITTLE`` that lie between, from which they are gains


def is_signal(x: np.ndarray) -> bool:
    """Whether an output [..., rows, columns] of finite values, in either order, is a signal over both axes."""
    picture = np.squeeze(x[0] if x.ndim > 2 else x)
    if picture.ndim != 2 or min(picture.shape) < PLACES:
        return False
    picture = picture.astype(np.float64)
    if picture.min() >= 0 and picture.max() <= 1:
        seen = picture[picture >= LITTLE]
        if not seen.size or np.mean(seen < MUCH) < BETWEEN:
            return False
    return neighbours(picture) >= ALIKE and neighbours(picture.T) >= ALIKE


def neighbours(picture: np.ndarray) -> float:
    """Correlation of each column with the next one, the median; 0 where all are constant."""
    moved = picture - picture.mean(0)
    size = np.sqrt((moved**2).sum(0))
    both = size[:-1] * size[1:]
    there = both > 0
    return float(np.median((moved[:, :-1] * moved[:, 1:]).sum(0)[there] / both[there])) if there.any() else 0.0
