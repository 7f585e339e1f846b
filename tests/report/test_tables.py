"""Numbers and tables as people read them."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from quark.report import Table, decibels, duration, file_size, milliseconds, print_table
from quark.report.tables import is_numeric, plain


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0.0 kB"), (430163, "430 kB"), (99_500, "99.5 kB"), (1_607_528, "1.6 MB"), (2_100_000_000, "2.1 GB")],
)
def test_file_size(count: int, words: str) -> None:
    assert file_size(count) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (119.4, "119 s"),
        (121, "2 min"),
        (7000, "117 min"),
        (7300, "2 h"),
        (8_486_927, "98 days"),
    ],
)
def test_duration(seconds: float, words: str) -> None:
    assert duration(seconds) == words


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
