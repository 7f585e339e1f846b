"""What the commands print: tables for people, one JSON object for programs; the page that ``--report`` asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from quark.errors import printable
from quark.files.outputs import Output, write_output
from quark.report import Report, Table, print_table
from quark.report.tables import plain


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
    print(json.dumps(_strict(values), indent=2))


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
