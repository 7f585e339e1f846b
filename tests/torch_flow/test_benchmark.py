"""The benchmark runs, on a random model; its figures are no test."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks import torch_forward

pytestmark = pytest.mark.slow


def test_report_of_a_toy_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    chosen = ["int8 dynamic", "mxfp4"]
    arguments = ["--toy", "--schemes", *chosen, "--repeats", "2", "--windows", "2", "--json", str(file)]
    assert torch_forward.main(arguments) == 0
    report = json.loads(file.read_text())
    assert [line["scheme"] for line in report["lines"]] == chosen
    assert report["import_s"] > 0
    int8, mxfp4 = report["lines"]
    assert 0 < int8["relative_error"] < mxfp4["relative_error"] < 1
    assert all(line["float_ms"] > 0 and line["quantized_ms"] > 0 for line in report["lines"])
    assert math.isclose(int8["perplexity"], report["perplexity"], rel_tol=0.1)
    assert "| int8 dynamic |" in capsys.readouterr().out


def test_every_scheme_is_a_configuration() -> None:
    for weight, activation in torch_forward.SCHEMES.values():
        assert weight.to_quantization_spec()
        assert activation is None or activation.to_quantization_spec()
