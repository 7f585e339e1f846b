"""OpenVINO, which shares no code with ONNX Runtime, reads the static QDQ presets on real models and agrees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.onnx_flow import models

from quark.onnx import ModelQuantizer, QConfig

NAMES = ("squeezenet11_flowers5", "yolox_nano", "ultraface_rfb320", "fastestdet")
PRESETS = ("A8W8_CPU", "XINT8", "U8S8_AAWS", "U8U8_AAWA", "A8W8", "S8S8_AAWS")
#: OpenVINO 2026.4's low-precision transformations carry a Q behind a Concat back in front of it, and compute other
#: numbers than the graph says where codes are int8 (4 to 17 dB; SMALLEST, of five nodes). With them off it agrees on
#: every case, so that the file is right and the pass is not. Around the zero point 0 a second pair behind the first
#: stops it (``quark.ir.runtime_faults``). With another zero point that pair ends OpenVINO's process, and nothing else
#: that keeps the codes helps: scales that are equal or not, a pair in front, behind or on both sides, Relu, Clip,
#: Identity, Reshape, Transpose or Max between, three pairs, parameters of their own, as Constant nodes or per axis,
#: codes of 16 bits. A MaxPool of one entry or a LeakyRelu that changes nothing between Concat and Q would, and would
#: tear apart what compilers for devices look for. The same codes shifted to uint8, which is what the target "cpu"
#: makes of these presets, are computed right (138 dB).
SIGNED = {(name, "S8S8_AAWS") for name in NAMES if name != "yolox_nano"}
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


SMALLEST = """<ir_version: 8, opset_import: ["" : 13]> g (float[1,2,4,4] x) => (float[1,2,4,4] y)
    <float s = {0.1}, int8 z = {ZERO}, int8[2,4,1,1] codes = {1, 2, 3, -4, -5, 6, 7, 8}, int8 none = {0}> {
    a = QuantizeLinear(x, s, z) b = DequantizeLinear(a, s, z)
    c = Concat<axis = 1>(b, b)
    d = QuantizeLinear(c, s, z) e = DequantizeLinear(d, s, z) PAIR
    w = DequantizeLinear(codes, s, none) y = Conv(READ, w) }"""
READ = """import sys, numpy, openvino
model = openvino.compile_model(sys.argv[1], "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
numpy.save(sys.argv[2], numpy.asarray(model(numpy.load(sys.argv[3]))[0]))"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "pairs", "right"), [(0, 1, False), (3, 1, False), (0, 2, True), (3, 2, None)], ids=str
)
def test_the_smallest_graph_that_openvino_miscomputes(
    zero: int, pairs: int, right: bool | None, tmp_path: Path
) -> None:
    """No file of ours, so that whoever reads this can tell whose fault it is; None: the process ends."""
    pytest.importorskip("openvino")
    second = "f = QuantizeLinear(e, s, z) g = DequantizeLinear(f, s, z)" if pairs == 2 else ""
    text = SMALLEST.replace("ZERO", str(zero)).replace("PAIR", second).replace("READ", "g" if second else "e")
    proto = onnx.parser.parse_model(text)
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, tmp_path / "m.onnx")
    feed = {"x": models.normal(1, 2, 4, 4, seed=0) * 3}
    np.save(tmp_path / "x.npy", feed["x"])
    names = [str(tmp_path / name) for name in ("m.onnx", "y.npy", "x.npy")]
    ended = subprocess.run([sys.executable, "-c", READ, *names], capture_output=True).returncode
    assert bool(ended) is (right is None)
    if right is not None:
        assert bool(loss(models.run(proto, feed), [np.load(tmp_path / "y.npy")]) > 100) is right
