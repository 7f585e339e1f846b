"""Presets that read no samples run without; what would be measured on samples is never passed over in silence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import Result
from tests.onnx_flow.test_node_names import NAMES, encoder
from typer.testing import CliRunner

from quark.cli.app import app
from quark.cli.quantization import surely_calibrated
from quark.config.presets import PRESETS
from quark.demo.data import model_path
from quark.errors import DataError, NoSamplesError
from quark.onnx import Config, ModelQuantizer, get_default_config

WITHOUT = ("UINT8_DYNAMIC_QUANT", "MATMUL_NBITS", "FP16", "BF16", "BFP16", "MXFP8E4M3")
SMALL = ["--set", "MatMulNBitsParams={'GroupSize': 32}"]


def ran(folder: Path, *words: str) -> Result:
    onnx.save(encoder(NAMES["none"]), folder / "model.onnx")
    np.savez(folder / "data.npz", ids=np.random.default_rng(0).integers(0, 64, size=(8, 1, 9)).reshape(8, 9))
    return CliRunner().invoke(
        app, ["onnx", "quantize", str(folder / "model.onnx"), "-o", str(folder / "q.onnx"), *words]
    )


@pytest.mark.parametrize("words", [["--preset", name] for name in WITHOUT] + [["--set", "WeightsOnly=true"]], ids=str)
def test_no_samples_no_question(words: list[str], tmp_path: Path) -> None:
    made = ran(tmp_path, *words, *(SMALL if "MATMUL_NBITS" in words else []))
    assert made.exit_code == 0, made.output
    said = [line for line in made.output.splitlines() if line.startswith(("accuracy", "next"))]
    assert said[0].startswith("accuracy  not measured: no samples")
    assert any("quark onnx compare" in line and "--data SAMPLES" in line for line in said[1:])


READ = {
    "static": ["--preset", "A8W8"],
    "an algorithm": ["--preset", "UINT8_DYNAMIC_QUANT", "--algorithm", "smooth_quant"],
    "an algorithm of weights": ["--preset", "A8W8", "--set", "WeightsOnly=true", "--algorithm", "awq"],
    "training": ["--preset", "BF16", "--algorithm", "adaround"],
    "rounding": ["--preset", "MATMUL_NBITS", "--set", "MatMulNBitsParams={'Algorithm': 'GPTQ', 'GroupSize': 32}"],
}


@pytest.mark.parametrize("words", READ.values(), ids=READ)
def test_what_reads_samples_asks_for_them(words: list[str], tmp_path: Path) -> None:
    made = ran(tmp_path, *words)
    assert isinstance(made.exception, DataError) and "give the samples with --data PATH" in str(made.exception)
    assert not (tmp_path / "q.onnx").exists()


ALONE, UNCHECKED = ["--set", "WeightsOnly=true"], ["--preset", "A8W8", "--no-check", "--data", "data.npz"]


@pytest.mark.parametrize(
    ("how", "demand"),
    [
        (ALONE, ["--fail-under", "sqnr=1"]),
        (ALONE, ["--fail-slower"]),
        (ALONE, ["--report", "page.html"]),
        (UNCHECKED, ["--fail-under", "sqnr=1"]),
        (UNCHECKED, ["--fail-slower"]),
    ],
    ids=str,
)
def test_a_demand_that_nothing_is_held_against_is_refused(
    how: list[str], demand: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = ran(tmp_path, *how, *demand)
    assert isinstance(made.exception, DataError)
    assert demand[0] in str(made.exception) and "--data" in str(made.exception)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["data.npz", "model.onnx"]


def test_other_samples_measure_what_none_calibrated(tmp_path: Path) -> None:
    judged = ["--eval-data", str(tmp_path / "data.npz"), "--fail-under", "sqnr=1"]
    made = ran(tmp_path, "--preset", "UINT8_DYNAMIC_QUANT", *judged)
    assert made.exit_code == 0 and "on 8 samples of --eval-data" in made.output


def config_of(name: str) -> Config:
    config = get_default_config(name)
    config.extra_options |= {"PrintSummary": False, "UseRandomData": False}  # VINT8 sets it: the command asks first
    return Config(global_quant_config=config)


@pytest.mark.parametrize("name", [name for name in PRESETS if surely_calibrated(config_of(name).compile())])
def test_what_is_refused_at_once_would_be_refused_later(name: str) -> None:
    """The engine decides what is needed, with the model (here of convolutions); the command is only quicker."""
    with pytest.raises(NoSamplesError):
        ModelQuantizer(config_of(name)).quantize_model(model_path(), None)
