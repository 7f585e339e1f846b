"""What is read off an output, and how much of it another model keeps: on outputs whose answers are known by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quark.measure.answers import Answers, kind_of, update
from quark.measure.detections import layout_of, read
from quark.measure.distance import ChannelSums, Distance
from quark.report.verdict import judge


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    powers = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis, keepdims=True))


def one_hot_logits(winners: np.ndarray, classes: int, height: float = 8.0) -> np.ndarray:
    return np.asarray(height * np.eye(classes)[winners] + rng().normal(0, 0.1, (len(winners), classes)))


def detections(confident: list[int], rows: int = 200, objectness: bool = True, transposed: bool = False) -> np.ndarray:
    """[1, rows, 4 + scores]: boxes in pixels; class probabilities are high everywhere where there is an objectness."""
    boxes = np.concatenate([rng().uniform(5, 300, (rows, 2)), rng().uniform(5, 60, (rows, 2))], 1)
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
        (detections([3, 9]), "boxes"),
        (detections([3, 9], objectness=False, transposed=True), "boxes"),
        (rng().uniform(0, 0.2, (1, 200, 10)), "scores"),
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
    nowhere = np.setdiff1d(np.arange(x.shape[1]), confident)
    noisy[:, nowhere, :4] += rng().normal(0, 50, (len(nowhere), 4))
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


@pytest.mark.parametrize("count", [12, 40, 400])
def test_the_error_of_few_answers_that_are_all_kept_is_not_zero(count: int) -> None:
    """A share of 1 - 2 errors is still likely to show so many in a row; the next samples are what tells."""
    found = Answers("classes", [1.0] * count, [1.0] * count)
    assert found.share == 1 and 0.05 < (1 - 2 * found.error) ** count < 0.2
    assert found.error == found.chance


def corners(boxes: np.ndarray) -> np.ndarray:
    return np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)


ROWS, SEEN = 320, np.arange(5, 320, 16)  # 20 detections in rows that keep their places


def found_boxes(form: str, unit: str, moved: float, of: int) -> tuple[np.ndarray, np.ndarray]:
    """Boxes [1, rows, 4] of two models; the second has the first ``of`` detections moved by a share of their width.

    Two boxes of width w that lie a w beside each other have (1 - a) / (1 + a) in common: 1/2 at a = 1/3.
    """
    x = np.concatenate([rng().uniform(40, 380, (ROWS, 2)), rng().uniform(20, 60, (ROWS, 2))], 1)
    y = x.copy()
    y[SEEN[:of], 0] += moved * y[SEEN[:of], 2]
    written = [(corners(one) if form == "corners" else one) / (420 if unit == "share" else 1) for one in (x, y)]
    return written[0][None].astype(np.float32), written[1][None].astype(np.float32)


def class_scores(columns: int = 3) -> np.ndarray:
    scores = rng().uniform(0, 0.1, (1, ROWS, columns))
    scores[0, SEEN, 1] = 0.9
    return scores.astype(np.float32)


@pytest.mark.parametrize("layout", ["one output", "two outputs", "boxes transposed", "softmax", "turned"])
@pytest.mark.parametrize("unit", ["pixels", "share"])
@pytest.mark.parametrize("form", ["corners", "centre"])
@pytest.mark.parametrize(("moved", "kept"), [(0.0, 1.0), (0.30, 1.0), (0.36, 0.6), (1.5, 0.6)])
def test_a_detection_is_kept_where_its_box_overlaps_by_half(
    form: str, unit: str, layout: str, moved: float, kept: float
) -> None:
    """8 of 20 boxes move, the scores stay: beyond a third of the width they are lost, 40 % of the answers."""
    x, y = found_boxes(form, unit, moved, 8)
    scores = class_scores()
    if layout == "softmax":
        scores = np.stack([1 - scores[..., 1], scores[..., 1]], -1)
    first, second = {"scores": scores, "boxes": x}, {"scores": scores, "boxes": y}
    if layout == "boxes transposed":
        first["boxes"], second["boxes"] = x.swapaxes(1, 2), y.swapaxes(1, 2)
    if layout in ("one output", "turned"):
        first, second = ({"boxes": np.concatenate([one, scores], 2)} for one in (x, y))
    if layout == "turned":
        first, second = ({"boxes": one["boxes"].swapaxes(1, 2)} for one in (first, second))
    answers = {name: Answers() for name in first}
    update(answers, first, second)
    assert answers["boxes"].kind == "boxes"
    assert answers["boxes"].share == pytest.approx(kept)
    assert "scores" not in answers or answers["scores"].share == 1.0


@pytest.mark.parametrize("moved", [0.0, 1.5])
def test_rows_by_falling_score_may_change_places(moved: float) -> None:
    x, y = (one[:, SEEN] for one in found_boxes("corners", "pixels", moved, 8))
    spare = found_boxes("corners", "pixels", 0, 0)[0][:, : 2 * len(SEEN)]
    scores = np.concatenate([np.linspace(0.9, 0.5, len(SEEN)), np.linspace(0.2, 0.01, 2 * len(SEEN))])[None, :, None]
    order = np.r_[np.arange(len(SEEN))[::-1], np.arange(len(SEEN), 3 * len(SEEN))]
    first = {"boxes": np.concatenate([x, spare], 1), "scores": np.tile(scores, (1, 1, 1))}
    second = {"boxes": np.concatenate([y, spare], 1)[:, order], "scores": scores}
    rare = rng().uniform(0, 0.01, (1, 3 * len(SEEN), 4))
    for one in (first, second):
        one["scores"] = np.concatenate([one["scores"], rare], 2)
    answers = {name: Answers() for name in first}
    update(answers, first, second)
    assert answers["boxes"].share == pytest.approx(0.6 if moved else 1.0)


def test_offsets_that_a_program_decodes_are_no_boxes() -> None:
    """Places in a cell and logarithms of sizes: hardly ever negative ones, and all at one place."""
    cells = np.concatenate([rng().uniform(-0.5, 1.5, (1, ROWS, 2)), rng().normal(1.6, 0.6, (1, ROWS, 2))], 2)
    for offsets in (cells, np.abs(cells)):
        first = {"boxes": offsets, "scores": class_scores()}
        answers = {name: Answers() for name in first}
        update(answers, first, first)
        assert answers["boxes"].kind == "values" and answers["scores"].kind == "scores"


def set_of_boxes(function: str, moved: float, columns: int = 8) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two models of the DETR family: 20 detections of 320 queries; the second has its rows in another order."""
    x, y = found_boxes("centre", "share", moved, 8)
    logits = rng().normal(-6, 0.5, (1, ROWS, columns))
    if function == "softmax":
        logits[..., -1] = 3
    logits[0, SEEN, 1] = 6
    order = rng().permutation(ROWS)
    features = rng().normal(0, 1, (1, ROWS, 64))
    first = {"features": features, "logits": logits, "boxes": x}
    second = {"features": features, "logits": logits[:, order], "boxes": y[:, order]}
    return first, second


KINDS_OF_A_SET = {"features": "values", "logits": "boxes", "boxes": "boxes"}


@pytest.mark.parametrize("function", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("moved", "kept"), [(0.0, 1.0), (0.30, 1.0), (0.36, 0.6)])
def test_logits_beside_boxes_count_as_a_set_of_detections(function: str, moved: float, kept: float) -> None:
    """Both outputs, though the decibels of rows in another order say that all is lost; features stay what they are."""
    first, second = set_of_boxes(function, moved)
    answers = {name: Answers() for name in first}
    update(answers, first, second)
    assert {name: one.kind for name, one in answers.items()} == KINDS_OF_A_SET
    assert answers["logits"].share == answers["boxes"].share == pytest.approx(kept)
    layout = layout_of(first)
    assert layout is not None and (layout.boxes, layout.scores) == ("boxes", "logits")
    assert set(read(first, layout).classes[read(first, layout).scores > 0.5]) == {1}


@pytest.mark.parametrize("function", ["sigmoid", "softmax"])
def test_a_set_whose_classes_change_or_whose_logits_break_is_lost(function: str) -> None:
    first, second = set_of_boxes(function, 0.0)
    other = {**second, "logits": np.roll(second["logits"][..., :-1], 1, axis=-1)}
    other["logits"] = np.concatenate([other["logits"], second["logits"][..., -1:]], -1)
    for wrong in (other, {**second, "logits": np.full_like(second["logits"], np.nan)}):
        answers = {name: Answers() for name in first}
        update(answers, first, wrong)
        assert answers["boxes"].share == 0.0


def test_features_beside_boxes_are_no_logits() -> None:
    boxes, _ = found_boxes("centre", "share", 0.0, 0)
    for features in (rng().normal(0, 1, (1, ROWS, 64)), rng().uniform(0, 4, (1, ROWS, 64))):
        first = {"features": features, "boxes": boxes}
        answers = {name: Answers() for name in first}
        update(answers, first, first)
        assert {one.kind for one in answers.values()} == {"values"}


def test_values_that_are_often_high_in_later_samples_were_no_scores() -> None:
    """The gains of a denoiser: seldom high in noise, often in speech. A detector's crowded picture among empty ones."""
    draw = np.random.default_rng(0)
    noise, speech = draw.uniform(0, 0.32, (1, 64, 33)), draw.uniform(0, 1, (1, 64, 33))
    empty, crowded = draw.uniform(0, 0.1, (1, 64, 33)), draw.uniform(0, 0.1, (1, 64, 33))
    empty[0, 0, :3] = crowded[0, :16] = 0.9
    for first, second, kind in ((noise, speech, "values"), (empty, crowded, "scores")):
        answers = {"y": Answers()}
        for x in (first, second):
            update(answers, {"y": x}, {"y": x * 0.9})
        assert answers["y"].kind == kind and (answers["y"].share is None) == (kind == "values")


def waves(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """[rows, columns] in 0..1, a quarter of it and less above a half: a field that changes slowly along both axes."""
    draw = np.random.default_rng(seed)
    t, f = np.linspace(0, 1, rows)[:, None], np.linspace(0, 1, columns)[None]
    waves = sum(np.sin(2 * np.pi * (a * t + b * f + c)) for a, b, c in draw.uniform(0.5, 3, (5, 3)))
    return np.asarray(1 / (1 + np.exp(3 - 1.5 * waves)), np.float32)


def text_map(size: int = 96) -> np.ndarray:
    """[size, size]: blocks of nearly 1 with soft edges on nearly 0."""
    y, x = np.mgrid[:size, :size]
    distance = np.minimum.reduce([np.hypot(x - a, y - b) for a, b in ((20, 30), (70, 25), (50, 80))]) - 8
    return np.asarray(1 / (1 + np.exp(4 * distance)), np.float32)


SIGNALS = {
    "gains [1, frames, bins]": waves(60, 161)[None],
    "gains [1, bins, frames]": waves(161, 60)[None],
    "gains [frames, bins]": waves(60, 161),
    "gains [1, 1, frames, bins]": waves(200, 81)[None, None],
    "gains, more frames than bins": waves(1000, 161)[None],
    "magnitudes beyond 1": 5 * waves(60, 161)[None],
    "powers, quiet above": waves(60, 161)[None] ** 2 * np.geomspace(50, 0.01, 161),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_over_two_axes_holds_no_detections(name: str) -> None:
    """Its share would count values above a threshold, where nobody reads any."""
    x = SIGNALS[name].astype(np.float32)
    assert kind_of(x) == "values"
    answers = {"y": Answers()}
    update(answers, {"y": np.zeros_like(x) + np.float32(0.01)}, {"y": np.zeros_like(x)})  # silence comes first
    update(answers, {"y": x}, {"y": x})
    assert answers["y"].kind == "values" and answers["y"].share is None


def a_grid_of_scores(side: int = 20, classes: int = 12) -> np.ndarray:
    """[1, cells, classes]: cells beside an object see it too; columns are classes."""
    y, x = np.mgrid[:side, :side]
    found = np.zeros((side * side, classes))
    for k, (a, b) in enumerate(rng().uniform(2, side - 2, (6, 2))):
        found[:, 2 * k] = 0.9 * np.exp(-((x - a) ** 2 + (y - b) ** 2) / 8).ravel()
    return found[None].astype(np.float32)


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (a_grid_of_scores(), "scores"),
        (a_grid_of_scores().swapaxes(1, 2), "scores"),
        (text_map()[None, None], "scores"),
        (detections([3, 9]), "boxes"),
        (detections([3, 9], transposed=True), "boxes"),
        (rng().uniform(0, 0.25, (1, 60, 161)), "scores"),
    ],
)
def test_detections_and_maps_of_what_is_there_are_no_signals(output: np.ndarray, kind: str) -> None:
    assert kind_of(output) == kind
    answers = {"y": Answers()}
    for _ in range(2):
        update(answers, {"y": output}, {"y": output})
    assert answers["y"].kind == kind


# ---- channels --------------------------------------------------------------------------------------------------------


def figures(*shape: int, axis: int) -> np.ndarray:
    """Pressure, temperature and humidity along an axis."""
    middle, wide = (np.array(one).reshape([-1] + [1] * (len(shape) - 1 - axis)) for one in ((1e5, 280, 0), (1e3, 9, 1)))
    return (middle + wide * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "axis"), [((40, 3), 1), ((1, 3, 20), 1), ((1, 20, 3), 2), ((1, 3, 8, 8), 1), ((4, 3, 2, 2), 1)]
)
def test_one_channel_of_an_output_that_has_lost_all_is_told(shape: tuple[int, ...], axis: int) -> None:
    """Humidity is a constant, at 90 dB over all; in every other channel, and in all, noise stays below."""
    x, found = figures(*shape, axis=axis), Answers()
    lost = x.copy()
    lost[(slice(None),) * axis + (2,)] = 0
    for value, channel in ((x, None), (x * 1.0001, None), (lost, 2)):
        found, distance = Answers(), Distance()
        for _ in range(2):
            found.update(x, value)
            distance.update(x, value)
        judged = judge("y", distance, found)
        assert found.kind == ("classes" if len(shape) == 2 else "values") and distance.sqnr > 60
        assert (judged.level, "its channel 2 is lost" in judged.reason) == (
            (2, False) if channel is None else (1, True)
        )
        if channel is not None:
            assert found.channels.lost is not None and found.channels.lost[1] == pytest.approx(0, abs=1)


def test_logits_that_hardly_move_are_no_figures() -> None:
    """One class is hardly told from its mean; which one wins is what counts."""
    x, found = one_hot_logits(np.arange(40) % 3, 4).astype(np.float32), Answers()
    found.update(x, x + np.array([0, 0, 0, 0.3], np.float32))
    assert found.kind == "classes" and found.channels.lost is not None and found.lost_channel is None


@pytest.mark.parametrize("last", [lambda x: 0 * x + 7, lambda x: 4 + 1e-3 * x], ids=["never", "hardly"])
def test_a_channel_that_does_not_move_and_few_values_say_nothing(last: Any) -> None:
    x = np.random.default_rng(1).standard_normal((40, 3)).astype(np.float32)
    x[:, 2] = last(x[:, 2])
    y = x.copy()
    y[:, 2] += 0.001
    found = ChannelSums()
    found.update(x, y)
    assert found.lost is None
    few, shapes = ChannelSums(), ChannelSums()
    few.update(figures(15, 3, axis=1), np.zeros((15, 3), np.float32))
    for count in (3, 4):
        assert (shapes.lost is None) == (not shapes.count)
        shapes.update(rng().normal(0, 1, (40, count)), np.zeros((40, count)))
    assert few.lost is None and shapes.lost is None, "too few, and another number of channels"


@pytest.mark.parametrize("last", [0, 1])
def test_channels_of_one_unit_are_no_figures(last: int) -> None:
    """A label that hardly ever applies loses nothing, as long as all are in 0..1."""
    x = rng().uniform(0, 1, (1, 20, 4, 4)).astype(np.float32)
    x[:, 7] *= 0.003
    found, lost = Answers(), x.copy()
    lost[:, 7] = 0
    for sample in (0, last):
        found.update(x * (1 + sample), lost * (1 + sample))
    assert found.kind == "values" and (found.lost_channel is not None) == bool(last)


@pytest.mark.parametrize(("shape", "told"), [((2, 1, 33), False), ((2, 1, 32), True), ((1, 40, 33), True)])
def test_many_channels_of_few_rows_are_a_state(shape: tuple[int, ...], told: bool) -> None:
    """Of the hidden units of an LSTM one may be lost without a word; an output of figures has few."""
    x, found = rng().normal(0, 9, (10, *shape)).astype(np.float32), ChannelSums()
    for one in x:
        found.update(one, one * (np.arange(shape[-1]) > 0))
    assert (found.lost is not None) == told


@pytest.mark.parametrize(
    ("mean", "decibels", "told"), [(0, 2, True), (0, 4, False), (300, 0, True), (1100, 0, False), (-1100, 0, False)]
)
def test_what_is_lost(mean: float, decibels: float, told: bool) -> None:
    """A channel whose error is as large as its movement, where that is a thousandth of its mean at least."""
    x, found = rng().normal(0, 1, (400, 2)), ChannelSums()
    error = x[:, 1] * 10 ** (-decibels / 20)
    x[:, 1] += mean
    found.update(x, x - np.stack([0 * error, error], 1))
    assert (found.lost is not None) == told


def test_one_channel_is_the_highest_everywhere_or_is_not() -> None:
    for count, alone in ((40, True), (39, False)):
        x, found = np.zeros((40, 2)), ChannelSums()
        x[:count, 1] = x[count:, 0] = 1
        found.update(x, x)
        assert found.alone == alone


def a_list(rows: list[int], shift: float = 0.0, filled: int = 0, **changed: np.ndarray) -> dict[str, np.ndarray]:
    """What a detector with suppression inside gives for the objects ``rows`` of 14: boxes, scores, labels."""
    corners = np.array([[30 * k, 10, 30 * k + 20, 40] for k in rows], np.float32).reshape(-1, 4) + np.float32(shift)
    scores, labels = np.linspace(0.9, 0.4, len(rows), dtype=np.float32), np.array(rows) % 3
    made = {"boxes": corners, "scores": scores, "labels": labels} | changed
    return {name: np.pad(one, [(0, filled), (0, 0)][: one.ndim])[None] for name, one in made.items()}


def in_one(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same as columns of one output."""
    columns = [outputs["scores"][..., None], outputs["labels"][..., None]]
    return {"found": np.concatenate([outputs["boxes"], *columns], -1).astype(np.float32)}


ALL = list(range(14))


@pytest.mark.parametrize(
    ("theirs", "kept", "word"),
    [
        (a_list(ALL), 1.0, "good"),
        (a_list([1, 0, *ALL[3:], 2], 2.0), 1.0, "good"),  # neighbours change places
        (a_list(ALL[:-1]), 26 / 27, "good"),  # a list that ends a box earlier
        (a_list(ALL, labels=np.array([1, *(np.array(ALL) % 3)[1:]])), 26 / 28, "doubtful"),  # another class
        (a_list([*ALL, 14, 15, 16, 17, 18]), 28 / 33, "doubtful"),
        (a_list([]), 0.0, "lost"),
        (a_list(ALL, 15.0), 0.0, "lost"),
        (a_list(ALL, filled=4), 1.0, "good"),
        (a_list(ALL, 11.0, filled=4), 0.0, "lost"),  # what fills it up says nothing about the form of the rest
        (a_list(ALL, scores=np.linspace(0.9, 0.1, 14, dtype=np.float32)), 22 / 24, "doubtful"),
    ],
)
def test_a_list_of_detections_is_judged_wherever_they_stand(
    theirs: dict[str, np.ndarray], kept: float, word: str
) -> None:
    ours = a_list(ALL, filled=2 if theirs["scores"].shape[1] == 18 else 0)
    for a, b, name in [*((ours, theirs, name) for name in ours), (in_one(ours), in_one(theirs), "found")]:
        found = {name: Answers() for name in a}
        update(found, a, b)
        one, distance = found[name], Distance()
        if a[name].shape == b[name].shape and b[name].dtype.kind == "f":
            distance.update(a[name], b[name])
        assert one.kind == "boxes" and one.share == pytest.approx(kept), name
        assert ("lost", "doubtful", "good")[judge(name, distance, one).level] == word


@pytest.mark.parametrize(
    "changed",
    [
        {"scores": np.linspace(0.4, 0.9, 14, dtype=np.float32)},  # rising
        {"scores": np.linspace(0.9, 0.4, 14, dtype=np.float32)[[0, 2, 1, *range(3, 14)]]},  # in no order
        {"scores": np.linspace(9, 4, 14, dtype=np.float32)},  # no shares
        {"boxes": np.linspace(1, -1, 56, dtype=np.float32).reshape(14, 4)},  # no boxes
        {"boxes": np.full((14, 4), np.nan, np.float32)},
    ],
)
def test_what_is_no_list_of_detections_is_read_row_by_row(changed: dict[str, np.ndarray]) -> None:
    outputs = a_list(ALL, **changed)
    found = {name: Answers() for name in outputs}
    update(found, outputs, outputs)
    assert found["labels"].kind == "labels" and not any(one.ranked for one in found.values())
    parts = in_one(a_list(ALL))["found"] + np.float32([0, 0, 0, 0, 0, 0.5])
    for one in (in_one(outputs), {"found": parts}):  # classes are whole numbers
        alone = {"found": Answers()}
        update(alone, one, one)
        assert not alone["found"].ranked
