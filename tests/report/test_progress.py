"""Progress shows on a terminal and stays out of everything else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from quark.report.progress import bars, quiet


def drawn(terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=80)
    with bars(console) as update:
        update("calibrate", 0, 4)
        update("calibrate", 3, 4)
        update("read", 7, None)
    return stream.getvalue()


def test_bars_on_a_terminal() -> None:
    assert "calibrate" in drawn(True) and "3/4" in drawn(True) and "7/?" in drawn(True)


def test_nothing_in_a_file_where_it_is_quick() -> None:
    assert drawn(False).strip() == ""


def test_a_line_every_ten_seconds_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 4))
    monkeypatch.setattr("quark.report.progress.time.monotonic", lambda: float(next(now)))
    monkeypatch.setattr("quark.report.progress.PAUSE", 8.0)
    lines = drawn(False).splitlines()
    assert lines == ["calibrate: 3 of 4"]


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_shows_nothing(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.report.progress.PAUSE", 0.0)
    with quiet():
        assert drawn(terminal).strip() == ""
    assert drawn(terminal).strip() != ""
    with quiet(False):
        assert drawn(terminal).strip() != ""
