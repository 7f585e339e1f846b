"""Boxes among the outputs of detectors: in what form they are written, and how many confident ones another model keeps.

A form is decided by the float model; pixels and shares of the picture are alike, since overlap has no unit. Offsets
that a program turns into boxes afterwards (an exponential of a size, cells of a grid) are not boxes.

Behind non-maximum suppression or a top-k, detections are a list that falls by score:

    boxes [n, 4]    scores [n], 0..1 and falling    labels [n], integers, if there are any    (or [n, 5], [n, 6])

A box that gains a little score changes its place with its neighbour, and lists end at a threshold, so that neither
place nor length says anything: a detection is kept where the other model has one of the same class with a box that
overlaps, wherever it is. Lists of several pictures are read one by one; rows of score 0 only fill them up.

Not handled: lists that are filled up with other scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

Form = Literal["corners", "centre"]

Outputs = Mapping[str, np.ndarray]
COORDINATES = 4  # of a box
FEWEST = 2  # rows in which an order can be seen
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
    ordered = np.asarray((boxes[:, 2:] > boxes[:, :2]).all(1))
    return "corners" if ordered.sum() >= ORDERED * len(ordered) else "centre"


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


# ---- lists -----------------------------------------------------------------------------------------------------------


class Ranked(NamedTuple):
    """The names of the outputs that hold such a list; one holds all of it where boxes and scores have the same name."""

    boxes: str
    scores: str
    labels: str | None = None

    def alike(self, x: Outputs, y: Outputs) -> bool:
        """Whether both models found as many."""
        return x[self.scores].shape == y[self.scores].shape

    def tally(self, x: Outputs, y: Outputs) -> tuple[float, float]:
        """Detections of the float model's outputs and of the other's: 2 tp, and 2 tp + fp + fn."""
        both = self._columns(x), self._columns(y)
        kinds = np.unique(np.concatenate([labels.ravel() for _, _, labels in both]))
        found = [_pictures(*columns, kinds) for columns in both]
        counted = [matches(boxes, theirs, a, b, True) for (boxes, a), (theirs, b) in zip(*found, strict=False)]
        kept, total = np.sum(counted, axis=0) if counted else (0.0, 0.0)
        return float(kept), float(total)

    def _columns(self, outputs: Outputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Boxes [pictures, n, 4], scores and labels [pictures, n]."""
        scores = outputs[self.scores]
        if self.boxes == self.scores:
            rows = scores if scores.ndim == 3 else scores[None]
            return rows[..., :COORDINATES], rows[..., COORDINATES], rows[..., COORDINATES + 1 :].sum(-1)
        scores = _lists(scores)
        labels = np.zeros(scores.shape) if self.labels is None else outputs[self.labels].reshape(scores.shape)
        return outputs[self.boxes].reshape(*scores.shape, COORDINATES), scores, labels


def _pictures(
    boxes: np.ndarray, scores: np.ndarray, labels: np.ndarray, kinds: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each picture the boxes [n, 4] and the scores [n, classes], without rows that only fill it up."""
    of_class = np.where(labels[..., None] == kinds, scores[..., None], 0.0)
    return [(box[one > 0], a[one > 0]) for box, a, one in zip(boxes, of_class, scores, strict=True)]


def list_of(outputs: Outputs) -> Ranked | None:
    """The list among the outputs of a float model; None: there is none."""
    tables = {name: x for name, x in outputs.items() if x.dtype.kind == "f" and x.ndim in (2, 3)}
    for name, x in tables.items():
        if x.shape[-2] < FEWEST or x.shape[-1] not in (COORDINATES, COORDINATES + 1, COORDINATES + 2):
            continue
        boxes, beside = x[..., :COORDINATES], x[..., COORDINATES:]
        if beside.shape[-1]:
            whole = bool((beside[..., 1:] == np.round(beside[..., 1:])).all())
            scores = name if whole and _falls(beside[..., 0], boxes) else None
        else:
            scores = next((other for other, one in outputs.items() if _falls(one, boxes)), None)
        if scores is None:
            continue
        given = beside[..., 0] if scores == name else outputs[scores]
        if ordered_or_centred(boxes.reshape(-1, COORDINATES)[given.ravel() > 0]):
            sized = (other for other, one in outputs.items() if one.dtype.kind in "iu" and _fits(one, boxes))
            return Ranked(name, scores, None if scores == name else next(sized, None))
    return None


def _fits(x: np.ndarray, boxes: np.ndarray) -> bool:
    """Whether there is one number for each box."""
    return x.shape in (boxes.shape[:-1], (*boxes.shape[:-1], 1))


def _falls(x: np.ndarray, boxes: np.ndarray) -> bool:
    """Whether these are shares that fall from box to box."""
    if x.dtype.kind != "f" or not _fits(x, boxes) or not np.isfinite(x).all() or x.min() < 0 or x.max() > 1:
        return False
    lists = _lists(x)
    return bool((np.diff(lists, axis=1) <= 0).all() and (lists[:, -1] < lists[:, 0]).all())


def _lists(x: np.ndarray) -> np.ndarray:
    """[pictures, n]"""
    flat = x[..., 0] if x.ndim > 1 and x.shape[-1] == 1 else x
    return np.asarray(np.atleast_2d(flat))
