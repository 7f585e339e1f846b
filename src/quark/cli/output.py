"""What the commands print: tables for people, one JSON object for programs; the page that ``--report`` asks for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console

from quark.errors import printable
from quark.files.outputs import Output, write_output
from quark.report import Report, Table, print_table
from quark.report.progress import quiet
from quark.report.tables import plain

_ALONE: list[ExitStack] = []
"""What gives standard output back, while ``results_alone`` keeps it."""


def show(table: Table) -> None:
    """A table on standard output."""
    print_table(table)


def say(words: str) -> None:
    """A line for people on standard error, so that standard output holds results only."""
    Console(stderr=True, highlight=False, markup=False, emoji=False).print(printable(words), soft_wrap=True)


def write_lines(lines: Sequence[str]) -> None:
    """Lines on standard output as they are: a command in them can be copied whole."""
    Console(highlight=False, markup=False, emoji=False).print(printable("\n".join(lines)), soft_wrap=True)


def print_json(values: Mapping[str, Any]) -> None:
    """One object on standard output; numbers that JSON lacks become words (``"inf"``)."""
    text = json.dumps(_strict(values), indent=2)
    if _ALONE:
        _ALONE[-1].close()
    print(text)


@contextmanager
def results_alone() -> Iterator[None]:
    """Standard output gets what ``print_json`` is given, and nothing before it.

    Progress is not shown. What libraries print, functions of the user's and processes that either starts, goes to
    standard error.
    """
    with ExitStack() as stack:
        _ALONE.append(stack)
        stack.callback(_ALONE.pop)
        if sys.stdout is not None and sys.stdout is sys.__stdout__:  # others have no descriptor of their own
            stack.enter_context(_to_error())
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(quiet())
        yield


@contextmanager
def _to_error() -> Iterator[None]:
    """Write to standard error what goes to the descriptor of standard output, of child processes too."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of them is closed
        yield
        return
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, float):
        return plain(value)
    return str(value) if isinstance(value, Path) else value


def write_page(report: Report, path: Path) -> None:
    """Write the HTML page.

    Raises:
        OutputError: the file cannot be written.
    """
    from quark.report.html import write_html

    write_html(report, path)


def write_text(text: str, path: Path) -> None:
    """Write a text file.

    Raises:
        OutputError: the file cannot be written.
    """
    write_output(Output(path), text)
