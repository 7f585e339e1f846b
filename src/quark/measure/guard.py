"""What does not help is put back: the trials that decide about changes of a model, in both flows.

A flow says how a change is made and taken back, and measures the loss; whether a change helps says
``quark.measure.gain``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from typing import Generic, TypeVar

import numpy as np

from quark.dataclass import dataclass
from quark.measure.gain import Gain, certain, gain, gain_of, surest
from quark.measure.outputs import Loss, Values

#: Bytes of answers that are kept, and samples that are kept in any case.
BUDGET, FEWEST = 1 << 26, 8
#: How often what was changed is halved.
HALVINGS = 4
log = logging.getLogger(__name__)
Sample = TypeVar("Sample")
Change = TypeVar("Change")
Run = Callable[[Sample], Values]


class Reference(Generic[Sample]):
    """What a float model says on samples, to be compared with more than once: up to ``BUDGET`` bytes are kept, what
    does not fit is computed again.

    Args:
        samples: they stay in memory.
        opened: gives what runs the float model.
    """

    def __init__(self, samples: Sequence[Sample], opened: Callable[[], Run[Sample]]) -> None:
        self._samples, self._opened = samples, opened
        self._kept: list[Values] = []
        self.left = BUDGET

    def __iter__(self) -> Iterator[tuple[Sample, Values]]:
        run = None
        for number, sample in enumerate(self._samples):
            if number < len(self._kept):
                yield sample, self._kept[number]
                continue
            run = run or self._opened()
            values = run(sample)
            self.left -= sum(array.nbytes for array in values.values())
            if self.left >= 0:
                self._kept.append(values)
            yield sample, values

    def fixed(self) -> list[tuple[Sample, Values]]:
        """The same of a model that will change: no more samples than fit ``BUDGET``, and at least ``FEWEST``."""
        found = []
        for pair in self:
            found.append(pair)
            if self.left <= 0 and len(found) >= FEWEST:
                break
        return found


@dataclass
class Parts:
    """What a change brings that can go a part of its way, 1 being all of it.

    Attributes:
        name: of the change.
        gains, losses: by part; the loss by 0: without the change.
    """

    name: str
    gains: dict[float, Gain] = field(default_factory=dict)
    losses: dict[float, float] = field(default_factory=dict)

    def tried(self, parts: Iterable[float], fires: Callable[[float], bool], losses: Iterator[Loss]) -> float | None:
        """The part that gains most; None: none surely gains.

        Args:
            parts: in the order in which they are tried; none after one that changes nothing.
            fires: makes a part of the change; whether it changed anything.
            losses: the loss without the change, then that of the model as it is whenever it is asked for.
        """
        without: Loss | None = None
        for part in parts:
            if not fires(part):
                break  # so short a way changes nothing; those before may have helped
            if without is None:
                without = next(losses)
                self.losses[0.0] = without.total
            found = next(losses)
            self.gains[part], self.losses[part] = gain(found.noise, without.noise), found.total
            log.info("%s: loss %.6g without, %.6g with %g of it", self.name, without.total, found.total, part)
        return surest(self.gains)

    def reason(self) -> str:
        """Why nothing of it stays."""
        part = max(self.gains, key=lambda one: self.gains[one].mean)
        found = self.gains[part]
        doubt = ", which may be chance" if 0 < found.mean <= found.error else ""
        traded = ", and one of the outputs is worse" if found.mean > found.error else ""
        much = "it" if part == 1 else f"it to the power of {part:g}"
        with_it = f"{self.losses[part]:.4g} with {much}{doubt}{traded}"
        return f"put back: on calibration data the loss was {self.losses[0.0]:.4g} without it and {with_it}"


def kept(
    changes: Sequence[Change],
    without: Loss,
    loss: Callable[[], Loss],
    put: Callable[[Sequence[Change], bool], None],
    name: Callable[[Change], str],
) -> tuple[Sequence[Change], str]:
    """The changes that stay, of those that are all made: all where the model does not lose by them, else the halves
    of them that surely gain; and the sentence about the others, empty where all stay.

    Args:
        changes: in the order of the model.
        without: the loss without any.
        loss: that of the model as it is now.
        put: makes some changes, or takes them back.
        name: of a change, for people.
    """
    with_it = loss()
    log.info("loss %.6g without, %.6g with all changes", without.total, with_it.total)
    if gain(with_it.noise, without.noise).harmless or not np.isfinite(without.total):
        return changes, ""
    put(changes, False)
    stay, left = _halves(changes, without, loss, put, HALVINGS)
    back = [name(change) for change in changes if change not in stay]
    reason = (
        f"put back in {len(back)} of {len(changes)} layers: on calibration data the model's loss was "
        f"{without.total:.4g} without it, {with_it.total:.4g} with all of it and is {left.total:.4g} now; put back: "
    )
    return stay, reason + ", ".join(map(repr, back))


def _halves(
    changes: Sequence[Change],
    best: Loss,
    loss: Callable[[], Loss],
    put: Callable[[Sequence[Change], bool], None],
    halvings: int,
) -> tuple[list[Change], Loss]:
    """The changes that stay, of those that are not made now, and the loss with them; ``best``: without them."""
    stay: list[Change] = []
    middle = -(-len(changes) // 2)
    for half in (changes[:middle], changes[middle:]):
        if not half:
            continue
        put(half, True)
        found = loss()
        if gain(found.noise, best.noise).sure:
            stay, best = [*stay, *half], found
            continue
        put(half, False)
        if halvings > 1 and len(half) > 1:
            more, best = _halves(half, best, loss, put, halvings - 1)
            stay += more
    return stay, best


def best_of(errors: Sequence[Sequence[float]], before: Sequence[float]) -> int | None:
    """The number of the change that gains most, if it surely does; None: none is worth it.

    Args:
        errors: of each change, sample by sample.
        before: of the same samples without a change.
    """
    return surest({number: gain_of(after, before) for number, after in enumerate(errors)})


def best_change(changes: Sequence[Change], errors: Callable[[Change | None], Sequence[float]]) -> Change | None:
    """The change by which a model gets better; None: no change is worth it.

    Args:
        changes: the first is taken alone where its gain is certain.
        errors: sample by sample with a change; without one.
    """
    if not changes:
        return None
    before, found = errors(None), [errors(changes[0])]
    if not certain(found[0], before):
        found += [errors(change) for change in changes[1:]]
    best = best_of(found, before)
    return None if best is None else changes[best]
