"""Outputs before and after: classes, boxes and pictures, read off the arrays of small models."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from quark.measure.answers import probabilities
from quark.onnx.examples import examples, is_picture


def model(graph: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{graph}')


def test_classes_are_ranked_with_probabilities_and_the_input_is_shown() -> None:
    graph = (
        "g (float[n, 3, 16, 16] x) => (float[n, 3] y) {{ m = ReduceMean<axes = [2, 3], keepdims = 0>(x) \n y = {}(m) }}"
    )
    image = np.zeros((1, 3, 16, 16), np.float32)
    image[0, 1], image[0, 2] = 3.0, 1.0
    (found,) = examples(model(graph.format("Identity")), [model(graph.format("Neg"))], [{"x": image}])
    assert found.kind == "classes" and found.picture is not None and found.picture.shape == (16, 16, 3)
    before, after = (answer.classes for answer in found.answers)
    assert [kind for kind, _ in before] == [1, 2, 0] and [kind for kind, _ in after] == [0, 2, 1]
    assert before[0][1] == pytest.approx(np.exp(3) / (np.exp(3) + np.e + 1)) and sum(
        p for _, p in before
    ) == pytest.approx(1)


def test_pictures_share_the_span_of_the_float_model() -> None:
    graph = "g (float[1, 1, 16, 16] x) => (float[1, 1, 16, 16] y) <float k = {{{}}}> {{ y = Mul(x, k) }}"
    image = np.linspace(0, 1, 256, dtype=np.float32).reshape(1, 1, 16, 16)
    (found,) = examples(model(graph.format(2)), [model(graph.format(1))], [{"x": image}])
    before, after = (answer.picture for answer in found.answers)
    assert found.kind == "picture" and before is not None and after is not None
    assert before.shape == (16, 16) and before.max() == 255 and after.max() == 127


@pytest.mark.parametrize("form", ["corners", "centre"])
def test_boxes_are_shares_of_the_picture(form: str) -> None:
    generator = np.random.default_rng(0)
    first = generator.uniform(0, 500, (64, 2))
    size = generator.uniform(20, 60, (64, 2))
    boxes = np.hstack([first, first + size] if form == "corners" else [first + size / 2, size])
    scores = generator.uniform(0, 0.1, (64, 3))
    scores[5, 2] = 0.9
    output = np.hstack([boxes, scores])[None].astype(np.float32)
    graph = "g (float[1, 3, 640, 640] x, float[1, 64, 7] b) => (float[1, 64, 7] y) { y = Identity(b) }"
    feed = {"x": np.zeros((1, 3, 640, 640), np.float32), "b": output}
    (shown,) = examples(model(graph), [model(graph)], [feed])
    (box,) = shown.answers[1].boxes
    assert shown.kind == "boxes" and box.kind == 2 and box.score == pytest.approx(0.9)
    assert np.allclose(box.corners, np.array([*first[5], *(first[5] + size[5])]) / 640, atol=1e-4)


def test_what_is_a_picture_and_what_a_distribution() -> None:
    assert is_picture(np.zeros((1, 3, 32, 32), np.float32)) and is_picture(np.zeros((1, 32, 32, 1), np.float32))
    assert not is_picture(np.zeros((1, 64, 32, 32), np.float32)) and not is_picture(np.zeros((1, 3, 4, 4), np.float32))
    assert np.allclose(probabilities(np.array([[0.2, 0.8]])), [0.2, 0.8])
