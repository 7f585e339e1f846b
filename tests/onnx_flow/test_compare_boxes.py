"""Detectors whose boxes move while their scores stay: the verdict sees it, with scores in another output as well."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import onnx
import pytest
from benchmarks.models import load_examples
from tests.onnx_flow import models

from quark.onnx import ModelQuantizer
from quark.onnx.compare import ENDS, compare
from quark.onnx.quantization.config import get_default_config
from quark.onnx.quantization.config.config import Config
from quark.report.verdict import LEVELS, judge, worst

ROWS = 64
FEEDS = [{"x": np.random.default_rng(seed).uniform(0, 1, (1, ROWS, 4)).astype(np.float32)} for seed in range(3)]


def detector(moved: float) -> onnx.ModelProto:
    """Centres all over a picture of 400 pixels, sizes of 20 to 40; an eighth of the rows is confident.

    ``moved`` pixels to the right; boxes of width w that lie d apart have (w - d) / (w + d) in common.
    """
    scores = np.tile(np.eye(8, dtype=np.float32)[0][:, None], (ROWS // 8, 1))[None] * 0.9 + 0.02
    graph = f"""net (float[1, {ROWS}, 4] x) => (float[1, {ROWS}, 4] boxes, float[1, {ROWS}, 1] scores)
        {{ a = Mul (x, scale) boxes = Add (a, low) n = Mul (x, nothing) r = ReduceSum <keepdims = 1> (n, last)
           scores = Add (r, seen) }}"""
    weights = {
        "scale": np.array([400, 400, 20, 20], np.float32),
        "low": np.array([moved, 0, 20, 20], np.float32),
        "nothing": np.zeros(4, np.float32),
        "last": np.array([2], np.int64),
        "seen": scores,
    }
    return models.model(graph, weights, opset=17)


@pytest.mark.parametrize(("moved", "level"), [(0, "good"), (5, "good"), (15, "lost")])
def test_boxes_that_move_are_lost_though_their_scores_stay(moved: float, level: str) -> None:
    """By 5 pixels the narrowest keeps 15 / 25 in common; by 15 the widest keeps 25 / 55."""
    found = compare(detector(0), detector(moved), FEEDS, ENDS)
    assert LEVELS[judge("scores", found.outputs["scores"], found.answers["scores"]).level] == "good"
    decided = worst(found.outputs, found.answers)
    assert decided is not None and LEVELS[decided.level] == level
    assert moved == 0 or found.outputs["boxes"].sqnr > 20  # decibels would call it good
    assert level == "good" or (decided.name == "boxes" and "confident boxes" in decided.reason)


def test_a_face_detector_with_its_decoding_in_8_bits_is_lost(shared: Path, tmp_path: Path) -> None:
    """Its AP50 falls from 1 to 0.47 at more than 40 dB, and no score says so; with it in float all is good."""
    data = shared / "data"
    examples, path = load_examples(data), data / "models" / "ultraface_rfb320.onnx"
    feeds = [{"input": examples.ultraface_input(image)} for image, _, _ in examples.coco_images()]
    samples = list(islice(examples.calib_ultraface(), 4))
    levels = {}
    for decoding in (True, False):
        config = get_default_config("A8W8")
        config.extra_options |= {"PrintSummary": False, "FloatDecoding": decoding}
        quantized = tmp_path / f"{decoding}.onnx"
        ModelQuantizer(Config(global_quant_config=config)).run(path, quantized, samples)
        found = compare(path, quantized, feeds, ENDS)
        judged = [judge(name, one, found.answers[name]) for name, one in found.outputs.items()]
        levels[decoding] = {one.name: LEVELS[one.level] for one in judged}
    assert levels == {True: {"scores": "good", "boxes": "good"}, False: {"scores": "good", "boxes": "lost"}}
