"""Every long job, killed at random moments, also with the power: it goes on to the bytes of one that nobody stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.killing import JOBS

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists() or not hasattr(os, "fork"), reason="needs Linux")
FAST = {"gptq": 3, "search": 2, "quantize-files": 2, "quantize": 2, "export": 2}


def killed(name: str, folder: Path, seed: int, count: int) -> dict[str, object]:
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.killing", name, str(folder), str(seed), str(count)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.strip().split("\n")[-1])
    found["said"] = done.stderr[-2000:]
    return found


@pytest.mark.parametrize("name", FAST)
def test_a_killed_job_goes_on_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = killed(name, tmp_path, 1, FAST[name])
    assert found["wrong"] == [], found["said"]


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_jobs_killed_many_times(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = killed(name, tmp_path, int(os.environ.get("SEED", "0")), 15)
    assert found["wrong"] == [], found["said"]
