"""Numbers and tables as people read them."""

from __future__ import annotations

import io
import math

import hypothesis
import pytest
from hypothesis import strategies
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from quark.report import Table, decibels, file_size, milliseconds, print_table
from quark.report.tables import NARROWEST, is_numeric, plain


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0.0 kB"), (430163, "430 kB"), (99_500, "99.5 kB"), (1_607_528, "1.6 MB"), (2_100_000_000, "2.1 GB")],
)
def test_file_size(count: int, words: str) -> None:
    assert file_size(count) == words


def test_units() -> None:
    assert milliseconds(0.000321) == "0.32 ms"
    assert decibels(31.449) == "31.4 dB"
    assert decibels(math.inf) == "inf dB"


def test_plain_keeps_json_strict() -> None:
    assert plain(1.5) == 1.5
    assert (plain(math.inf), plain(math.nan)) == ("inf", "nan")


def test_columns_of_numbers_are_recognised() -> None:
    table = Table("t", ("name", "size", "gain"), (("a", "1.6 MB", "–"), ("b", "430 kB", "3.3×")))
    assert [is_numeric(table, column) for column in range(3)] == [False, True, True]


def test_markup_in_cells_is_text() -> None:
    stream = io.StringIO()
    print_table(Table("t", ("node",), (("a[bold]/x",),), note="note"), Console(file=stream, width=60))
    assert "a[bold]/x" in stream.getvalue() and "note" in stream.getvalue()


def printed(table: Table, width: int) -> list[str]:
    stream = io.StringIO()
    print_table(table, Console(file=stream, width=width))
    return stream.getvalue().splitlines()


def of_rich(table: Table) -> list[str]:
    """The table as rich lays it out where there is room for all."""
    shown = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(table.columns):
        shown.add_column(heading, justify="right" if is_numeric(table, index) else "left", no_wrap=True)
    for row in table.rows:
        shown.add_row(*map(Text, row))
    stream = io.StringIO()
    Console(file=stream, width=1000).print(shown)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


CELL = strategies.text("ab 漢é._/[]", max_size=30).map(str.strip) | strategies.from_regex(
    r"[0-9]{1,3}\.[0-9] dB", fullmatch=True
)


@hypothesis.given(
    rows=strategies.lists(strategies.tuples(CELL, CELL, CELL), min_size=1, max_size=4),
    narrow=strategies.integers(30, 90),
)
def test_a_table_is_that_of_rich_and_loses_nothing_where_it_is_narrow(rows: list[tuple[str, ...]], narrow: int) -> None:
    table = Table("title", ("name", "size", "what it is"), tuple(rows))
    assert printed(table, 1000) == of_rich(table)
    lines = printed(table, narrow)
    assert max(map(cell_len, lines)) <= max(narrow, 3 * NARROWEST + 8)
    body = lines[1 + next(number for number, line in enumerate(lines) if "──" in line) :]
    kept = sorted("".join(body).replace(" ", ""))
    assert kept == sorted("".join(map("".join, rows)).replace(" ", ""))
