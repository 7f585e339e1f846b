"""What the columnwise algorithms know of a layer's inputs: sums of products, one sample in memory at a time.

Beside the inputs of the quantized model may stand those of the float model, sample by sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

import numpy as np

from quark.dataclass import dataclass

#: What a layer reads in one sample: in the quantized model and, or None, in the float model.
Pair = tuple[np.ndarray, np.ndarray | None]


@dataclass
class Moments:
    """Second moments of inputs, x~ of the quantized and x of the float model; [columns, columns].

    Attributes:
        hessian: sum (float64) or mean (float32) of x~ x~^T.
        cross: of x x~^T, or None without a float model.
        count: rows that were summed.
    """

    hessian: np.ndarray
    cross: np.ndarray | None = None
    count: int = 0

    def add(self, pair: Pair) -> None:
        """Take one more sample into the sums."""
        rows, other = _rows(pair, len(self.hessian))
        self.hessian += rows.T @ rows
        self.count += len(rows)
        if other is not None:
            self.cross = np.zeros_like(self.hessian) if self.cross is None else self.cross
            self.cross += other.T @ rows

    def __add__(self, other: Moments) -> Moments:
        """The sums of both."""
        cross = self.cross if other.cross is None else other.cross if self.cross is None else self.cross + other.cross
        return Moments(self.hessian + other.hessian, cross, self.count + other.count)

    @property
    def mean(self) -> Moments:
        """Sums as means, float32."""
        many = max(self.count, 1)
        cross = None if self.cross is None else (self.cross / many).astype(np.float32)
        return Moments((self.hessian / many).astype(np.float32), cross, self.count)


def summed(pairs: Iterable[Pair], columns: int) -> Moments:
    """The sums over all rows of all samples."""
    found = Moments(np.zeros((columns, columns)))
    for pair in pairs:
        found.add(pair)
    return found


def in_halves(pairs: Iterable[Pair], columns: int) -> tuple[Moments, Moments]:
    """The sums of every other sample. A sample that is alone is divided in the middle."""
    halves = Moments(np.zeros((columns, columns))), Moments(np.zeros((columns, columns)))
    parts = iter(pairs)
    start = list(islice(parts, 2))
    start = start if len(start) != 1 else list(_divided(start[0], columns))
    for place, pair in enumerate(chain(start, parts)):
        halves[place % 2].add(pair)
    return halves


def _divided(pair: Pair, columns: int) -> Iterator[Pair]:
    rows, other = _rows(pair, columns)
    for index in np.array_split(np.arange(len(rows)), 2):
        yield rows[index], None if other is None else other[index]


def _rows(pair: Pair, columns: int) -> Pair:
    """Both inputs as rows; one of another size than its partner has none, and is its own."""
    x, other = np.asarray(pair[0], np.float32).reshape(-1, columns), pair[1]
    if other is None:
        return x, None
    partner = np.asarray(other, np.float32).reshape(-1, columns)
    return x, partner if len(partner) == len(x) else x
