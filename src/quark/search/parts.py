"""Samples in three parts: those that fit ranges, those that choose, and those that decide nothing and are reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from quark.dataclass import dataclass
from quark.errors import DataError

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


@dataclass(frozen=True)
class Split:
    """Samples by what they decide, each part iterable any number of times.

    Attributes:
        fit: those that calibrate; None: they are generated.
        choose: those that choose; None: those that fit choose too.
        report: those that decide nothing; None: there are none.
        total: how many there are; 0 where nobody has counted.
        notes: what a reader must know of figures that rest on them, a sentence each.
    """

    fit: Any
    choose: Any = None
    report: Any = None
    total: int = 0
    notes: tuple[str, ...] = ()


def parts_of(count: int) -> tuple[list[int], list[int], list[int]]:
    """Indices to fit, choose and report with: half, a quarter, a quarter, spread over all; all of them where few.

    Raises:
        DataError: no sample.
    """
    if count < 1:
        raise DataError("there are no samples: give at least 8, better 32 to 256")
    whole = list(range(count))
    return (whole[::2], whole[1::4], whole[3::4]) if count >= APART else (whole, whole, whole)


def spread_order(count: int) -> list[int]:
    """Indices in an order of which every beginning is spread over all: the first seconds of a sound may be silence, and
    the first pictures of one class.

    By their binary digits read backwards: 0, a half, a quarter, three quarters, …
    """
    digits = max(count - 1, 0).bit_length()
    places = range(1 << digits)
    return [place for place in (int(f"{k:0{digits}b}"[::-1], 2) if digits else 0 for k in places) if place < count]


def how_far(count: int, reported: int) -> tuple[str, ...]:
    """What a reader must know about figures that rest on ``reported`` of ``count`` samples."""
    if count < APART:
        return (f"{count} samples are too few to set any apart: the figures are those of the samples that chose",)
    if count < FEW:
        return (f"with {count} samples the figures rest on {reported}: take them as a hint",)
    return ()


def split(samples: Any, part: Callable[[list[int]], Any] | None = None) -> Split:
    """Samples in their parts; of few, all of them fit and choose, and none is left to report on.

    Args:
        samples: a list, or what has a length.
        part: makes those of some indices; None: a list of them.
    """
    made = part or (lambda chosen: [samples[k] for k in chosen])
    count, (fit, choose, report) = len(samples), parts_of(len(samples))
    apart = made(report) if count >= APART else None
    return Split(made(fit), made(choose), apart, count, how_far(count, len(report)))


def split_of(samples: Any, evaluation: Any, function: bool) -> Split:
    """The samples of a search in parts: none is set apart where they are few, or where the user's function has its own.

    Args:
        samples: can be read again; None: they are generated.
        evaluation: samples that plans are measured on, half to choose and half to report; all of ``samples`` then fit.
        function: whether a function of the user's judges.
    """
    if function:
        return Split(samples, notes=("the function that chose the plan also reports on it, on data of its own",))
    if evaluation is not None:
        count = sum(1 for _ in evaluation)
        if count < 2:
            return Split(samples, evaluation, notes=("one sample chose the plan, and none is left to report on",))
        return Split(samples, _every(evaluation, 0, 2), _every(evaluation, 1, 2), 0, how_far(2 * count, count // 2))
    if samples is None:
        return Split(None, notes=("the samples are generated: nothing is known of real ones",))
    count = sum(1 for _ in samples)
    if count < APART:
        return Split(samples, total=count, notes=how_far(count, count))
    notes = how_far(count, len(parts_of(count)[2]))
    return Split(_every(samples, 0, 2), _every(samples, 1, 4), _every(samples, 3, 4), count, notes)


def _every(samples: Any, start: int, step: int) -> Any:
    """A list of those in a list; what is read when it is needed stays so."""
    return samples[start::step] if isinstance(samples, list) else Every(samples, start, step)
