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
    boxes     [rows, 4] beside an output of scores of as many rows, or the first columns of detections: scores as above,
              each of which counts where its box overlaps that of the float model too (``measure.boxes``); so of lists
              that fall by score, with the labels beside them
    labels    integers or text: the share of equal ones
    values    anything else: only the distance says how near it is; so it is for a signal over two axes, whatever its
              shape (``measure.signals``)

What is not handled: answers that a program computes first (boxes decoded from anchors): a metric of the user's own
does that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, NamedTuple

import numpy as np

from quark.dataclass import dataclass
from quark.files.plain import TEXT
from quark.measure.boxes import CONFIDENT, COORDINATES, SLACK, Ranked, form_of, list_of, matches
from quark.measure.distance import ChannelSums
from quark.measure.logits import Reading, reading_of
from quark.measure.score import groups_of
from quark.measure.signals import is_signal
from quark.numerics.metrics import median

Kind = Literal["classes", "scores", "boxes", "labels", "values"]

SURE = 0.5  # probability of a winner that a user would act on
SELDOM = 0.2  # scores: the share of confident values that a detector stays below
VOCABULARY = 256  # rank 3: as many columns look like logits over a vocabulary, fewer like features
OUTSTANDING = 10.0  # a winner among so many is that many times as probable as chance
OTHERS = 2  # a detection has at least so many columns that are not scores
ROWS = 32  # detections come in many rows
MAJORITY = 0.9  # a class that wins this share of many rows is the background
FEW = 10  # answers, below which nothing can be said about a share of them

Outputs = Mapping[str, np.ndarray]


class Detected(NamedTuple):
    """The outputs that hold detections together: boxes and scores, or logits, which ``reading`` turns into scores."""

    boxes: str
    scores: str
    reading: Reading | None = None

    def alike(self, x: Outputs, y: Outputs) -> bool:
        """Whether both models found as many."""
        return all(x[name].shape == y[name].shape for name in (self.boxes, self.scores))

    def tally(self, x: Outputs, y: Outputs) -> tuple[float, float]:
        """Detections of the float model's outputs and of the other's: 2 tp, and 2 tp + fp + fn."""
        return _boxes(x[self.boxes], y[self.boxes], x[self.scores], y[self.scores], self.reading)


@dataclass
class Answers:
    """The answers of one output over samples, as running sums.

    Attributes:
        kind: what the output looks like, decided by the float model's first sample.
        kept, total: answers that both give, and all of them, per sample; for scores and boxes 2 tp and 2 tp + fp + fn.
        unlike: samples in which the outputs have different shapes (another number of detections).
        detected: the outputs that this one holds detections with.
        inside: all values so far are in 0..1; scores that leave it later, or are often high in the samples together,
            were none.
        high, seen: of them, the confident values so far, and all.
        channels: whether one of them has lost all.
    """

    kind: Kind | None = None
    kept: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    unlike: int = 0
    detected: Detected | Ranked | None = None
    inside: bool = False
    high: int = 0
    seen: int = 0
    channels: ChannelSums = field(default_factory=ChannelSums)

    def update(self, reference: np.ndarray, value: np.ndarray, pair: tuple[Outputs, Outputs] = ({}, {})) -> None:
        """Add one sample's output of the float model and of the other; ``pair``: all outputs, for ``detected``."""
        together = self.detected
        if self.kind is None:
            self.kind = "boxes" if together else kind_of(reference)
            self.inside = self.kind != "labels" and bool(reference.size) and _bounded(reference)
        if self.kind in ("scores", "boxes") and not together and reference.size and not self._still(reference):
            self.kind = "values"  # the first one was silence, or the like, which looked like scores that are never high
            self.kept, self.total = [0.0] * len(self.kept), [0.0] * len(self.total)
        self.inside = self.inside and (not reference.size or _bounded(reference))
        alike = reference.shape == value.shape and (together is None or together.alike(*pair))
        self.unlike += not alike
        if not alike and not self.ranked:
            counted = _sizes(reference, value)
        elif not reference.size and not self.ranked:
            counted = 0.0, 0.0
        else:
            counted = together.tally(*pair) if together else _COUNTED[self.kind](reference, value)
        self.kept.append(counted[0])
        self.total.append(counted[1])
        self.channels.update(reference, value)

    def _still(self, reference: np.ndarray) -> bool:
        """Whether what looked like detections still does; a distribution with a background is seldom high anyway."""
        if _class_axis(reference) is None and is_signal(reference):
            return False
        if self.kind == "boxes" or not self.inside:
            return True
        self.high += int(np.sum(reference >= CONFIDENT))
        self.seen += reference.size
        return _bounded(reference) and (self.high <= SELDOM * self.seen or _class_axis(reference) is not None)

    @property
    def ranked(self) -> bool:
        """Whether the output is part of a list of detections, whose length and order say nothing."""
        return isinstance(self.detected, Ranked)

    @property
    def share(self) -> float | None:
        """Share of the float model's answers that are kept, 0..1; None where there are too few to tell."""
        total = sum(self.total)
        return sum(self.kept) / total if total >= FEW else None

    @property
    def without(self) -> tuple[float, ...]:
        """The share without each group of samples; empty where one of them holds nearly all answers."""
        kept, total = np.asarray(self.kept), np.asarray(self.total)
        if self.share is None or len(total) < 2:
            return ()
        rest = [(kept.sum() - kept[group].sum(), total.sum() - total[group].sum()) for group in groups_of(len(total))]
        return tuple(float(one / count) for one, count in rest) if all(count > 0 for _, count in rest) else ()

    @property
    def lost_channel(self) -> tuple[int, float] | None:
        """The channel of values that has lost all, and its SQNR about its mean, dB; so of what looks like logits, but
        of which one is the highest everywhere: figures in units of their own. Those in 0..1 have one unit, in which a
        label that hardly ever applies loses nothing."""
        figures = self.kind == "values" or (self.kind == "classes" and self.channels.alone)
        return self.channels.lost if figures and not self.inside else None

    @property
    def few(self) -> bool:
        """Whether there are answers, but too few to tell."""
        return self.kind not in (None, "values") and not self.unlike and self.share is None

    @property
    def count(self) -> float:
        """Answers of the float model, about: detections are counted from both sides."""
        return sum(self.total) / (2 if self.kind in ("scores", "boxes") else 1)

    @property
    def error(self) -> float:
        """Standard error of the share over samples (ratio estimator), ``chance`` at least; NaN from a single sample."""
        kept, total = np.asarray(self.kept), np.asarray(self.total)
        share = self.share
        if share is None or len(kept) < 2:
            return float("nan")
        parts = (kept - share * total) / total.sum()
        return max(float(np.sqrt(len(parts) / (len(parts) - 1) * np.sum(parts**2))), self.chance)

    @property
    def chance(self) -> float:
        """Standard error of the share of so many answers, were each by chance (Agresti and Coull, 1998, "Approximate is
        better than exact"): not zero where all of a few are kept. NaN where there is no share."""
        if self.share is None:
            return float("nan")
        count = self.count + 4
        share = (self.share * self.count + 2) / count
        return float(np.sqrt(share * (1 - share) / count))


def update(answers: Mapping[str, Answers], reference: Outputs, value: Outputs) -> None:
    """Add one sample's outputs of both models by name; boxes count with the scores beside them."""
    for name, one in answers.items():
        if one.kind is None:
            one.detected = detected(name, reference)
        one.update(reference[name], value[name], (reference, value))


def detected(name: str, outputs: Outputs) -> Detected | Ranked | None:
    """The detections that an output of the float model is part of: a list, boxes, or the logits beside them."""
    fallen = list_of(outputs)
    if fallen is not None and name in fallen:
        return fallen
    scores = scores_beside(name, outputs)
    if scores is not None:
        return Detected(name, scores)
    by_logits = ((boxes, logits_beside(boxes, outputs)) for boxes in outputs)
    pairs = (Detected(boxes, *found) for boxes, found in by_logits if found is not None)
    return next((pair for pair in pairs if name in pair[:2]), None)


def scores_beside(name: str, outputs: Outputs) -> str | None:
    """The output with the scores of the boxes of output ``name``; None: it holds none, or there are none."""
    boxes = _boxes_alone(outputs[name])
    if boxes is None:
        return None
    others = (other for other in outputs if other != name and kind_of(outputs[other]) == "scores")
    return next((other for other in others if with_rows(outputs[other], len(boxes)) is not None), None)


def logits_beside(name: str, outputs: Outputs) -> tuple[str, Reading] | None:
    """The output with the logits of the boxes of output ``name``, the narrowest that can be read so; None: there is
    none, or there are scores."""
    boxes = _boxes_alone(outputs[name])
    if boxes is None or scores_beside(name, outputs) is not None:
        return None
    found: list[tuple[int, str, Reading]] = []
    for other, x in outputs.items():
        rows = with_rows(x, len(boxes)) if other != name and x.dtype.kind == "f" else None
        reading = None if rows is None else reading_of(rows)
        if rows is not None and reading is not None:
            found.append((rows.shape[1], other, reading))
    best = min(found, key=lambda one: one[0], default=None)
    return None if best is None else best[1:]


def _boxes_alone(x: np.ndarray) -> np.ndarray | None:
    """Boxes [rows, 4] of an output that holds nothing else, its coordinates last or second."""
    if x.dtype.kind != "f":
        return None
    for axis in (-1, 1):
        if x.ndim >= 2 and x.shape[axis] == COORDINATES and x.size >= ROWS * COORDINATES:
            rows = np.moveaxis(x, axis, -1).reshape(-1, COORDINATES)
            return rows if form_of(rows) else None
    return None


def with_rows(x: np.ndarray, count: int) -> np.ndarray | None:
    """[count, columns] of an output whose columns come last or second, or that has one; None: of another size."""
    for axis in (-1, 1) if x.ndim >= 3 else (-1,):
        if x.size == count * x.shape[axis]:
            return np.moveaxis(x, axis, -1).reshape(count, -1)
    return x.reshape(count, 1) if x.size == count else None


def kind_of(x: np.ndarray) -> Kind:
    """What an output of this shape and these values looks like, taken alone."""
    if x.dtype.kind in "iub" + TEXT:
        return "labels"
    if x.dtype.kind != "f" or x.ndim < 2 or not x.size or not np.isfinite(x).all():
        return "values"
    if _class_axis(x) is not None:
        return "scores" if _background(x) is not None else "classes"
    if is_signal(x):
        return "values"
    if _is_boxed(x):
        return "boxes"
    if _score_columns(x) is not None:
        return "scores"
    logits = x.shape[-1] >= 2 if x.ndim == 2 else x.ndim == 3 and x.shape[-1] >= VOCABULARY
    if x.shape[-1] >= VOCABULARY:  # sounds and features come in as long rows, in which nothing stands out
        logits = logits and median(_softmax_peak(x).reshape(-1)) * x.shape[-1] >= OUTSTANDING
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
    rows = as_rows(x)
    inside = _scoring(rows)
    plausible = len(rows) >= ROWS and inside.any() and np.sum(~inside) >= OTHERS
    return rows[:, inside] if plausible else None


def _is_boxed(x: np.ndarray) -> bool:
    """Whether these are detections whose first columns are a box: no scores, which are seldom high."""
    if x.ndim not in (3, 4):
        return False
    rows = as_rows(x)
    if len(rows) < ROWS or rows.shape[1] <= COORDINATES:
        return False
    boxes, scores = rows[:, :COORDINATES], rows[:, COORDINATES:]
    inside = _scoring(scores)
    return bool(inside.any() and np.mean(boxes >= CONFIDENT) > SELDOM and form_of(boxes) is not None)


def _scoring(rows: np.ndarray) -> np.ndarray:
    """Which columns stay in 0..1 and are not constant."""
    lowest, highest = rows.min(0), rows.max(0)
    return np.asarray((lowest >= -1e-4) & (highest <= 1 + 1e-4) & (highest > lowest))


def as_rows(x: np.ndarray) -> np.ndarray:
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
    a, b = detections(x, x), detections(x, y)
    found, kept = a >= CONFIDENT, b >= CONFIDENT
    hits = np.sum(found & (b >= CONFIDENT - SLACK)) + np.sum(kept & (a >= CONFIDENT - SLACK))
    return float(hits), float(np.sum(found) + np.sum(kept))


def _boxed(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Detections: boxes and scores in one output."""
    (boxes, scores), (theirs, judged) = (np.split(as_rows(one), [COORDINATES], axis=1) for one in (x, y))
    a, b = columns(scores, scores), columns(scores, judged)
    return matches(boxes, theirs, a, b, _ranked(a))


def _boxes(
    x: np.ndarray, y: np.ndarray, of_x: np.ndarray, of_y: np.ndarray, reading: Reading | None
) -> tuple[float, float]:
    """Boxes of both models, and their scores, or logits, in another output."""
    axis = -1 if x.shape[-1] == COORDINATES else 1
    boxes, theirs = (np.moveaxis(one, axis, -1).reshape(-1, COORDINATES) for one in (x, y))
    a, b = (with_rows(one if reading else detections(of_x, one), len(boxes)) for one in (of_x, of_y))
    if a is None or b is None:
        return _scores(of_x, of_y)
    if reading is not None:
        return matches(boxes, theirs, reading.scores(a), reading.scores(b), ranked=True)
    return matches(boxes, theirs, a, b, _ranked(a))


def _ranked(scores: np.ndarray) -> bool:
    """Whether rows come by falling score, so that the same object may be in another row."""
    peaks = scores.max(1)
    return bool((np.diff(peaks) <= 0).all() and peaks[-1] < peaks[0])


def detections(like: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The scores of an output, read as ``like`` is: no background; columns behind an objectness multiplied by it."""
    background = _background(like)
    if background is not None:
        axis = _class_axis(like)
        return np.delete(x, background, axis=axis if axis is not None else -1)
    if _bounded(like):
        return x
    return columns(as_rows(like), as_rows(x))


def columns(like: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The columns of scores, as they are in ``like``; those behind an objectness multiplied by it."""
    inside = _scoring(like)
    columns, ours = like[:, inside], rows[:, inside]
    conditional = bool(np.any(columns[:, :1] * columns[:, 1:] >= CONFIDENT))
    return ours[:, :1] * ours[:, 1:] if conditional else ours


def probabilities(x: np.ndarray) -> np.ndarray:
    """Of the classes in the first row of an output of the kind ``classes``: as they are, or of logits."""
    axis = _class_axis(x)
    rows = np.moveaxis(x, -1 if axis is None else axis, -1).reshape(-1, x.shape[-1 if axis is None else axis])
    if axis is not None:
        return np.asarray(rows[0], np.float64)
    exponents = np.exp(rows[0].astype(np.float64) - np.nanmax(rows[0]))
    return np.asarray(exponents / exponents.sum())


def _labels(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    return float(np.sum(x == y)), float(x.size)


def _values(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    return 0.0, 0.0


def _sizes(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Rows that cannot be matched: at most the smaller number of the larger one is kept."""
    return float(min(x.size, y.size)), float(max(x.size, y.size))


_COUNTED = {"classes": _classes, "scores": _scores, "boxes": _boxed, "labels": _labels, "values": _values}
