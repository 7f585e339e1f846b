"""The plain values that a report is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


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
class Layer:
    """How far one node's output is from the float model's.

    Attributes:
        name: node name in the float model.
        op_type: its operator.
        tensor: the output that was compared.
        sqnr: signal to quantization noise, dB; infinite when equal.
        cosine: cosine similarity.
    """

    name: str
    op_type: str
    tensor: str
    sqnr: float
    cosine: float


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
class TensorView:
    """The values that one tensor took and the range that its codes can hold.

    Attributes:
        name: tensor name.
        format: data type of the codes.
        low, high: smallest and largest value that the codes can express.
        counts: values per bin ``[n]``.
        edges: borders of the bins ``[n + 1]``.
        clipped: share of the values that lie outside ``low..high``.
    """

    name: str
    format: str
    low: float
    high: float
    counts: np.ndarray
    edges: np.ndarray
    clipped: float


@dataclass(frozen=True)
class Chart:
    """Bars, one row a name, one colour a series.

    Attributes:
        title: what is shown.
        axis: what the length of a bar is, with its unit.
        names: of the rows, top to bottom.
        series: (label, a value per row); ``nan`` leaves a row without a bar.
        note: a line above.
    """

    title: str
    axis: str
    names: tuple[str, ...]
    series: tuple[tuple[str, tuple[float, ...]], ...]
    note: str = ""


@dataclass(frozen=True)
class Point:
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
    points: tuple[Point, ...]
    more: bool = True

    @property
    def front(self) -> tuple[Point, ...]:
        """The points that no other one beats in cost and in the metric, by cost."""
        sign = 1 if self.more else -1
        shown = [one for one in self.points if math.isfinite(one.x) and math.isfinite(one.y)]
        front: list[Point] = []
        for one in sorted(shown, key=lambda one: (one.x, -sign * one.y)):
            if not front or sign * one.y > sign * front[-1].y:
                front.append(one)
        return tuple(front)


@dataclass(frozen=True)
class Report:
    """Everything on one page. ``facts`` are the headline figures: (label, value)."""

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[Table, ...] = ()
    layers: tuple[Layer, ...] = ()
    tensors: tuple[TensorView, ...] = field(default=())
    charts: tuple[Chart, ...] = ()
    scatters: tuple[Scatter, ...] = ()
