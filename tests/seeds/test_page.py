"""The page of conformance is fresh and whole: every test exists, and every line that promises something has a row."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest
from tests.seeds import text
from tests.seeds.options import STATED
from tests.seeds.page import page
from tests.seeds.rows import ROWS, SILENT, UNTESTED

ROOT = Path(__file__).parents[2]
PLACE = re.compile(r"(?P<file>tests/[\w/]+\.py)(?:::(?P<function>\w+)(?:\[(?P<id>.*?)\]?)?)?$")


def test_the_page_is_fresh() -> None:
    written = (ROOT / "docs" / "seeds" / "conformance.md").read_text(encoding="utf-8")
    assert written == page(), "docs/seeds/conformance.md is stale: run python docs/generate.py"


@cache
def functions(file: str) -> dict[str, str]:
    """Every function of a test file, with its source and that of its decorators."""
    source = (ROOT / file).read_text(encoding="utf-8")
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            start = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found[node.name] = "\n".join(source.split("\n")[start - 1 : node.end_lineno])
    return found


def ids_of(file: str, function: str) -> set[str]:
    """The ids that pytest gives to the parameters of a test of ``tests/seeds``, from its marks."""
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    ids = [""]
    for mark in getattr(getattr(module, function), "pytestmark", []):
        if mark.name == "parametrize":
            values = list(mark.args[1])
            given = mark.kwargs.get("ids")
            names = list(given) if given is not None and not callable(given) else [_name(one) for one in values]
            ids = [f"{old}-{new}" if old else new for old in ids for new in names]
    return set(ids)


def _name(value: object) -> str:
    return "-".join(map(_name, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("file", sorted({row.test.split("::")[0] for row in ROWS}))
def test_every_test_exists(file: str) -> None:
    for row in ROWS:
        match = PLACE.match(row.test)
        assert match is not None, row.test
        if match["file"] != file:
            continue
        assert (ROOT / file).is_file()
        if match["function"] is None:
            continue
        assert match["function"] in functions(file), row.test
        if match["id"] and file.startswith("tests/seeds/"):
            assert any(match["id"] in one for one in ids_of(file, match["function"])), row.test
        elif match["id"]:
            assert f'"{match["id"]}"' in (ROOT / file).read_text(encoding="utf-8"), row.test


def test_few_rows_differ() -> None:
    own = [row for row in ROWS if row.reason]
    assert len(own) <= 0.05 * len(ROWS)
    assert len({(row.page, row.first, row.about, row.test) for row in ROWS}) == len(ROWS)


def test_every_option_has_its_rows() -> None:
    for option in STATED:
        about = {row.about for row in ROWS if (row.page, row.first) == ("004", option.line)}
        assert {f"{option.name}: effect"} <= about


def numbers(ranges: str) -> set[int]:
    """The numbers of ``1 3-5``."""
    ends = [[int(end) for end in part.split("-")] for part in ranges.split()]
    return {number for first, *last in ends for number in range(first, (last or [first])[0] + 1)}


@text.needed
@pytest.mark.parametrize("number", text.PAGES)
def test_every_line_has_a_row_or_promises_nothing(number: str) -> None:
    covered = {line for row in ROWS if row.page == number for line in range(row.first, row.last + 1)}
    silent = numbers(SILENT[number]) | UNTESTED.get(number, {}).keys()
    for line, words in enumerate(text.lines(number), 1):
        assert not words.strip() or line in covered | silent, f"{number}:{line} has no row"
    options = {option.line for option in STATED} if number == "004" else set()
    assert not silent & options


@text.needed
def test_the_page_has_none_of_the_sentences() -> None:
    """Places and our own words; names are facts."""
    made = page()
    for number in text.PAGES:
        for line in text.lines(number):
            for sentence in re.split(r"(?<=[.:]) ", line):
                assert len(sentence) < 45 or sentence not in made
