"""Samples in three parts: those that fit ranges, those that choose, and those that decide nothing and are reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from quark.errors import DataError

Item = TypeVar("Item")
FEW = 8
"""Samples, below which the figures of a choice say little."""
APART = 4
"""Samples, below which none can be set apart."""


@dataclass(frozen=True)
class Every:
    """Every ``step``-th sample from ``start`` on of samples that can be read again."""

    samples: Iterable[Any]
    start: int
    step: int

    def __iter__(self) -> Iterator[Any]:
        return (sample for place, sample in enumerate(self.samples) if place % self.step == self.start)


def parts_of(count: int) -> tuple[list[int], list[int], list[int]]:
    """Indices to fit, choose and report with: half, a quarter, a quarter, spread over all; all of them where few.

    Raises:
        DataError: no sample.
    """
    if count < 1:
        raise DataError("there are no samples: give at least 8, better 32 to 256")
    whole = list(range(count))
    return (whole[::2], whole[1::4], whole[3::4]) if count >= APART else (whole, whole, whole)


def parts(samples: Sequence[Item]) -> tuple[list[Item], list[Item], list[Item]]:
    """The samples of ``parts_of``."""
    fit, choose, report = parts_of(len(samples))
    return [samples[k] for k in fit], [samples[k] for k in choose], [samples[k] for k in report]


def how_far(count: int, reported: int) -> tuple[str, ...]:
    """What a reader must know about figures that rest on ``reported`` of ``count`` samples."""
    if count < APART:
        return (f"{count} samples are too few to set any apart: the figures are those of the samples that chose",)
    if count < FEW:
        return (f"with {count} samples the figures rest on {reported}: take them as a hint",)
    return ()
