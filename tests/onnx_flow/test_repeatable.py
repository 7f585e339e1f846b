"""Two runs of the same job give identical files: every preset, other hash seeds, other workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quark.config.presets import PRESETS

DRIVER = """
import hashlib, json, sys, tempfile
from dataclasses import replace
from pathlib import Path
from tests.onnx_flow import models
from quark.onnx import Config, ModelQuantizer, get_default_config

workers, names, proto, digests = int(sys.argv[1]), sys.argv[2].split(), models.cnn(), {}
samples = [models.feeds(proto, k) for k in range(5)]
for name in names:
    config = get_default_config(name)
    config.extra_options |= {"PrintSummary": False, "CalibWorkerNum": workers}
    short = {"num_iterations": 3, "data_size": 4}
    config.algorithms = [
        replace(one, **{key: value for key, value in short.items() if hasattr(one, key)}) for one in config.algorithms
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "q.onnx"
        ModelQuantizer(Config(config)).quantize_model(proto, path, samples)
        digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
print(json.dumps(digests))
"""


def digests(seed: int, workers: int, names: list[str]) -> dict[str, str]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    environment["PYTHONHASHSEED"] = str(seed)
    command = [sys.executable, "-c", DRIVER, str(workers), " ".join(names)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().split("\n")[-1])


PLAIN = [name for name, preset in PRESETS.items() if not preset.tuning]
SAMPLE = PLAIN[::6]
REST = [name for name in PRESETS if name not in SAMPLE]


@pytest.mark.parametrize("names", [SAMPLE, pytest.param(REST, marks=pytest.mark.slow)], ids=["sample", "rest"])
def test_two_runs_give_identical_files(names: list[str]) -> None:
    one, other = digests(1, 1, names), digests(2, 3, names)
    assert [name for name in names if one[name] != other[name]] == []
    assert len(set(one.values())) > len(one) // 2  # and not one file for all
