"""What a user reads off an output, and how much of it a quantized model keeps: without labels.

SQNR weighs every element alike. A user of a classifier reads which class wins, one of a detector which few boxes are
confident; noise that leaves these alone costs nothing, and noise that moves them is not in the decibels. So the values
of the float model decide what an output looks like, and its *answers* are compared:

    classes   [rows, classes], or a distribution along an axis: the class that wins, in rows where the float model is
              sure of it (probability >= 1/2), in all rows where hardly any is
    scores    values in 0..1 that are seldom high, alone or as columns of detections [rows, coordinates + scores] (or
              channels of a map): those above a threshold; kept is F1 = 2 tp / (2 tp + fp + fn), where a value that
              stays within the slack of the threshold counts as kept. Where a first column times another is above it,
              the first is an objectness and the products are the scores.
    labels    integers: the share of equal ones
    values    anything else: only the distance says how near it is

What is not handled: answers that a program computes from several outputs (boxes decoded from anchors): a metric of the
user's own does that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Kind = Literal["classes", "scores", "labels", "values"]

SURE = 0.5  # probability of a winner that a user would act on
CONFIDENT, SLACK = 0.3, 0.1  # threshold of a detection, and how far below it the other model may put the same one
SELDOM = 0.2  # scores: the share of confident values that a detector stays below
VOCABULARY = 256  # rank 3: as many columns look like logits over a vocabulary, fewer like features
COORDINATES = 2  # a detection has at least so many columns that are no scores
ROWS = 32  # detections come in many rows
MAJORITY = 0.9  # a class that wins this share of many rows is the background
FEW = 10  # answers, below which nothing can be said about a share of them


@dataclass
class Answers:
    """The answers of one output over samples, as running sums.

    Attributes:
        kind: what the output looks like, decided by the float model's first sample.
        kept, total: answers that both give, and all of them, per sample; for scores 2 tp and 2 tp + fp + fn.
        unlike: samples in which the outputs have different shapes (another number of detections).
    """

    kind: Kind | None = None
    kept: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    unlike: int = 0

    def update(self, reference: np.ndarray, value: np.ndarray) -> None:
        """Add one sample's output of the float model and of the other."""
        self.kind = self.kind or kind_of(reference)
        if reference.shape != value.shape:
            self.unlike += 1
            pair = _sizes(reference, value)
        elif not reference.size:
            pair = 0.0, 0.0
        else:
            pair = _COUNTED[self.kind](reference, value)
        self.kept.append(pair[0])
        self.total.append(pair[1])

    @property
    def share(self) -> float | None:
        """Share of the float model's answers that are kept, 0..1; None where there are too few to tell."""
        total = sum(self.total)
        return sum(self.kept) / total if total >= FEW else None

    @property
    def error(self) -> float:
        """Standard error of the share over samples (ratio estimator); NaN from a single sample."""
        kept, total = np.asarray(self.kept), np.asarray(self.total)
        share = self.share
        if share is None or len(kept) < 2:
            return float("nan")
        parts = (kept - share * total) / total.sum()
        return float(np.sqrt(len(parts) / (len(parts) - 1) * np.sum(parts**2)))


def kind_of(x: np.ndarray) -> Kind:
    """What an output of this shape and these values looks like."""
    if x.dtype.kind in "iub":
        return "labels"
    if x.dtype.kind != "f" or x.ndim < 2 or not x.size or not np.isfinite(x).all():
        return "values"
    if _class_axis(x) is not None:
        return "scores" if _background(x) is not None else "classes"
    if _score_columns(x) is not None:
        return "scores"
    logits = x.shape[-1] >= 2 if x.ndim == 2 else x.ndim == 3 and x.shape[-1] >= VOCABULARY
    return "classes" if logits and not _bounded(x) else "values"


def _bounded(x: np.ndarray) -> bool:
    return bool(x.min() >= -1e-4 and x.max() <= 1 + 1e-4)


def _class_axis(x: np.ndarray) -> int | None:
    """The axis along which the values are distributions."""
    if not _bounded(x):
        return None
    fits = (axis for axis in (-1, 1) if x.shape[axis] >= 2 and np.allclose(x.sum(axis), 1, atol=1e-3))
    return next(fits, None)


def _background(x: np.ndarray) -> int | None:
    """The class that wins nearly all of many rows, or None."""
    axis = _class_axis(x)
    if axis is None or x.size // x.shape[axis] < ROWS:
        return None
    winners = np.bincount(x.argmax(axis).ravel(), minlength=x.shape[axis])
    return int(winners.argmax()) if winners.max() >= MAJORITY * winners.sum() else None


def _score_columns(x: np.ndarray) -> np.ndarray | None:
    """The part of an output that holds seldom high values of 0..1: all of it, or the columns of detections that do."""
    if _bounded(x):
        return x if x.size >= ROWS and np.mean(x >= CONFIDENT) <= SELDOM else None
    if x.ndim not in (3, 4):
        return None
    rows = _as_rows(x)
    inside = _scoring(rows)
    plausible = len(rows) >= ROWS and inside.any() and np.sum(~inside) >= COORDINATES
    return rows[:, inside] if plausible else None


def _scoring(rows: np.ndarray) -> np.ndarray:
    """Which columns stay in 0..1 and are not constant."""
    lowest, highest = rows.min(0), rows.max(0)
    return np.asarray((lowest >= -1e-4) & (highest <= 1 + 1e-4) & (highest > lowest))


def _as_rows(x: np.ndarray) -> np.ndarray:
    """[detections, columns] of an output in either order, or of a map [batch, columns, height, width]."""
    columns_first = x.ndim == 4 or x.shape[1] < x.shape[2]
    moved = np.moveaxis(x, 1, -1) if columns_first else x
    return moved.reshape(-1, moved.shape[-1])


def _classes(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    axis = _class_axis(x)
    if axis is None:
        axis, sure = -1, _softmax_peak(x) >= SURE
    else:
        sure = x.max(axis) >= SURE
    same = x.argmax(axis) == np.where(np.isfinite(y), y, -np.inf).argmax(axis)
    chosen = sure if np.mean(sure) >= 0.1 else np.ones_like(sure)
    return float(np.sum(same & chosen)), float(np.sum(chosen))


def _softmax_peak(x: np.ndarray) -> np.ndarray:
    """The largest probability of each row of logits."""
    shifted = x.astype(np.float64) - x.max(-1, keepdims=True)
    return np.asarray(1 / np.exp(shifted).sum(-1))


def _scores(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    a, b = _detections(x, x), _detections(x, y)
    found, kept = a >= CONFIDENT, b >= CONFIDENT
    hits = np.sum(found & (b >= CONFIDENT - SLACK)) + np.sum(kept & (a >= CONFIDENT - SLACK))
    return float(hits), float(np.sum(found) + np.sum(kept))


def _detections(like: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The scores of an output, read as ``like`` is: no background; columns behind an objectness multiplied by it."""
    background = _background(like)
    if background is not None:
        axis = _class_axis(like)
        return np.delete(x, background, axis=axis if axis is not None else -1)
    if _bounded(like):
        return x
    rows, ours = _as_rows(like), _as_rows(x)
    inside = _scoring(rows)
    columns, ours = rows[:, inside], ours[:, inside]
    conditional = bool(np.any(columns[:, :1] * columns[:, 1:] >= CONFIDENT))
    return ours[:, :1] * ours[:, 1:] if conditional else ours


def _labels(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    return float(np.sum(x == y)), float(x.size)


def _values(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    return 0.0, 0.0


def _sizes(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Rows that cannot be matched: at most the smaller number of the larger one is kept."""
    return float(min(x.size, y.size)), float(max(x.size, y.size))


_COUNTED = {"classes": _classes, "scores": _scores, "labels": _labels, "values": _values}
