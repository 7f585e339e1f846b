"""Progress on standard error: bars on a terminal, one line in a notebook, a line every ten seconds in a log file.

What a terminal or a notebook shows is gone when the work is done. ``quiet`` leaves everything out (commands with
``--json``). A notebook's line overwrites itself: bars of rich ask for ipywidgets there, which many notebooks lack.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console

Update = Callable[[str, int, int | None], None]
PAUSE = 10.0
"""Seconds between the lines in a log file; what takes less says nothing there."""
BLINK = 0.5
"""Seconds between two states of a notebook's line."""
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
    console = console or Console(stderr=True, emoji=False)
    if console.is_jupyter:
        with _one_line() as update:
            yield update
        return
    if not console.is_terminal or _quiet.get():
        yield _every(
            PAUSE, lambda text: console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
        )
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


@contextmanager
def _one_line() -> Iterator[Update]:
    """A line that each state of the work overwrites, and the end clears."""
    width = 0

    def write(text: str) -> None:
        nonlocal width
        print("\r" + text.ljust(width), end="", file=sys.stderr, flush=True)
        width = len(text)

    try:
        yield _every(BLINK, write)
    finally:
        if width:
            write("")
            print("\r", end="", file=sys.stderr, flush=True)


def _every(pause: float, write: Callable[[str], None]) -> Update:
    """A function that tells ``write`` how far the work is, once in ``pause`` seconds at most."""
    last = time.monotonic()

    def update(stage: str, done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= pause and not _quiet.get():
            last = time.monotonic()
            write(f"{stage}: {done}" + ("" if total is None else f" of {total}"))

    return update
