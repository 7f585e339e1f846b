"""A plugin of pytest: which lines of the sources each test runs.

``pytest -p tests.mutants.covering`` writes the file that ``QUARK_COVERING`` names: ``{file: {line: [test, …]}}`` and
the seconds of each test. Only files below the folders in ``QUARK_COVERED`` are traced.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

SOURCES = str(Path(__file__).parents[2] / "src") + os.sep
COVERED = tuple(SOURCES + folder for folder in os.environ.get("QUARK_COVERED", "").split(os.pathsep))
#: Tests of one line that are kept, the fastest.
KEPT = 120

_lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
_seconds: dict[str, float] = {}
_now: set[tuple[CodeType, int]] = set()


def _trace(frame: FrameType, event: str, argument: Any) -> Any:
    return _in_code if frame.f_code.co_filename.startswith(COVERED) else None


def _in_code(frame: FrameType, event: str, argument: Any) -> Any:
    if event == "line":
        _now.add((frame.f_code, frame.f_lineno))
    return _in_code


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Trace one test."""
    _now.clear()
    threading.settrace(_trace)
    sys.settrace(_trace)
    start = time.perf_counter()
    yield
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    _seconds[item.nodeid] = round(time.perf_counter() - start, 3)
    for code, line in _now:
        _lines[code.co_filename.removeprefix(SOURCES)][line].add(item.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was seen; the fastest tests of each line first."""
    found = {
        file: {line: sorted(tests, key=_seconds.__getitem__)[:KEPT] for line, tests in lines.items()}
        for file, lines in _lines.items()
    }
    Path(os.environ["QUARK_COVERING"]).write_text(json.dumps({"lines": found, "seconds": _seconds}), encoding="utf-8")
