"""``auto``, the part that both flows share: trials one after the other, each kept, and which of them wins.

steps    → a flow attempts what could help, in its order; nothing begins that would end too late
attempt  → made and judged, or what the ledger has of it; told in a line
winner   → the cheapest within the tolerance, of equals the most accurate; where there is none, the nearest miss
proof    → the flow judges the winner on samples that decided nothing
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from quark.dataclass import dataclass
from quark.errors import ConfigError, DataError, QuarkError, unknown
from quark.files.journal import Journal
from quark.files.schema import Schema
from quark.measure.score import Score
from quark.search.clock import Clock

DROP = 0.01
"""The part of a metric that may be lost where nothing is said."""
LATE = "no time was left"
"""Why something was not tried."""
PLAIN = "trial"
"""The pace of a quantization without algorithms."""


@dataclass(frozen=True)
class Goal:
    """What is wanted.

    Attributes:
        PURPOSES: what the flow makes models for; ``ELSEWHERE``: what it does not, in words.
        purpose: what the result is made for: a row of ``PURPOSES``.
        drop: the part of the metric that may be lost; None: what is usual.
        metric: the user's function of a model → number, or ``Score`` that knows its error, larger is better.
        seconds: for all trials; the one that runs is not stopped.
        ledger: a JSON file that finished trials are kept in; after a kill the same call goes on from there.
        identity: what tells ``metric`` from another function.

    Raises:
        ConfigError: an unknown purpose, or a drop outside 0..1.
    """

    PURPOSES: ClassVar[Mapping[str, Any]]
    ELSEWHERE: ClassVar[str]
    purpose: str
    drop: float | None = None
    metric: Callable[[Any], Any] | None = None
    seconds: float = 600.0
    ledger: Path | None = None
    identity: str = "none"

    def __post_init__(self) -> None:
        if self.purpose not in self.PURPOSES:
            raise ConfigError(f"{unknown('--for', self.purpose, self.PURPOSES)}, {self.ELSEWHERE}")
        if self.drop is not None and not 0 <= self.drop < 1:
            raise ConfigError(f"--drop is {self.drop:g}: it is the part that may be lost, from 0 to 1, such as 0.01")


@dataclass(frozen=True, kw_only=True)
class AutoTrial:
    """A configuration that was tried.

    Attributes:
        name: in the words of the command line.
        bytes: of its file.
        chance: how much of its loss is chance (``quark.measure.score``); NaN: not known.
        causes: what its recipes mend.
        error: why it could not be made.
        passes: it is within the tolerance.
    """

    name: str = field(kw_only=False)
    bytes: int = 0
    chance: float = float("nan")
    causes: tuple[str, ...] = ()
    error: str = ""
    passes: bool = False

    @property
    def pace(self) -> str:
        """The same for trials that take about as long."""
        return PLAIN


class KeptTrial(Schema):
    """What came of a trial, in a ledger."""

    error: str
    value: float
    chance: float
    passes: Literal[0, 1]


Tried = TypeVar("Tried", bound=AutoTrial)


@dataclass(kw_only=True)
class Outcome(Generic[Tried]):
    """What a search found.

    Attributes:
        winner: the trial whose model is to be used.
        solved: it is within the tolerance, and it is not the float model.
        trials: all, in the order in which they were made.
        confirmed: it is within the tolerance on the samples that decided nothing, too, where they can be asked.
        notes: what a reader must know, a sentence each.
        untried: (what was not tried, why).
    """

    winner: Tried = field(kw_only=False)
    solved: bool = field(kw_only=False)
    trials: list[Tried] = field(kw_only=False)
    confirmed: bool = True
    notes: list[str] = field(default_factory=list)
    untried: list[tuple[str, str]] = field(default_factory=list)

    @property
    def count(self) -> str:
        """How many trials there were, in words."""
        return f"{len(self.trials)} trial{'' if len(self.trials) == 1 else 's'}"


Told = TypeVar("Told", bound=Outcome[Any])


class Search(ABC, Generic[Tried, Told]):
    """The trials of one model.

    Args:
        goal: what is wanted.
        own: what tells the model and its samples from others, by name; asked where there is a ledger.
        tell: is told each trial in a line.

    Attributes:
        clock: the time that is left.
        book: the ledger.
        trials, notes, untried: as in ``Outcome``.
    """

    def __init__(self, goal: Goal, own: Callable[[], Mapping[str, str]], tell: Callable[[str], None]) -> None:
        self.goal, self.tell, self.clock = goal, tell, Clock(goal.seconds)
        self.trials, self.notes, self.untried = list[Tried](), list[str](), list[tuple[str, str]]()
        asked = {"purpose": goal.purpose, "metric": goal.identity, "tolerance": str(goal.drop)}
        self.book = Journal(None, {}) if goal.ledger is None else Journal(goal.ledger, {**own(), **asked})

    # ---- of the flow -------------------------------------------------------------------------------------------------

    @abstractmethod
    def steps(self) -> None:
        """Attempt what could help."""

    @abstractmethod
    def made(self, trial: Tried) -> Tried:
        """Quantize as a trial says, and judge on the choosing samples.

        Raises:
            QuarkError: why it cannot be made.
        """

    @abstractmethod
    def said(self, trial: Tried) -> str:
        """What came of a trial that could be made, in a few words."""

    @abstractmethod
    def ending(self) -> float:
        """Seconds that are needed when all trials are over."""

    @abstractmethod
    def cost(self, trial: Tried) -> tuple[float, ...]:
        """What is to be small, what counts most first."""

    @abstractmethod
    def rank(self, trial: Tried) -> tuple[float, ...]:
        """How accurate a trial is, larger is better."""

    @abstractmethod
    def proved(self, winner: Tried, good: Sequence[Tried]) -> Told:
        """The outcome; the winner, of those within the tolerance, judged on samples that decided nothing."""

    # ---- of both -----------------------------------------------------------------------------------------------------

    def remembered(self, trial: Tried) -> Tried | None:
        """What the ledger has of a trial."""
        kept = self.book.done(f"trial {trial.name}", KeptTrial)
        return None if kept is None else replace(trial, **{**dict(kept), "passes": bool(kept.passes)})

    def entry(self, trial: Tried) -> dict[str, Any]:
        """A trial as the ledger keeps it."""
        return {**{name: getattr(trial, name) for name in KeptTrial.model_fields}, "passes": int(trial.passes)}

    def found(self) -> Told:
        """Try, choose, and prove.

        Raises:
            DataError: nothing could be tried.
        """
        self.steps()
        tried = [trial for trial in self.trials if not trial.error]
        if not tried:
            raise DataError(f"nothing could be tried; the first: {self.trials[0].name}: {self.trials[0].error}")
        good = [trial for trial in tried if trial.passes]
        outcome = self.proved(self.cheapest(good) if good else self.nearest(tried), good)
        self.book.settle()
        return outcome

    def attempt(self, trial: Tried) -> Tried:
        """The trial with what came of it; one of the same name is not made again."""
        before = next((one for one in self.trials if one.name == trial.name), None)
        if before is not None:
            return before
        done = self.remembered(trial)
        if done is None:
            with self.clock.during(trial.pace):
                try:
                    done = self.made(trial)
                except QuarkError as error:
                    done = replace(trial, error=str(error))
            self.book.finish(f"trial {trial.name}", self.entry(done))
        self.trials.append(done)
        self.clock.reserved = self.ending()
        self.tell(f"{done.name}: {done.error or self.said(done)}")
        return done

    def usual(self, pace: str) -> float:
        """Seconds that a trial of this pace takes; until there was one, those of a plain one."""
        return self.clock.usual(pace) or self.clock.usual(PLAIN)

    def late(self, trial: Tried) -> bool:
        """Whether a trial would end too late. The first one never does."""
        return bool(self.trials) and not self.clock.fits(self.usual(trial.pace))

    def cheapest(self, trials: Sequence[Tried]) -> Tried:
        """The one that costs least, of equals the most accurate."""
        return min(trials, key=lambda one: (*self.cost(one), *(-part for part in self.rank(one))))

    def nearest(self, trials: Sequence[Tried]) -> Tried:
        """The most accurate."""
        return max(trials, key=self.rank)


class _Score(Schema):
    """A metric in a journal: as ``Score``."""

    value: float
    without: list[float]


def kept_score(journal: Journal, key: str, measure: Callable[[], Score]) -> Score:
    """What a journal has of a metric under ``key``; measured, and kept, where it has nothing."""
    known = journal.done(key, _Score)
    if known is None:
        found = measure()
        journal.finish(key, {"value": found.value, "without": list(found.without)})
        return found
    return Score(known.value, tuple(known.without))
