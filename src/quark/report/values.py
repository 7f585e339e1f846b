"""The plain values that a report is made of."""

from __future__ import annotations

import math

import numpy as np

from quark.dataclass import dataclass


@dataclass(frozen=True)
class Table:
    """Cells that are already words: shown on a terminal or on a page.

    Attributes:
        title: what the table tells.
        columns: the headings.
        rows: as many cells a row as there are headings.
        note: a line below, for what a reader must know to read it right.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class LayerView:
    """How far one node's output is from the float model's.

    Attributes:
        name: node name in the float model.
        op_type: its operator.
        tensor: the output that was compared.
        sqnr: signal to quantization noise, dB; infinite when equal.
        cosine: cosine similarity.
        own: dB of the error that this layer makes itself, at its output; None: not measured.
        alone: dB of that error alone, at the output of the model that it harms most; None: not measured.
        rescaled: the quantized model holds the tensor times a scale per channel, which was undone first.
    """

    name: str
    op_type: str
    tensor: str
    sqnr: float
    cosine: float
    own: float | None = None
    alone: float | None = None
    rescaled: bool = False


@dataclass(frozen=True)
class Weakness:
    """A layer that loses much, why, and what would help.

    Attributes:
        node: node name in the float model.
        op_type: its operator.
        sqnr: signal to quantization noise of its weight, dB.
        advice: cause and remedy in one sentence.
    """

    node: str
    op_type: str
    sqnr: float
    advice: str


@dataclass(frozen=True)
class Channels:
    """The values of a weight, channel by channel, and the limits of their codes.

    Attributes:
        lowest, highest: of the values ``[n]``.
        low, high: smallest and largest value that the codes can express ``[n]``; None where it is not stored as codes.
    """

    lowest: np.ndarray
    highest: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclass(frozen=True)
class TensorView:
    """The values that one tensor took and the range that its codes can hold.

    Attributes:
        name: tensor name.
        format: data type of the codes.
        low, high: smallest and largest value that the codes can express.
        counts: values per bin ``[n]``; bins are of one width.
        edges: borders of the bins ``[n + 1]``.
        clipped: share of the values that lie outside ``low..high``.
        channels: of a weight.
        note: what a reader must know about the values.
    """

    name: str
    format: str
    low: float
    high: float
    counts: np.ndarray
    edges: np.ndarray
    clipped: float
    channels: Channels | None = None
    note: str = ""


@dataclass(frozen=True)
class Links:
    """The neighbours of a layer, by the tensors that layers make: what it reads, and what reads it."""

    reads: tuple[str, ...] = ()
    feeds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Box:
    """One detection: corners as shares (0..1) of the picture, score and class."""

    corners: tuple[float, ...]
    score: float
    kind: int


@dataclass(frozen=True)
class SampleAnswer:
    """What one model says in one output about one sample; one of the three is filled.

    Attributes:
        classes: (class, probability), the likeliest first.
        boxes: the confident detections.
        picture: ``[height, width]`` or ``[height, width, 3]``, uint8.
    """

    classes: tuple[tuple[int, float], ...] = ()
    boxes: tuple[Box, ...] = ()
    picture: np.ndarray | None = None


@dataclass(frozen=True)
class Example:
    """One output for one sample, before and after.

    Attributes:
        output: its name.
        kind: "classes", "boxes" or "picture".
        sample: number of the sample, from 0.
        answers: of the float model, then of each quantized one.
        picture: the input, where it is one; as in ``Answer``.
    """

    output: str
    kind: str
    sample: int
    answers: tuple[SampleAnswer, ...]
    picture: np.ndarray | None = None


@dataclass(frozen=True)
class ChartPoint:
    """One model in a plot; ``chosen``: it is the one that was taken."""

    name: str
    x: float
    y: float
    chosen: bool = False


@dataclass(frozen=True)
class Scatter:
    """Models by what they cost and what they keep.

    Attributes:
        title: what is shown.
        cost: what the horizontal axis is, with its unit; smaller is better.
        metric: what the vertical axis is, with its unit.
        points: the models; those with a value that is not finite are not shown.
        more: whether more of the metric is better.
    """

    title: str
    cost: str
    metric: str
    points: tuple[ChartPoint, ...]
    more: bool = True

    @property
    def front(self) -> tuple[ChartPoint, ...]:
        """The points that no other one beats in cost and in the metric, by cost."""
        sign = 1 if self.more else -1
        shown = [one for one in self.points if math.isfinite(one.x) and math.isfinite(one.y)]
        front: list[ChartPoint] = []
        for one in sorted(shown, key=lambda one: (one.x, -sign * one.y)):
            if not front or sign * one.y > sign * front[-1].y:
                front.append(one)
        return tuple(front)
