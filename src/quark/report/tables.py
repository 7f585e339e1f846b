"""Numbers as people read them, and tables on a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from quark.errors import printable
from quark.report.values import Table

NUMBER = re.compile(r"^[-+]?(\d[\d,.]*|inf|nan)\s?(%|dB|ms|s|kB|MB|GB|×)?(\s*\(.*\))?$")
SHORT = 28  # names in the first column up to this long are not broken


def brief(name: str, most: int = 48) -> str:
    """The name for a line of text: the middle of one that is longer than ``most`` characters is left out."""
    return name if len(name) <= most else f"{name[: most - 17]}…{name[-16:]}"


def decibels(value: float) -> str:
    """``31.4 dB``; an exact copy is ``inf dB``."""
    return f"{value:.1f} dB"


def milliseconds(seconds: float) -> str:
    """A duration below a second, as ``0.32 ms``."""
    return f"{seconds * 1e3:.2f} ms"


def file_size(count: int | float) -> str:
    """A size in powers of 1,000: ``412 kB``, ``25.6 MB``, ``2.1 GB``."""
    for limit, unit in ((1e6, "kB"), (1e9, "MB")):
        if count < limit:
            figure = count / (limit / 1e3)
            return f"{figure:.0f} {unit}" if figure >= 100 else f"{figure:.1f} {unit}"
    return f"{count / 1e9:.1f} GB"


def duration(seconds: float) -> str:
    """A time to wait for: ``3.2 s``, ``95 s``, ``40 min``, ``17 h``, ``3 days``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    units = ((1, 120, "s"), (60, 120, "min"), (3600, 48, "h"))
    found = next(((size, unit) for size, most, unit in units if seconds < size * most), (86400, "days"))
    return f"{seconds / found[0]:.0f} {found[1]}"


def plain(value: float) -> float | str:
    """A float as JSON can hold it: what is not finite becomes ``"inf"``, ``"-inf"`` or ``"nan"``."""
    return value if math.isfinite(value) else str(value)


def is_numeric(table: Table, column: int) -> bool:
    """Whether every filled cell of a column is a number, perhaps with a unit."""
    cells = [row[column] for row in table.rows if row[column] not in ("", "–")]
    return bool(cells) and all(NUMBER.match(cell) for cell in cells)


def to_rich(table: Table) -> RichTable:
    """The table for a terminal; columns of numbers are right-aligned."""
    title = Text(_in_a_line(table.title), "bold")
    shown = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    shown.caption, shown.caption_justify = Text(printable(table.note), "table.caption") if table.note else None, "left"
    for index, heading in enumerate(table.columns):
        numeric = is_numeric(table, index)
        whole = numeric or (index == 0 and all(len(row[0]) <= SHORT for row in table.rows))
        shown.add_column(
            Text(_in_a_line(heading)), justify="right" if numeric else "left", no_wrap=whole, overflow="fold"
        )
    for row in table.rows:
        shown.add_row(*(Text(_in_a_line(cell)) for cell in row))
    return shown


def _in_a_line(text: str) -> str:
    """A name as one line of a cell, whatever it holds."""
    return printable(text).replace("\n", "\\n")


def print_table(table: Table, console: Console | None = None) -> None:
    """Write the table to ``console``, or to standard output; one without rows is left out."""
    if table.rows:
        (console or Console(emoji=False)).print(to_rich(table))


def print_lines(lines: Iterable[str]) -> None:
    """Write lines as they are to standard error."""
    Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True).print(printable("\n".join(lines)))
