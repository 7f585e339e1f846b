"""Which lines of the broken packages each test runs: one record per test file, kept until that file changes.

A plugin of pytest. ``Covering(prefixes, folder)`` writes ``folder/<test file>.json``: the digests of the test file and
of every source file that it runs, the seconds of each test, and ``{source file: {line: [number of a test, …]}}``; and
``folder/sources/<digest>``, the text of these files. Where a source has changed since, its lines are looked for in what
it is now: the record only says who is asked, so one that is a little old costs a kill and makes none.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
Lines = set[tuple[str, int]]
LONGEST = 120.0
"""Seconds of work after which no further test of a file is recorded: those of a file look at the same lines."""


def worked() -> float:
    """Seconds that this process and what it has started have computed: another job on the machine adds nothing."""
    return sum(os.times()[:4])


def digest(path: Path) -> str:
    """Of a file's contents; empty where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def kept(folder: Path, test_file: str) -> Path:
    """Where the record of a test file is."""
    return folder / f"{test_file.replace('/', '.')}.json"


def source_kept(folder: Path, one: str) -> Path:
    """Where the text of a source file is, by its digest."""
    return folder / "sources" / one


def record_of(folder: Path, test_file: str) -> dict[str, Any] | None:
    """The record of a test file; nothing where that has changed since, or how a source was is not known."""
    path = kept(folder, test_file)
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    was = found["sources"].items()
    if found["digest"] != digest(ROOT / test_file) or not all(source_kept(folder, one).exists() for _, one in was):
        return None
    changed = {file: moved(source_kept(folder, one), SOURCES / file) for file, one in was if one != now(file)}
    for file, lines in changed.items():
        kept_lines = {int(line): tests for line, tests in found["lines"][file].items()}
        found["lines"][file] = {lines[line]: tests for line, tests in kept_lines.items() if line in lines}
    return found


@cache
def now(file: str) -> str:
    """The digest of a source file as it is."""
    return digest(SOURCES / file)


@cache
def moved(before: Path, after: Path) -> dict[int, int]:
    """Where the lines of a file are in another."""
    texts = [path.read_text(encoding="utf-8").splitlines() if path.exists() else [] for path in (before, after)]
    blocks = SequenceMatcher(None, *texts, autojunk=False).get_matching_blocks()
    return {old + k + 1: new + k + 1 for old, new, size in blocks for k in range(size)}


@dataclass(eq=False)
class Covering:
    """The plugin. What a fixture of a file runs belongs to every test of the file that asks for it."""

    prefixes: tuple[str, ...]
    folder: Path
    lines: dict[str, Lines] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    fixtures: dict[tuple[str, str], Lines] = field(default_factory=lambda: defaultdict(set))
    now: Lines = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    file: str = ""
    began: float = field(default_factory=worked)
    watched: dict[str, bool] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """One case of every test before the second: what is not reached in time are further cases."""
        cases: dict[str, int] = defaultdict(int)
        turns = {}
        for item in items:
            test = item.nodeid.split("[")[0]
            turns[item] = cases[test]
            cases[test] += 1
        items.sort(key=turns.__getitem__)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename  # asked at every call of anything: looked up by a text whose hash is kept
        if name not in self.watched:
            self.watched[name] = name.startswith(self.prefixes)
        return self._in_code if self.watched[name] else None

    def _in_code(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.now.add((frame.f_code.co_filename, frame.f_lineno))
        return self._in_code

    def _traced(self) -> Iterator[None]:
        self.now.clear()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        yield
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Trace the fixtures of a test."""
        start = worked()
        yield from self._traced()
        found = getattr(item, "_fixtureinfo").name2fixturedefs.items()  # noqa: B009 - not public
        shared = [(item.nodeid.split("::")[0], name) for name, made in found if made[-1].scope != "function"]
        for one in shared:
            self.fixtures[one] |= self.now
        self.lines[item.nodeid] = self.now.union(*(self.fixtures[one] for one in shared))
        self.seconds[item.nodeid] = worked() - start

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Trace one test."""
        start = worked()
        yield from self._traced()
        self.lines[item.nodeid] |= self.now
        self.seconds[item.nodeid] += worked() - start
        if worked() - self.began > LONGEST:
            item.session.shouldstop = "the tests that have run are enough to choose from"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that fails as it is cannot notice a change: it is left out of the record."""
        if report.failed:
            self.failed.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write the record of the file before when another begins: what is interrupted keeps what it has."""
        test_file = nodeid.split("::")[0]
        if self.file not in ("", test_file):
            self._write(self.file)
        self.file = test_file

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write that of the last file."""
        if self.file:
            self._write(self.file)

    def _write(self, test_file: str) -> None:
        tests = [test for test in self.lines if test.split("::")[0] == test_file and test not in self.failed]
        where: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for number, test in enumerate(tests):
            for file, line in sorted(self.lines[test]):
                where[str(Path(file).relative_to(SOURCES))][line].append(number)
        record: dict[str, Any] = {
            "digest": digest(ROOT / test_file),
            "sources": {file: now(file) for file in where},
            "tests": [(test, round(self.seconds[test], 3)) for test in tests],
            "lines": where,
        }
        (self.folder / "sources").mkdir(exist_ok=True)
        for file, one in record["sources"].items():
            source_kept(self.folder, one).write_bytes((SOURCES / file).read_bytes())
        kept(self.folder, test_file).write_text(json.dumps(record), encoding="utf-8")
