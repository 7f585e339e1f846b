"""Numbers as people read them, and tables on a terminal."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Console
from rich.control import strip_control_codes
from rich.text import Text

from quark.report.values import Table

NUMBER = re.compile(r"^[-+]?(\d[\d,.]*|inf|nan)\s?(%|dB|ms|s|kB|MB|GB|×)?(\s*\(.*\))?$")
SHORT = 28  # names in the first column up to this long are not broken
NARROWEST = 6  # columns that wrap are not made narrower


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


def plain(value: float) -> float | str:
    """A float as JSON can hold it: what is not finite becomes ``"inf"``, ``"-inf"`` or ``"nan"``."""
    return value if math.isfinite(value) else str(value)


def is_numeric(table: Table, column: int) -> bool:
    """Whether every filled cell of a column is a number, perhaps with a unit."""
    cells = [row[column] for row in table.rows if row[column] not in ("", "–")]
    return bool(cells) and all(NUMBER.match(cell) for cell in cells)


def table_lines(table: Table, width: int) -> list[tuple[str, str]]:
    """The table as (style, line); columns of numbers are right-aligned, words that do not fit into ``width`` wrap.

    Laid out here and not by rich: that took a quarter of the time of a small model's quantization.
    """
    numeric = [is_numeric(table, index) for index in range(len(table.columns))]
    short = bool(table.rows) and all(len(row[0]) <= SHORT for row in table.rows)
    cells = [table.columns, *table.rows]
    natural = [max(cell_len(part) for row in cells for part in parts(row[index])) for index in range(len(numeric))]
    whole = [number or (short and not index) for index, number in enumerate(numeric)]
    widths = fitted(natural, whole, width - 3 * len(natural) + 1)
    made = [line for row in cells for line in row_lines(row, widths, numeric)]
    head = len(row_lines(table.columns, widths, numeric))
    lines = [("bold", table.title), ("", ""), *(("bold", line) for line in made[:head])]
    lines += [("", " " + "─" * (sum(widths) + 3 * len(widths) - 3)), *(("", line) for line in made[head:]), ("", "")]
    return lines + [("dim italic", line) for line in wrapped(table.note, width)] * bool(table.note)


def fitted(natural: Sequence[int], whole: Sequence[bool], room: int) -> list[int]:
    """Widths of columns that fill ``room`` at most: wide ones are cut to one width, those to keep whole at last."""
    widths = list(natural)
    for kept in (whole, [False] * len(whole)):
        for widest in range(max(natural), NARROWEST - 1, -1):
            widths = [size if keep else min(size, widest) for size, keep in zip(natural, kept, strict=True)]
            if sum(widths) <= room:
                return widths
    return widths


def row_lines(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> list[str]:
    """The lines of one row: as many as its longest cell has."""
    every = zip_longest(*(wrapped(cell, width) for cell, width in zip(row, widths, strict=True)), fillvalue="")
    return [(" " + "   ".join(map(aligned, line, widths, numeric))).rstrip() for line in every]


def aligned(words: str, width: int, right: bool) -> str:
    """Words filled up to a width in columns of the terminal."""
    fill = " " * (width - cell_len(words))
    return fill + words if right else words + fill


def wrapped(words: str, width: int) -> list[str]:
    """Words in lines of at most ``width`` columns; characters of two columns count as such."""
    found = []
    for part in parts(words):
        size = cell_len(part)
        room = width if size == len(part) else max(1, width // 2)
        found += textwrap.wrap(part, room, break_on_hyphens=False) if size > width else [part]
    return found


def parts(words: str) -> list[str]:
    """The lines of a cell, one at least, without characters that steer a terminal."""
    return [strip_control_codes(part).expandtabs() for part in words.splitlines()] or [""]


def print_table(table: Table, console: Console | None = None) -> None:
    """Write the table to ``console``, or to standard output; one without rows is left out."""
    if table.rows:
        shown = console or Console()
        text = Text("\n").join(Text(line, style) for style, line in table_lines(table, shown.width))
        shown.print(text, soft_wrap=True)


def print_lines(lines: Iterable[str]) -> None:
    """Write lines as they are to standard error."""
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print("\n".join(lines))
