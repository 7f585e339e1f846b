"""Recipes tried on a model, one after the other: what is better is kept, until the model is good or the time is over.

``Attempt`` is a configuration and what came of it; ``Climb`` tries the rows of ``quark.onnx.recipes`` that apply.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace

from quark.dataclass import dataclass
from quark.measure.score import by_chance
from quark.onnx.recipes import RECIPES, Choice, Recipe, Situation
from quark.report.verdict import LEVELS, SQNR, Judged, level_of

GOOD = len(LEVELS) - 1
#: By how much a configuration must be better than another, in kept answers and in dB, to be preferred to it.
CLEAR_SHARE, CLEAR_DECIBELS = 0.005, 0.1
#: By how much it has to be better to be worth typing: a tenth of a dB on a few samples is chance.
WORTH_DECIBELS = 0.5
ERRORS = 2  # standard errors that answers must differ by: of many recipes one has luck


@dataclass(frozen=True)
class Attempt:
    """A configuration that was tried and what came of it; ``causes``: what its recipes mend."""

    choice: Choice
    judged: Judged | None
    causes: tuple[str, ...] = ()

    def is_worth(self, other: Attempt) -> bool:
        """Whether it is so much better that somebody should type it: a limit between 19.9 and 20.1 dB is none."""
        ours, theirs = self.judged, other.judged
        if ours is None or theirs is None or not (_by_decibels(ours) and _by_decibels(theirs)):
            return self.beats(other, WORTH_DECIBELS)
        return ours.sqnr - theirs.sqnr >= WORTH_DECIBELS

    @property
    def rank(self) -> tuple[int, float, float]:
        """The better, the larger; decibels decide between equal shares of answers."""
        judged = self.judged
        return (-1, 0.0, 0.0) if judged is None else (judged.level, round(judged.value, 2), judged.sqnr)

    def beats(self, other: Attempt, decibels: float = CLEAR_DECIBELS) -> bool:
        """Whether it is clearly better: a level higher, or more answers kept than chance gives, or as many and less
        noise."""
        ours, theirs = self.judged, other.judged
        if ours is None or theirs is None:
            return ours is not None
        if ours.level != theirs.level:
            return ours.level > theirs.level
        more = _keeps_more(ours, theirs)
        return more or (not _keeps_more(theirs, ours) and ours.sqnr - theirs.sqnr > decibels)


def _by_decibels(found: Judged) -> bool:
    """Whether decibels alone made the level."""
    return found.value == found.sqnr and found.level == level_of(found.sqnr, SQNR)


def _keeps_more(one: Judged, other: Judged) -> bool:
    """Whether more answers are kept; chance is that of the same samples."""
    chance = ERRORS * by_chance(one.score, other.score, CLEAR_SHARE)
    return one.value != one.sqnr and one.value - other.value > max(CLEAR_SHARE, chance)  # the first where it is NaN


def layers_apart(best: Attempt, ranked: Sequence[str], wide: str, most: float = 0.5) -> Iterator[Choice]:
    """The choice with the layers that lose most, alone, in another precision: one layer, then twice as many, and so on.

    Args:
        best: what is not good enough.
        ranked: names of the layers, the one that loses most first.
        wide: what they get: "float", or a preset of more bits.
        most: the part of the layers that may get it, rounded up; never all.
    """
    count = 1
    while count <= min(math.ceil(most * len(ranked)), len(ranked) - 1):  # all of them do not stand apart
        yield replace(best.choice, layers=dict.fromkeys(ranked[:count], wide))
        count *= 2


Probe = Callable[[Sequence[Choice]], Sequence[tuple[float, ...] | None]]


@dataclass
class Climb:
    """Recipes one after the other on the best so far.

    What the engine proposed comes first. The other recipes are then compared, each alone and on few samples, and tried
    in full in the order in which they did: the better half, the slow ones, the other half, each on the best so far.
    No attempt begins that would, at the pace of the slowest before, end too late, or for which no attempts are left.

    Attributes:
        first: what was quantized, and how it was judged.
        situation: which recipes apply.
        measure: quantizes a choice and judges it.
        pace: seconds that recipes took, by name, on another configuration of the model; those of this one are added.
        slowest: seconds that an attempt took, at most; at first those of the first one.
        best: so far.
        trying: what ``measure`` is asked about, with the causes that it mends; not judged yet.
        tried: how many were measured.
        left: how many quantizations may still be tried; a recipe counts by how many times as long it takes.
        advised: somebody is to type the best: it goes on until that is worth it.
    """

    first: Attempt
    situation: Situation
    measure: Callable[[Choice], Judged | None]
    pace: dict[str, float] = field(default_factory=dict)
    slowest: float = 0.0
    tried: int = 0
    end: float = 0.0
    left: float = math.inf
    advised: bool = False

    def __post_init__(self) -> None:
        self.best = self.trying = self.first

    def within(self, seconds: float, probe: Probe | None = None) -> Attempt:
        """The best found within about ``seconds``.

        Args:
            seconds: for all attempts.
            probe: ranks the first choice and its changes on few samples, larger is better; None: not known; no numbers:
                the model of one before it, which comes last. Without it they come in their order.
        """
        self.proposed(seconds)
        return self.others(max(0.0, self.end - time.perf_counter()), probe)

    def proposed(self, seconds: float) -> Attempt:
        """The best with what the engine itself proposed: quick, and likely to help."""
        self.end = time.perf_counter() + seconds
        self.over([recipe for recipe in RECIPES if recipe.first])
        return self.best

    def others(self, seconds: float, probe: Probe | None = None) -> Attempt:
        """The best with all other recipes."""
        self.end = time.perf_counter() + seconds
        rows = [recipe for recipe in RECIPES if not recipe.first]
        if probe is not None and self.open():
            rows = _ordered(rows, self.best.choice, self.situation, probe)
        self.over(rows)
        return self.best

    def open(self, recipe: Recipe | None = None, keeps: bool = False) -> bool:
        """Whether another attempt makes sense, at its own pace or that of the slowest; ``keeps``: and one more."""
        good = self.best.judged is not None and self.best.judged.level >= GOOD
        done = good and (not self.advised or self.best.is_worth(self.first))
        own = self.slowest if recipe is None else self.pace.get(recipe.name, self.slowest * recipe.times)
        if done or (1.0 if recipe is None else recipe.times) + keeps > self.left:
            return False
        return time.perf_counter() + own + keeps * self.slowest <= self.end

    def over(self, rows: Sequence[Recipe]) -> None:
        """Try rows, and keep what is better."""
        for recipe in rows:
            if not self.open(recipe, self._keeps(rows, recipe)) or not recipe.applies(self.situation, self.best.choice):
                continue
            choice, start = recipe.change(self.best.choice), time.perf_counter()
            if choice == self.best.choice:  # told so already
                continue
            self.trying = Attempt(choice, None, (*self.best.causes, recipe.cause))
            attempt = replace(self.trying, judged=self.measure(choice))
            self.pace[recipe.name] = time.perf_counter() - start
            self.slowest = max(self.slowest, self.pace[recipe.name] / recipe.times)
            self.tried, self.left = self.tried + 1, self.left - recipe.times
            if attempt.beats(self.best):
                self.best = self._alone(recipe, attempt)

    def _keeps(self, rows: Sequence[Recipe], recipe: Recipe) -> bool:
        """Whether an attempt is kept for the row that likely helps a model that is lost still."""
        lost = self.best.judged is None or self.best.judged.level == 0
        left = any(row.last and row.applies(self.situation, self.best.choice) for row in rows)
        return lost and left and not recipe.last

    def _alone(self, recipe: Recipe, attempt: Attempt) -> Attempt:
        """What made the model good, without what came before where that is enough: one cause, a short command."""
        good = attempt.judged is not None and attempt.judged.level >= GOOD
        fits = recipe.applies(self.situation, self.first.choice)
        if (
            not good
            or not fits
            or len(attempt.causes) == 1
            or self.left < 1
            or time.perf_counter() + self.slowest > self.end
        ):
            return attempt
        self.trying = Attempt(recipe.change(self.first.choice), None, (recipe.cause,))
        alone = replace(self.trying, judged=self.measure(self.trying.choice))
        self.tried, self.left = self.tried + 1, self.left - 1
        return alone if alone.judged is not None and alone.judged.level >= GOOD else attempt


def _ordered(rows: Sequence[Recipe], base: Choice, situation: Situation, probe: Probe) -> list[Recipe]:
    """Quick rows by what they did alone on few samples, the better half in front of the slow ones."""
    quick = [row for row in rows if not row.slow and row.applies(situation, base) and row.change(base) != base]
    ranks = list(probe([base, *(row.change(base) for row in quick)]))[1:]
    known = [(rank, row) for rank, row in zip(ranks, quick, strict=True) if rank]
    idle = [row for rank, row in zip(ranks, quick, strict=True) if rank == ()]
    order = [row for _, row in sorted(known, key=lambda one: one[0], reverse=True)]
    half = order[: (len(order) + 1) // 2]
    rest = [row for row in rows if not row.slow and row not in half and row not in idle]
    return [*half, *(row for row in rows if row.slow), *rest, *idle]  # what is put back on few samples may help on all
