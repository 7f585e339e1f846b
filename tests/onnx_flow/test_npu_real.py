"""Positions of the NPU flow on real models against the peer's, tensor by tensor.

The exceptions are listed one by one. UltraFace's folded weights have other names here (those of the convolutions) than
in the peer's file (those of the outputs); they are compared through the activations that they make.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from benchmarks.models import load_examples
from tests.onnx_flow.codes import judged
from tests.onnx_flow.models import session

import quark.onnx as q

#: model -> (file, name of its entry in the reference, tensors that both name at least)
MODELS = {
    "squeezenet": ("squeezenet11_flowers5.onnx", "squeezenet11_flowers5", 91),
    "ultraface": ("ultraface_rfb320.onnx", "ultraface_rfb320_opset13", 128),
    "yolox": ("yolox_nano.onnx", "yolox_nano", 588),
}
#: Constants that both files hold with the same values: equalization is off, and no norm is folded in.
NAMED = {("squeezenet", "XINT8_QCONFIG"): 52, ("yolox", "XINT8_QCONFIG"): 200}
#: (model, preset) -> tensor -> (our position, the peer's), and why ours is right.
EXCEPTIONS = {
    # Σ (x - Q(x))² over the 16 samples: 783,095 at position 0, 801,897 at 1; the peer's bins are too coarse to tell.
    ("yolox", "XINT8"): {"1177": (0, 1)},
}
CASES = [
    pytest.param(model, preset, marks=[pytest.mark.slow] if model == "yolox" else [])
    for model in MODELS
    for preset in ("XINT8", "XINT8_QCONFIG")
]


def feeds(model: str, data: Path) -> Iterator[dict[str, np.ndarray]]:
    """The samples that the reference was calibrated on."""
    examples = load_examples(data)
    if model == "squeezenet":
        for number, (image, _) in enumerate(examples.flower_images("calib")):
            if number % 8 == 0:
                yield {"data": examples.caffe_input(image)}
        return
    prepare = examples.yolox_input if model == "yolox" else examples.ultraface_input
    for image, _, _ in examples.coco_images()[:16]:
        yield {"images" if model == "yolox" else "input": prepare(image)}


def config(preset: str) -> Any:
    options = {"ForceQuantizeNoInputCheck": True, "PrintSummary": False}
    if preset == "XINT8":
        legacy = q.get_default_config("XINT8")
        legacy.extra_options |= options
        return q.Config(legacy)
    return q.QConfig(q.QLayerConfig(input_tensors=q.XInt8Spec(), weight=q.XInt8Spec()), extra_options=options)


@pytest.mark.parametrize(("model", "preset"), CASES)
def test_positions_of_real_models_are_the_peers(model: str, preset: str, shared: Path) -> None:
    file, entry, least = MODELS[model]
    stored = json.loads((shared / "golden" / "npu-real.json").read_text())["models"][entry]["runs"][preset]["tensors"]
    source = shared / "data" / "models" / file
    result = q.ModelQuantizer(config(preset)).run(source, None, list(feeds(model, shared / "data")))
    plan = result.plan
    onnx.checker.check_model(result.proto, full_check=True)  # sorted too
    session(result.proto)
    if (model, preset) in NAMED:
        codes = judged(result.proto, source)
        assert len(codes) >= NAMED[model, preset] and all(codes.values())
    ours = {tensor.name: int(-np.log2(float(np.asarray(tensor.scale)))) for tensor in plan}
    both = ours.keys() & stored.keys()
    assert len(both) >= least
    different = {name: (ours[name], stored[name]["pos"]) for name in both if ours[name] != stored[name]["pos"]}
    assert different == EXCEPTIONS.get((model, preset), {})
