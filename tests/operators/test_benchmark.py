"""The benchmark of the operators runs on a toy network, and its quantized models compute what the formats say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed

from benchmarks import models, operators  # noqa: E402
from tests.operators.running import run  # noqa: E402


def test_the_report(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.operators",
        "--toy",
        "--repeats",
        "1",
        "--profile",
        "--json",
        str(file),
    ]
    done = subprocess.run(
        [*command, "--formats", "bfloat16", "mxfp4"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert file.exists(), done.stderr
    lines = {line["format"]: line for line in json.loads(file.read_text())["lines"]}
    assert set(lines) == {"float", "bfloat16", "mxfp4"}
    assert all(line["milliseconds"] > 0 for line in lines.values())
    spent = lines["mxfp4"]["kernels"]
    assert "If" not in spent and spent["Conv"] > 0  # what runs inside an If counts for itself


@pytest.mark.parametrize("name", operators.CASES)
def test_every_case_is_a_valid_model_close_to_float(name: str) -> None:
    network = models.resnet(models.TOY)
    feed = models.random_images(models.TOY.image, 1, seed=1)[0]
    network.graph.output[0].name, last = "y", network.graph.output[0].name
    network.graph.node[-1].output[:] = ["y" if output == last else output for output in network.graph.node[-1].output]
    want = run(network, feed)
    case = operators.CASES[name]
    model = operators.quantized(network, case)
    onnx.checker.check_model(model, full_check=True)
    quantized = [n for n in model.graph.node if n.op_type in (case.op_name, "Cast")]
    assert len(quantized) >= len(operators.activations(network))
    got = run(model, feed)
    noise = float(np.square(got - want).sum() / np.square(want).sum())
    assert 0 < noise < (1.0 if name in ("mx4", "mxfp4", "amdfp4") else 0.1)
