"""Detections out of a detector's outputs, and their average precision against labelled boxes.

Where boxes and scores are is decided by the float model's outputs (``layout_of``), so that a quantized model is read in
the same way. Read are boxes beside scores or logits of as many rows, and detections [rows, coordinates + scores]. An
objectness in front of the classes is multiplied by them, a background class is left out. Offsets that a program turns
into boxes afterwards are none of these: a metric of the user's own decodes them.

The average precision is that of COCO (101 recall points) at an overlap of 0.5, by pycocotools.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import numpy as np

from quark.dataclass import dataclass
from quark.measure import answers
from quark.measure.boxes import COORDINATES, Form, corners, form_of, likelier, overlap
from quark.measure.logits import Reading

LIKELY = 0.01  # score, from which a box is a detection
SAME = 0.65  # overlap, from which the box of the lower score is the same object
MOST = 100  # detections of one picture, as COCO counts them
CANDIDATES = 1500  # boxes of the highest scores, among which the same objects are looked for
RELATIVE = 2.0  # boxes whose far corners mostly stay below are parts of the picture, not pixels


@dataclass(frozen=True)
class DetectionLayout:
    """Where detections are.

    Attributes:
        boxes, scores: names of the outputs; the same for detections in one output.
        form: of the boxes.
        like: the float model's scores, whose columns say which of them are an objectness or a background.
        relative: whether coordinates are parts of the picture, 0..1, instead of pixels of the input.
        reading: how logits become scores; None: they are scores.
    """

    boxes: str
    scores: str
    form: Form
    like: np.ndarray
    relative: bool
    reading: Reading | None = None


@dataclass(frozen=True)
class Detections:
    """The detections of one picture: corners [n, 4], scores [n], classes [n]."""

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray


def layout_of(outputs: Mapping[str, np.ndarray]) -> DetectionLayout | None:
    """Where the detections are in the float model's outputs; None: none were recognized."""
    for name, x in outputs.items():
        if answers.kind_of(x) == "boxes":
            boxes, scores = np.split(answers.as_rows(x), [COORDINATES], axis=1)
            return _layout(name, name, boxes, scores)
        beside = answers.scores_beside(name, outputs)
        if beside is not None:
            return _layout(name, beside, _alone(x), outputs[beside])
        logits = answers.logits_beside(name, outputs)
        if logits is not None:
            return replace(_layout(name, logits[0], _alone(x), outputs[logits[0]]), reading=logits[1])
    return None


def _layout(name: str, scores: str, boxes: np.ndarray, like: np.ndarray) -> DetectionLayout:
    form = form_of(boxes) or likelier(boxes)
    _, far = corners(boxes, form)
    return DetectionLayout(name, scores, form, like, bool(np.median(far.max(1)) < RELATIVE))


def _alone(x: np.ndarray) -> np.ndarray:
    axis = -1 if x.shape[-1] == COORDINATES else 1
    return np.moveaxis(x, axis, -1).reshape(-1, COORDINATES)


def read(outputs: Mapping[str, np.ndarray], layout: DetectionLayout) -> Detections:
    """The detections of one picture, the same objects once, in the coordinates of the output."""
    return distinct(*scored(outputs, layout))


def scored(outputs: Mapping[str, np.ndarray], layout: DetectionLayout) -> tuple[np.ndarray, np.ndarray]:
    """Corners [n, 4] of all rows of an output, and their scores [n, classes]."""
    if layout.boxes == layout.scores:
        boxes, rest = np.split(answers.as_rows(outputs[layout.boxes]), [COORDINATES], axis=1)
        scores = answers.columns(layout.like, rest)
    else:
        boxes = _alone(outputs[layout.boxes])
        given = outputs[layout.scores]
        beside = answers.with_rows(given if layout.reading else answers.detections(layout.like, given), len(boxes))
        scores = np.zeros((len(boxes), 1)) if beside is None else beside
        scores = layout.reading.scores(scores) if layout.reading and beside is not None else scores
    low, high = corners(boxes, layout.form)
    return np.concatenate([low, high], 1), np.nan_to_num(scores)


def distinct(boxes: np.ndarray, scores: np.ndarray) -> Detections:
    """The boxes [n, 4] (corners) with their scores [n, classes], without those that overlap a better one."""
    rows, classes = np.nonzero(scores > LIKELY)
    values = scores[rows, classes]
    order = np.argsort(-values, kind="stable")[:CANDIDATES]
    rows, classes, values = rows[order], classes[order], values[order]
    kept: list[int] = []
    left = np.arange(len(order))
    while len(left) and len(kept) < MOST:
        best, left = int(left[0]), left[1:]
        kept.append(best)
        same = overlap(boxes[rows[best]][None], boxes[rows[left]], "corners") > SAME
        left = left[~(same & (classes[left] == classes[best]))]
    return Detections(boxes[rows[kept]], values[kept], classes[kept])


def average_precision(found: Sequence[Detections], truths: Sequence[np.ndarray]) -> Callable[[Sequence[int]], float]:
    """mAP50 of some of the pictures, given by their indices: the mean over classes that occur in their truth.

    Args:
        found: the detections of every picture.
        truths: [m, 5] of every picture: corners and the class; classes from 0 on; a sixth column: is a crowd.

    Raises:
        ImportError: pycocotools is missing.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = _dataset(truths)
        truth.createIndex()
        rows = [
            [k, *_sized(box), score, kind + 1]
            for k, one in enumerate(found)
            for box, score, kind in zip(one.boxes, one.scores, one.classes, strict=True)
        ]
        judge = COCOeval(truth, truth.loadRes(np.asarray(rows, np.float64)) if rows else COCO(), "bbox")
        judge.params.iouThrs, judge.params.areaRng, judge.params.areaRngLbl = np.array([0.5]), [[0, 1e10]], ["all"]
        judge.params.maxDets = [MOST]
        if rows:
            judge.evaluate()
    kinds, pictures = len(judge.params.catIds), len(truths)
    every = np.array([*judge.evalImgs, None], dtype=object)[:-1].reshape(kinds, pictures) if rows else None

    def on(chosen: Sequence[int]) -> float:
        if every is None:
            return 0.0
        judge.evalImgs = every[:, list(chosen)].ravel().tolist()
        judge.params.imgIds = judge._paramsEval.imgIds = list(chosen)
        with redirect_stdout(io.StringIO()):
            judge.accumulate()
        precision = judge.eval["precision"]  # [overlaps, recalls, classes, areas, detections]; -1: no such class
        known = precision[precision > -1]
        return float(known.mean()) if known.size else 0.0

    return on


def _dataset(truths: Sequence[np.ndarray]) -> dict[str, Any]:
    boxes = [(k, row) for k, one in enumerate(truths) for row in np.asarray(one, np.float64)]
    annotations = [
        {
            "id": number + 1,
            "image_id": k,
            "bbox": list(_sized(row[:4])),
            "area": float(np.prod(row[2:4] - row[:2])),
            "category_id": int(row[4]) + 1,
            "iscrowd": int(row[5]) if len(row) > 5 else 0,
        }
        for number, (k, row) in enumerate(boxes)
    ]
    classes = sorted({int(row[4]) + 1 for _, row in boxes})
    images = [{"id": k} for k in range(len(truths))]
    return {"images": images, "annotations": annotations, "categories": [{"id": kind} for kind in classes]}


def _sized(box: np.ndarray) -> tuple[float, float, float, float]:
    return float(box[0]), float(box[1]), float(box[2] - box[0]), float(box[3] - box[1])
