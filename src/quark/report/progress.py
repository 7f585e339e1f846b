"""Progress on standard error: bars on a terminal and in notebooks, a line every ten seconds in a log file.

A bar is one line a stage, and gone when the work is done. ``quiet`` leaves everything out (commands with ``--json``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console

Update = Callable[[str, int, int | None], None]
PAUSE = 10.0
"""Seconds between the lines in a log file; what takes less says nothing there."""
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def quiet(silent: bool = True) -> Iterator[None]:
    """Show no progress in this context, if ``silent``."""
    token = _quiet.set(silent)
    try:
        yield
    finally:
        _quiet.reset(token)


@contextmanager
def bars(console: Console | None = None) -> Iterator[Update]:
    """A function ``update(stage, done, total)`` that shows the progress of any number of stages.

    ``total`` is None where it is not known. Where ``console`` (standard error) is a file, lines take the place of bars.
    """
    console = console or Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter) or _quiet.get():
        yield _lines(console)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as progress:

        def update(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield update


def _lines(console: Console) -> Update:
    """A function that writes a line now and then."""
    last = time.monotonic()

    def update(stage: str, done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= PAUSE and not _quiet.get():
            last = time.monotonic()
            of = "" if total is None else f" of {total}"
            console.print(f"{stage}: {done}{of}", markup=False, highlight=False, soft_wrap=True)

    return update
