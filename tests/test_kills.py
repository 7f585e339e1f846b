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
FAST = {"gptq": 2, "search": 1, "quantize-files": 1, "quantize": 1, "export": 1}


def killed(folder: Path, seed: int, counts: dict[str, int]) -> dict[str, str]:
    """What was wrong, by job; one process for all jobs, whose imports cost more than most jobs."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    words = [f"{name}={count}" for name, count in counts.items()]
    command = [sys.executable, "-W", "ignore", "-m", "tests.killing", str(folder), str(seed), *words]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.strip().split("\n")[-1])
    assert {name: each["kills"] for name, each in found.items()} == counts
    return {name: f"{each['wrong']}: {done.stderr[-2000:]}" for name, each in found.items() if each["wrong"]}


def test_killed_jobs_go_on_to_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert killed(tmp_path, 1, FAST) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_jobs_killed_many_times(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert killed(tmp_path, int(os.environ.get("SEED", "0")), {name: 15}) == {}
