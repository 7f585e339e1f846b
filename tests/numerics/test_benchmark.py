"""The benchmark of the arithmetic runs and says what it measured; its figures are no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import numerics

from quark.numerics.array import on_gpu
from quark.numerics.formats import FORMATS

ROOT = Path(__file__).parents[2]


def test_a_device_that_is_not_there_is_an_error():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(SystemExit, match="no CUDA device"):
        numerics.arrays(4096, "cuda")


def test_devices_are_chosen():
    assert all(not on_gpu(x) for x in numerics.arrays(4096, "cpu").values())
    assert numerics.limit(FORMATS["int8"]) == 4.0 and numerics.limit(FORMATS["int8"], on_gpu=True) == 3.0


@pytest.mark.slow
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
