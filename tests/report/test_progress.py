"""Progress shows on a terminal and stays out of everything else."""

from __future__ import annotations

import contextlib
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


def test_a_notebook_has_one_line_that_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """A kernel without ipywidgets: rich's bars are a warning and empty outputs there."""
    monkeypatch.setattr("quark.report.progress.BLINK", 0.0)
    for done in ("by the work", "by an error"):
        with contextlib.suppress(ValueError), bars(Console(force_jupyter=True)) as update:
            update("calibrate", 12, 100)
            update("read", 7, None)
            if done == "by an error":
                raise ValueError
        written = capsys.readouterr().err
        assert written.startswith("\rcalibrate: 12 of 100\rread: 7") and "\n" not in written
        rows = written.split("\r")
        seen = ""
        for row in rows:  # as a notebook draws them: each from the start of the line
            seen = row + seen[len(row) :]
        assert rows[-1] == "" and seen.strip() == "" and not recwarn.list
    with quiet(), bars(Console(force_jupyter=True)) as update:
        update("calibrate", 12, 100)
    assert capsys.readouterr().err == ""
