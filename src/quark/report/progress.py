"""Progress bars: on standard error, only on a terminal, one line a stage, gone when the work is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

Update = Callable[[str, int, int | None], None]


@contextmanager
def bars(console: Console | None = None) -> Iterator[Update]:
    """A function ``update(stage, done, total)`` that draws the progress of any number of stages.

    ``total`` is None where it is not known. Nothing is drawn where ``console`` (standard error) is not a terminal.
    """
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def update(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield update
