"""Boxes among the outputs of detectors: in what form they are written, and how many confident ones another model keeps.

A form is decided by the float model; pixels and shares of the picture are alike, since overlap has no unit. Offsets
that a program turns into boxes afterwards (an exponential of a size, cells of a grid) are not boxes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Form = Literal["corners", "centre"]

COORDINATES = 4  # of a box
CONFIDENT, SLACK = 0.3, 0.1  # threshold of a detection, and how far below it the other model may put the same one
OVERLAP = 0.5  # intersection over union from which two boxes are the same: that of AP50
ORDERED = 0.99  # share of the rows whose second corner is below and right of the first
MIDDLE, WIDE = (
    (5, 95),
    1.5,
)  # percentiles between which the centres of boxes spread over so many times their median size


def form_of(boxes: np.ndarray) -> Form | None:
    """The form of boxes [rows, 4]: x1 y1 x2 y2, or x y of the centre, width and height; None: these are not boxes."""
    if not np.isfinite(boxes).all():
        return None
    form = likelier(boxes)
    low, high = corners(boxes, form)
    return form if ordered_or_centred(boxes) and _spread((low + high) / 2, high - low) else None


def ordered_or_centred(boxes: np.ndarray) -> bool:
    """Whether boxes [rows, 4] have sizes above 0 in their form."""
    return bool(np.isfinite(boxes).all() and (likelier(boxes) == "corners" or (boxes[:, 2:] > 0).all()))


def likelier(boxes: np.ndarray) -> Form:
    """The form of what is known to be boxes [rows, 4]."""
    return "corners" if np.mean((boxes[:, 2:] > boxes[:, :2]).all(1)) >= ORDERED else "centre"


def _spread(centres: np.ndarray, sizes: np.ndarray) -> bool:
    reach = np.ptp(np.percentile(centres, MIDDLE, axis=0), axis=0)
    return bool((reach >= WIDE * np.median(sizes, axis=0)).all())


def overlap(x: np.ndarray, y: np.ndarray, form: Form) -> np.ndarray:
    """Intersection over union, 0..1, of boxes [..., 4] and [..., 4], which broadcast; 0 where one has no area."""
    (low, high), (low_y, high_y) = corners(x, form), corners(y, form)
    common = np.clip(np.minimum(high, high_y) - np.maximum(low, low_y), 0, None).prod(-1)
    both = np.clip(high - low, 0, None).prod(-1) + np.clip(high_y - low_y, 0, None).prod(-1) - common
    return np.divide(common, both, out=np.zeros_like(both), where=both > 0)


def corners(boxes: np.ndarray, form: Form) -> tuple[np.ndarray, np.ndarray]:
    """The upper left and the lower right corner, [..., 2] each, of boxes [..., 4]."""
    boxes = boxes.astype(np.float64)
    first, second = boxes[..., :2], boxes[..., 2:]
    return (first, second) if form == "corners" else (first - second / 2, first + second / 2)


def matched(x: np.ndarray, y: np.ndarray, form: Form, wanted: np.ndarray, there: np.ndarray, ranked: bool) -> int:
    """How many wanted detections of one model the other has too, of the same class and with a box that overlaps.

    Args:
        x, y: boxes [rows, 4] of both.
        form: of the boxes.
        wanted: [rows, classes], which detections of the one count.
        there: the same of the other: those that count as found.
        ranked: rows come by falling score, so that the same object may be in another row; else the same row counts.
    """
    if not ranked:
        return int(np.sum(wanted & there & (overlap(x, y, form) >= OVERLAP)[:, None]))
    ours, theirs = wanted.any(1), there.any(1)
    same = overlap(x[ours][:, None], y[theirs][None], form) >= OVERLAP
    return int(np.sum(wanted[ours] & (same.astype(int) @ there[theirs].astype(int) > 0)))


def matches(x: np.ndarray, y: np.ndarray, a: np.ndarray, b: np.ndarray, ranked: bool) -> tuple[float, float]:
    """Confident detections that both models have, and all: 2 tp, and 2 tp + fp + fn.

    Args:
        x, y: boxes [rows, 4] of both.
        a, b: their scores [rows, classes].
        ranked: as for ``matched``.
    """
    form = likelier(x)
    found, kept = a >= CONFIDENT, b >= CONFIDENT
    hits = matched(x, y, form, found, b >= CONFIDENT - SLACK, ranked)
    hits += matched(y, x, form, kept, a >= CONFIDENT - SLACK, ranked)
    return float(hits), float(np.sum(found) + np.sum(kept))
