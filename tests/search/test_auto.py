"""The part of ``auto`` that both flows share, on a flow of made-up trials and a clock that only they move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from quark.errors import ConfigError, DataError
from quark.search.auto import AutoTrial, Goal, Outcome, Search


@dataclass(frozen=True)
class Row(AutoTrial):
    value: float = math.nan
    takes: float = 1.0

    @property
    def pace(self) -> str:
        return f"trial {self.takes:g}" if self.takes != 1 else super().pace


@dataclass(frozen=True)
class Asked(Goal):
    PURPOSES = dict.fromkeys(("small", "fast"))
    ELSEWHERE = "here"


class Rows(Search[Row, Outcome[Row]]):
    """Within the tolerance is a value of at least 5; the last second is for what comes after the trials."""

    def __init__(self, rows: Sequence[Row], goal: Asked, now: list[float]) -> None:
        self.told, self.began, self.rows, self.now = list[str](), list[float](), rows, now
        super().__init__(goal, lambda: {"rows": "1"}, self.told.append)

    def steps(self) -> None:
        for row in self.rows:
            if self.late(row):
                self.untried.append((row.name, "late"))
            else:
                self.attempt(row)

    def made(self, trial: Row) -> Row:
        self.began.append(self.now[0])
        self.now[0] += trial.takes
        if trial.value < 0:
            raise ConfigError("it cannot be made")
        return replace(trial, passes=trial.value >= 5)

    def said(self, trial: Row) -> str:
        return f"value {trial.value:g}"

    def ending(self) -> float:
        return 1.0

    def cost(self, trial: Row) -> tuple[float, ...]:
        return (trial.bytes,)

    def rank(self, trial: Row) -> tuple[float, ...]:
        return (-math.inf if math.isnan(trial.value) else trial.value,)

    def proved(self, winner: Row, good: Sequence[Row]) -> Outcome[Row]:
        return Outcome(winner, bool(good), self.trials, untried=self.untried)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


GOOD = Row("good", value=6.0, bytes=9)
MISS = Row("miss", value=4.0, bytes=1)
BROKEN = Row("broken", value=-1.0, bytes=0)


@pytest.mark.parametrize(
    ("rows", "winner", "solved"),
    [
        ([MISS, GOOD, Row("dear", value=9, bytes=10)], "good", True),  # what is cheap counts first
        ([GOOD, Row("alike", value=7, bytes=9)], "alike", True),  # of equals the most accurate
        ([GOOD, Row("twin", value=6.0, bytes=9)], "good", True),
        ([Row("far", value=1), MISS, BROKEN, Row("nan")], "miss", False),
        ([Row("nan"), Row("far", value=1)], "far", False),
    ],
)
def test_the_cheapest_within_the_tolerance_wins_or_the_nearest_miss(
    rows: list[Row], winner: str, solved: bool, now: list[float]
) -> None:
    found = Rows(rows, Asked("small"), now).found()
    assert (found.winner.name, found.solved) == (winner, solved)
    assert [one.name for one in found.trials] == [one.name for one in rows]


def test_what_cannot_be_made_is_told_and_where_nothing_can_the_first_reason(now: list[float]) -> None:
    search = Rows([BROKEN, GOOD, GOOD], Asked("small"), now)
    assert search.found().winner.name == "good" and len(search.trials) == 2 == len(search.began)
    assert search.told == ["broken: it cannot be made", "good: value 6"]
    with pytest.raises(DataError, match="the first: broken: it cannot be made"):
        Rows([BROKEN, replace(BROKEN, name="other")], Asked("small"), now).found()


@pytest.mark.parametrize("seconds", [0.0, 2.0, 3.0, 6.0, 9.0])
def test_nothing_begins_that_would_end_too_late(seconds: float, now: list[float]) -> None:
    rows = [Row(f"{k}", value=1, takes=takes) for k, takes in enumerate((1, 1, 3, 1, 3, 1))]
    search = Rows(rows, Asked("small", seconds=seconds), now)
    found, paces = search.found(), {"trial": 1.0, "trial 3": 1.0}
    assert search.began[0] == 0.0 and len(found.trials) + len(found.untried) == len(rows)
    clock = 0.0
    for row in rows:  # a pace that was never seen is that of a plain trial
        if row.name in [one.name for one in found.trials]:
            assert clock == 0.0 or clock + paces[row.pace] + 1.0 <= seconds
            clock, paces[row.pace] = clock + row.takes, row.takes
        else:
            assert clock + paces[row.pace] + 1.0 > seconds and (row.name, "late") in found.untried


def test_a_ledger_goes_on_with_what_it_has_and_belongs_to_the_goal(tmp_path: Path, now: list[float]) -> None:
    goal = Asked("small", 0.1, ledger=tmp_path / "l.json")
    rows = [BROKEN, MISS, GOOD]
    first = Rows(rows[:2], goal, now)
    first.found()
    again = Rows(rows, goal, now)
    whole = Rows(rows, replace(goal, ledger=None), now)
    assert repr(again.found().trials) == repr(whole.found().trials)
    assert len(again.began) == 1 and again.told[:2] == first.told
    others: list[tuple[dict[str, Any], str]] = [
        ({"purpose": "fast"}, "purpose"),
        ({"drop": 0.2}, "tolerance"),
        ({"drop": None}, "tolerance"),
        ({"identity": "f"}, "metric"),
    ]
    for other, said in others:
        with pytest.raises(ConfigError, match=said):
            Rows(rows, replace(goal, **other), now)


def test_a_purpose_of_another_flow_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'small'.*, here"):
        Asked("smal")
