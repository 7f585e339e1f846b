"""The benchmark of the arithmetic runs and says what it measured; its figures are no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_small_run(tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--size", "13", "--repeats", "1", "--no-weights", "--formats", "int8", "mxfp4", "--json", str(file)]
    command = [sys.executable, "-m", "benchmarks.numerics", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = json.loads(file.read_text())["lines"]
    assert {(line["library"], line["format"]) for line in lines} >= {("NumPy", "int8"), ("NumPy", "mxfp4")}
    assert all(line["milliseconds"] > 0 and line["ratio"] > 0 for line in lines)
    assert "| NumPy" in done.stdout
