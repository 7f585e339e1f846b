"""A measurement as data: every benchmark takes ``--json FILE`` and leaves one record there.

A record says what was measured where: the benchmark, its command line, the date, the machine and how loaded it was,
the versions, the exit code, every table that was printed (``tables``: headers and rows, as printed), and the figures
with all their digits where the benchmark writes them itself. ``benchmarks.page`` makes ``RESULTS.md`` of such files.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from benchmarks import measure

HELP = "write the figures, the machine, the versions and the command to this file too"
RULE = re.compile(r"^\|(\s*:?-+:?\s*\|)+$")


class Tee(io.TextIOBase):
    """A stream that writes to another one and keeps what went through."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.kept = stream, io.StringIO()

    def write(self, text: str) -> int:
        """Pass text on, and keep it."""
        self.kept.write(text)
        return self.stream.write(text)

    def flush(self) -> None:
        """Flush the stream behind."""
        self.stream.flush()


def tables(text: str) -> list[dict[str, Any]]:
    """The Markdown tables of a text: ``{"headers": [...], "rows": [[...], ...]}`` each."""
    found: list[dict[str, Any]] = []
    lines = [line.strip() for line in text.splitlines()]
    inside = False
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if RULE.match(following) and line.startswith("|"):
            found.append({"headers": cells, "rows": []})
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not RULE.match(line):
            found[-1]["rows"].append(cells)
    return found


def load() -> float | None:
    """Processes that wanted a core during the last minute, on average; None where the system does not count them."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


def run(main: Callable[[], int | None], name: str) -> int:
    """Run a benchmark of this command line; with ``--json FILE`` leave its record there.

    Args:
        main: reads ``sys.argv``, prints tables in Markdown, may write figures of its own to FILE, returns an exit code.
        name: the file of the benchmark's module.
    """
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--json", type=Path)
    file = parser.parse_known_args()[0].json
    before, tee = load(), Tee(sys.stdout)
    start = time.perf_counter()
    with redirect_stdout(tee):
        code = main() or 0
    if file is None:
        return code
    own = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    stem = Path(name).stem
    given = [word if word != str(file) else file.name for word in sys.argv[1:]]
    facts = {
        "benchmark": stem,
        "command": shlex.join(["python", "-m", f"benchmarks.{stem}", *given]),
        "seconds": round(time.perf_counter() - start, 1),
        "load": {"before": before, "after": load()},
        "machine": measure.machine(),
        "exit": code,
        "tables": tables(tee.kept.getvalue()),
    }
    file.write_text(json.dumps({**own, **facts}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return code
