"""The demo: its data, its network, and one run from end to end."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from quark.demo import data
from quark.demo.__main__ import PRESETS, main, top1


def test_enlarging_keeps_constants_and_ramps() -> None:
    flat = data.preprocess(np.full((1, 8, 8), 8, np.uint8))
    np.testing.assert_allclose(flat, 0.5, rtol=1e-6)
    ramp = data.preprocess(np.tile(np.arange(8, dtype=np.uint8), (1, 8, 1)))[0, 0, 0]
    np.testing.assert_allclose(np.diff(ramp)[2:-2], 1 / 64, rtol=1e-4)  # one sixteenth over four pixels
    assert (ramp[0], ramp[-1]) == (0, 7 / 16)


def test_held_out_images_are_not_in_the_training_part() -> None:
    (train, _), (held_out, labels) = data.split()
    assert held_out.shape == (450, 1, 32, 32) and labels.shape == (450,)
    assert len(train) + len(held_out) == 1797
    known = {image.tobytes() for image in train}
    assert not any(image.tobytes() in known for image in held_out)


def test_network_is_valid_small_and_good() -> None:
    path = data.model_path()
    assert path.stat().st_size < 2_000_000
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    kinds = {node.op_type for node in model.graph.node}
    assert {"Conv", "BatchNormalization", "Relu", "Add", "Gemm"} <= kinds
    _, (inputs, labels) = data.split()
    assert top1(path, inputs, labels) > 0.98


def test_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for name, few in (("CALIBRATION", 32), ("FEW", 2), ("TRIED", 16), ("SECONDS", 1.0)):
        monkeypatch.setattr(f"quark.demo.__main__.{name}", few)
    (train, known), (held_out, labels) = data.split()
    monkeypatch.setattr(data, "split", lambda: ((train, known), (held_out[:150], labels[:150])))
    assert main(["--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for preset in PRESETS:
        row = next(line for line in printed.splitlines() if line.split()[:1] == [preset])
        accuracy, sqnr = (float(re.search(rf"([\d.]+) {unit}", row)[1]) for unit in ("%", "dB"))
        assert accuracy > 97 and sqnr > 15, row
        assert (tmp_path / f"digits_{preset}.onnx").stat().st_size < 0.35 * data.model_path().stat().st_size
    last = printed.splitlines()[-2:]
    assert float(re.search(r"top-1 ([\d.]+) %", last[0])[1]) > 97 and last[1].endswith("--for cpu")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Digits, quantized three ways" in page and '"clipped":' in page
