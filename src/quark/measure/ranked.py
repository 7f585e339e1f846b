"""Detections as a list that falls by score: what is left behind non-maximum suppression or a top-k.

    boxes [n, 4]    scores [n], 0..1 and falling    labels [n], integers, if there are any

A box that gains a little score changes its place with its neighbour, and lists end at a threshold, so that neither
place nor length says anything: a detection is kept where the other model has one of the same class with a box that
overlaps, wherever it is. Lists of several pictures are read one by one; rows of score 0 only fill them up.

Not handled: lists that are filled up with other scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from quark.measure.boxes import COORDINATES, matches, ordered_or_centred

Outputs = Mapping[str, np.ndarray]
FEWEST = 2  # rows in which an order can be seen


class Ranked(NamedTuple):
    """The names of the outputs that hold such a list."""

    boxes: str
    scores: str
    labels: str | None = None

    def alike(self, x: Outputs, y: Outputs) -> bool:
        """Whether both models found as many."""
        return x[self.scores].shape == y[self.scores].shape

    def tally(self, x: Outputs, y: Outputs) -> tuple[float, float]:
        """Detections of the float model's outputs and of the other's: 2 tp, and 2 tp + fp + fn."""
        kinds = np.unique(np.concatenate([_labels(one, self.labels).ravel() for one in (x, y)]))
        found = [self._pictures(one, kinds) for one in (x, y)]
        counted = [matches(boxes, theirs, a, b, True) for (boxes, a), (theirs, b) in zip(*found, strict=False)]
        kept, total = np.sum(counted, axis=0) if counted else (0.0, 0.0)
        return float(kept), float(total)

    def _pictures(self, outputs: Outputs, kinds: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each picture the boxes [n, 4] and the scores [n, classes]."""
        scores = _lists(outputs[self.scores])
        labels = _labels(outputs, self.labels).reshape(scores.shape) if self.labels else np.zeros(scores.shape)
        boxes = outputs[self.boxes].reshape(*scores.shape, COORDINATES)
        of_class = np.where(labels[..., None] == kinds, scores[..., None], 0.0)
        return [(box[one > 0], a[one > 0]) for box, a, one in zip(boxes, of_class, scores, strict=True)]


def ranked(outputs: Outputs) -> Ranked | None:
    """The list among the outputs of a float model; None: there is none."""
    for boxes, x in outputs.items():
        if x.dtype.kind != "f" or x.ndim not in (2, 3) or x.shape[-1] != COORDINATES or x.shape[-2] < FEWEST:
            continue
        scores = next((name for name, one in outputs.items() if one.dtype.kind == "f" and _falls(one, x)), None)
        if scores is not None and ordered_or_centred(x.reshape(-1, COORDINATES)[outputs[scores].ravel() > 0]):
            sized = (name for name, one in outputs.items() if one.dtype.kind in "iu")
            return Ranked(boxes, scores, next((name for name in sized if _fits(outputs[name], x)), None))
    return None


def _fits(x: np.ndarray, boxes: np.ndarray) -> bool:
    """Whether there is one number for each box."""
    return x.shape in (boxes.shape[:-1], (*boxes.shape[:-1], 1))


def _falls(x: np.ndarray, boxes: np.ndarray) -> bool:
    """Whether these are shares that fall from box to box."""
    if not _fits(x, boxes) or not np.isfinite(x).all() or x.min() < 0 or x.max() > 1:
        return False
    lists = _lists(x)
    return bool((np.diff(lists, axis=1) <= 0).all() and (lists[:, -1] < lists[:, 0]).all())


def _lists(x: np.ndarray) -> np.ndarray:
    """[pictures, n]"""
    flat = x[..., 0] if x.ndim > 1 and x.shape[-1] == 1 else x
    return np.asarray(np.atleast_2d(flat))


def _labels(outputs: Outputs, name: str | None) -> np.ndarray:
    return np.zeros(1) if name is None else outputs[name]
