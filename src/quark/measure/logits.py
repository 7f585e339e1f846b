"""Logits beside boxes, as detectors of the DETR family give them: how they become scores of classes.

    sigmoid   one logit a class, below zero for nearly all boxes (RT-DETR, Deformable DETR)
    softmax   one class more, which says that a box is empty and wins in most of them (DETR, YOLOS)

The float model's values decide. Such boxes are a set: what a quantized model finds may be in another row.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from quark.dataclass import dataclass

EMPTY = 0.5  # share of the boxes that are empty, at least
CONFIDENT = 0.3  # score of a detection


@dataclass(frozen=True)
class Reading:
    """How logits become scores; ``background``: the class of empty boxes, where it is softmax."""

    function: Literal["sigmoid", "softmax"]
    background: int = -1

    def scores(self, rows: np.ndarray) -> np.ndarray:
        """Scores 0..1 of logits [boxes, classes], without the background; where a logit is not finite, 0."""
        if self.function == "sigmoid":
            return np.nan_to_num(sigmoid(rows))
        return np.nan_to_num(np.delete(softmax(rows), self.background, axis=1))


def reading_of(rows: np.ndarray) -> Reading | None:
    """How logits [boxes, classes] of a float model are read; None: these are no logits of mostly empty boxes."""
    if not np.isfinite(rows).all() or rows.min() >= 0:
        return None
    if np.mean(sigmoid(rows).max(1) < CONFIDENT) >= EMPTY:
        return Reading("sigmoid")
    chances = softmax(rows)
    winners = np.bincount(chances.argmax(1), minlength=rows.shape[1])
    background = int(winners.argmax())
    sure = np.mean(chances[:, background] > 1 - CONFIDENT) >= EMPTY
    return Reading("softmax", background) if rows.shape[1] > 1 and sure else None


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return np.asarray(0.5 + 0.5 * np.tanh(x.astype(np.float64) / 2))


def softmax(rows: np.ndarray) -> np.ndarray:
    """Over the last axis; a row with values that are not finite comes out as NaN."""
    with np.errstate(invalid="ignore"):
        shifted = np.exp(rows.astype(np.float64) - rows.max(-1, keepdims=True))
        return np.asarray(shifted / shifted.sum(-1, keepdims=True))
