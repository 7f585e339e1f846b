"""OpenVINO, which shares no code with ONNX Runtime, reads the static QDQ presets on real models and agrees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.onnx_flow import models

from quark.onnx import ModelQuantizer, QConfig

NAMES = ("squeezenet11_flowers5", "yolox_nano", "ultraface_rfb320", "fastestdet")
PRESETS = ("A8W8_CPU", "XINT8", "U8S8_AAWS", "U8U8_AAWA", "A8W8", "S8S8_AAWS")
#: OpenVINO 2026.4's low-precision transformations move a Q behind a Concat in front of it, and compute other numbers
#: than the graph says where the codes are signed (4 to 17 dB). With them off it agrees on every case, exactly where the
#: two differ first (SqueezeNet's first Concat: 395 dB instead of 7), so that the file is right and the pass is not.
#: Scales that are equal or not, Relu or none, a node between, and pairs in front of the Concat, behind it or on both
#: sides change nothing (two Conv, Concat, Conv by hand: 7 to 22 dB), so that no placement mends it; with Add in the
#: place of Concat it is right (135 dB). Of all six, everything agrees up to the first Concat of convolutions, itself
#: included (35 to 395 dB), and the first that differs is a Conv that reads it (SqueezeNet 6.7 dB, UltraFace 3.0,
#: FastestDet 2.9, under both presets; 32 to 395 with the transformations off). The same codes shifted to uint8 with the
#: zero point 128, which is what the target "cpu" makes of these presets, are computed right (138 dB).
SIGNED = {(name, preset) for name in NAMES for preset in ("A8W8", "S8S8_AAWS") if name != "yolox_nano"}
_SIGNED = pytest.mark.xfail(reason="OpenVINO moves quantizers over Concat and miscomputes signed codes", strict=True)
MODES = {"as written": {"LP_TRANSFORMS_MODE": "NO"}, "low precision": {}}
CASES = [
    pytest.param(name, preset, mode, marks=_SIGNED if (name, preset) in SIGNED and mode == "low precision" else ())
    for name in NAMES
    for preset in PRESETS
    for mode in MODES
] + [pytest.param(name, f"{preset} for cpu", "low precision") for name, preset in sorted(SIGNED)]


def loss(reference: list[np.ndarray], found: list[np.ndarray]) -> float:
    """dB of all outputs together."""
    noise = sum(float(((a - b) ** 2).sum()) for a, b in zip(reference, found, strict=True))
    return 10 * np.log10(sum(float((a**2).sum()) for a in reference) / max(noise, 1e-30))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "preset", "mode"), CASES)
def test_two_programs_read_the_same_numbers(name: str, preset: str, mode: str, tmp_path: Path) -> None:
    """Within 1 dB: the distance of each to the float model.

    The reference is ONNX Runtime with all optimizations off, which computes every Q and DQ by itself.
    """
    openvino = pytest.importorskip("openvino")
    path = models.REAL_MODELS / f"{name}.onnx"
    if not path.exists():
        pytest.skip("no shared models beside the repository")
    proto = onnx.load(path)
    feed = models.real_feeds(name, proto)
    config = QConfig.get_default_config(preset.removesuffix(" for cpu"))
    if preset.endswith(" for cpu"):
        config.global_quant_config.target = "cpu"
    config.global_quant_config.extra_options.update(PrintSummary=False)
    ModelQuantizer(config).quantize_model(proto, tmp_path / "q.onnx", [feed])
    reference = models.run(proto, feed)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(tmp_path / "q.onnx"), options)
    compiled = openvino.compile_model(
        str(tmp_path / "q.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32", **MODES[mode]}
    )
    answers = compiled(feed)
    theirs = [np.asarray(answers[output.name]) for output in session.get_outputs()]
    ours = loss(reference, session.run(None, feed))
    assert loss(reference, theirs) > ours - 1
