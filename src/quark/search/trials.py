"""What an automatic search is asked, what it tries and what it finds: the part that both flows share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from quark.errors import ConfigError

DROP = 0.01
"""The part of a metric that may be lost where nothing is said."""
LATE = "no time was left"
"""Why something was not tried."""


@dataclass(frozen=True)
class Goal:
    """What is wanted.

    Attributes:
        purpose: what the result is made for: a row of the flow's ``PURPOSES``.
        drop: the part of the metric that may be lost; None: what is usual.
        metric: the user's function of a model → number, or ``Score`` that knows its error, larger is better.
        seconds: for all trials; the one that runs is not stopped.
        ledger: a JSON file that finished trials are kept in; after a kill the same call goes on from there.
        identity: what tells ``metric`` from another function.

    Raises:
        ConfigError: a drop outside 0..1.
    """

    purpose: str
    drop: float | None = None
    metric: Callable[[Any], Any] | None = None
    seconds: float = 600.0
    ledger: Path | None = None
    identity: str = "none"

    def __post_init__(self) -> None:
        if self.drop is not None and not 0 <= self.drop < 1:
            raise ConfigError(f"--drop is {self.drop:g}: it is the part that may be lost, from 0 to 1, such as 0.01")


@dataclass(frozen=True, kw_only=True)
class Trial:
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


Tried = TypeVar("Tried", bound=Trial)


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
