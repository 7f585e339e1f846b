"""What is read off an output, and how much of it another model keeps: on outputs whose answers are known by hand."""

from __future__ import annotations

import numpy as np
import pytest

from quark.measure.answers import Answers, kind_of


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    powers = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis, keepdims=True))


def one_hot_logits(winners: np.ndarray, classes: int, height: float = 8.0) -> np.ndarray:
    return np.asarray(height * np.eye(classes)[winners] + rng().normal(0, 0.1, (len(winners), classes)))


def detections(confident: list[int], rows: int = 200, objectness: bool = True, transposed: bool = False) -> np.ndarray:
    """[1, rows, 4 + scores]: boxes in pixels; class probabilities are high everywhere where there is an objectness."""
    boxes = rng().uniform(5, 300, (rows, 4))
    classes = rng().uniform(0.0, 0.2, (rows, 10))
    classes[np.arange(rows) % 7 == 0, 3] = 0.9 if objectness else 0.05
    classes[confident, 3] = 0.9
    columns = [boxes, classes]
    if objectness:
        seen = np.full((rows, 1), 0.01)
        seen[confident] = 0.95
        columns.insert(1, seen)
    found = np.concatenate(columns, 1)[None].astype(np.float32)
    return np.swapaxes(found, 1, 2) if transposed else found


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (one_hot_logits(np.arange(12) % 5, 5), "classes"),
        (softmax(one_hot_logits(np.arange(12) % 5, 5)), "classes"),
        (softmax(rng().normal(0, 5, (1, 4, 8, 8)), 1), "classes"),
        (rng().normal(size=(1, 20, 1000)), "classes"),
        (rng().normal(size=(1, 20, 64)), "values"),
        (detections([3, 9]), "scores"),
        (detections([3, 9], objectness=False, transposed=True), "scores"),
        (np.concatenate([softmax(np.tile([9.0, 0.0], (500, 1)))])[None], "scores"),
        (rng().integers(0, 5, (3, 7)), "labels"),
        (rng().normal(size=(1, 3, 32, 32)), "values"),
        (rng().normal(size=7), "values"),
        (np.full((2, 3), np.nan), "values"),
    ],
)
def test_what_an_output_looks_like(output: np.ndarray, kind: str) -> None:
    assert kind_of(output) == kind


def test_classes_are_kept_where_the_winner_is() -> None:
    x = one_hot_logits(np.arange(20) % 5, 5)
    y = x.copy()
    y[:3] = np.roll(y[:3], 1, axis=1)
    found = Answers()
    found.update(x, y + 0.3)
    assert found.share == pytest.approx(17 / 20)


def test_noise_on_scores_that_nobody_reads_costs_nothing_and_one_lost_box_is_seen() -> None:
    """The background holds nearly all of the energy, the boxes nearly all of the use."""
    confident = list(range(5, 200, 7))
    x = detections(confident)
    noisy, lost = x.copy(), x.copy()
    noisy[..., :4] += rng().normal(0, 50, noisy[..., :4].shape)
    noisy[..., 5:] = np.where(noisy[..., 5:] < 0.3, 0, noisy[..., 5:])
    lost[0, confident[0], 4] = 0.0
    kept, missed = Answers(), Answers()
    kept.update(x, noisy)
    missed.update(x, lost)
    n = len(confident)
    assert kept.share == 1.0
    assert missed.share == pytest.approx((2 * n - 2) / (2 * n - 1))


@pytest.mark.parametrize("objectness", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_detector_that_sees_everything_or_nothing_keeps_little(objectness: bool, transposed: bool) -> None:
    x = detections(list(range(5, 200, 7)), objectness=objectness, transposed=transposed)
    for factor in (0.0, 50.0):
        found = Answers()
        found.update(x, np.clip(x * factor, 0, 1).astype(np.float32))
        assert found.share is not None and found.share < 0.4


def test_another_number_of_detections_is_no_error() -> None:
    found = Answers()
    found.update(np.zeros((12, 7), np.float32), np.zeros((9, 7), np.float32))
    assert found.unlike == 1 and found.share == pytest.approx(9 / 12)


def test_too_few_answers_say_nothing_and_the_error_shrinks_with_samples() -> None:
    x = one_hot_logits(np.arange(4) % 2, 2)
    few = Answers()
    few.update(x, x)
    assert few.share is None and np.isnan(few.error)
    errors = []
    for samples in (8, 128):
        found, draw = Answers(), rng()
        for _ in range(samples):
            x = one_hot_logits(draw.integers(0, 5, 6), 5)
            y = np.where(draw.random((6, 1)) < 0.2, np.roll(x, 1, axis=1), x)
            found.update(x, y)
        assert found.share == pytest.approx(0.8, abs=4 * found.error)
        errors.append(found.error)
    assert errors[1] == pytest.approx(errors[0] / 4, rel=0.6)
