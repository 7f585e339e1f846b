"""Write the table of docs/export.md from the tests that load exports with other programs.

python docs/compatibility.py            # runs the tests, then writes the table
python docs/compatibility.py FILE       # writes it from the record of a run
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "export.md"
BEGIN, END = "<!-- compatibility -->\n", "<!-- end of compatibility -->"
VARIABLE = "QUARK_COMPATIBILITY_RECORD"


def record() -> Path:
    """Run the tests, which write down what they loaded."""
    path = Path(tempfile.mkdtemp()) / "record.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", str(ROOT / "tests" / "torch_flow" / "export")]
    subprocess.run(command, env={**os.environ, VARIABLE: str(path)}, cwd=ROOT, check=True)
    return path


def table(path: Path) -> str:
    """Format, scheme, programs with versions; schemes of one format and program in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        programs = ", ".join(f"{name} {version}" for name, version in row["programs"].items())
        schemes = rows.setdefault((row["format"], programs), [])
        if row["scheme"] not in schemes:
            schemes.append(row["scheme"])
    lines = ["| format | program that loaded it | schemes |", "|---|---|---|"]
    lines += [f"| {format} | {programs} | {'; '.join(rows[format, programs])} |" for format, programs in sorted(rows)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Put the table in its place."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else record()
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    PAGE.write_text(head + BEGIN + table(path) + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
