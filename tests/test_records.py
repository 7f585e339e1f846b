"""Benchmarks leave records, and RESULTS.md holds what the records hold and nothing else."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed

from benchmarks import page, record

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted(
    path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text() and path.stem != "page"
)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_every_benchmark_takes_json_and_leaves_a_record(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert 'add_argument("--json", type=Path' in text
    assert "sys.exit(record.run(main, __file__))" in text


def test_printed_tables_are_read_back() -> None:
    text = "machine\n\n| a | b |\n|---|:-:|\n| 1 | x y |\n| 2 | |\n\nlimits | no table\n| c |\n|--|\n"
    assert record.tables(text) == [
        {"headers": ["a", "b"], "rows": [["1", "x y"], ["2", ""]]},
        {"headers": ["c"], "rows": []},
    ]


def test_a_record_says_what_was_measured_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "figures.json"

    def main() -> int:
        print("| a |\n|---|\n| 1 |")
        file.write_text(json.dumps({"rows": [0.5]}))
        return 3

    monkeypatch.setattr(sys, "argv", ["x", "--toy", "--json", str(file)])
    assert record.run(main, "benchmarks/some.py") == 3
    kept = json.loads(file.read_text())
    assert kept["command"] == "python -m benchmarks.some --toy --json figures.json"
    assert (kept["benchmark"], kept["exit"], kept["rows"]) == ("some", 3, [0.5])
    assert kept["tables"] == [{"headers": ["a"], "rows": [["1"]]}]
    assert {"processor", "cores", "python", "packages", "date"} <= set(kept["machine"])


def test_without_a_file_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x"])
    assert record.run(lambda: None, "some.py") == 0
    assert list(tmp_path.iterdir()) == []


def test_results_are_printed_from_the_records() -> None:
    """Nothing in RESULTS.md is typed by hand; `python -m benchmarks.page` writes it."""
    assert page.PAGE.read_text(encoding="utf-8") == page.page()
    assert page.pictures() == {path: path.read_text(encoding="utf-8") for path in page.pictures()}


@pytest.mark.parametrize("path", sorted(page.RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_a_record_belongs_to_a_section_and_ended_well(path: Path) -> None:
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert path.stem in page.SECTIONS
    assert kept["tables"] and kept["tables"][0]["rows"]
    assert re.match(r"python -m benchmarks\.\w+", kept["command"])
    assert "/" not in kept["command"]  # no path of somebody's machine


def test_a_column_that_is_printed_no_more_is_an_error() -> None:
    with pytest.raises(KeyError, match="prints no column 'gone'"):
        page.shown({"command": "x", "tables": [{"headers": ["a"], "rows": []}]}, ("gone",))
