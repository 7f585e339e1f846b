"""Progress shows on a terminal and stays out of everything else."""

from __future__ import annotations

import io

from rich.console import Console

from quark.report.progress import bars


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


def test_nothing_in_a_file() -> None:
    assert drawn(False).strip() == ""
