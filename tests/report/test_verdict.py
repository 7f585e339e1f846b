"""The verdict: levels at their limits, the worst output decides, and what is bad comes with something to do."""

from __future__ import annotations

import numpy as np
import pytest

from quark.measure.answers import FEW, Answers
from quark.measure.distance import Distance
from quark.report.tables import brief
from quark.report.verdict import (
    LEVELS,
    Verdict,
    accuracy_line,
    coverage_line,
    judge,
    size_line,
    speed_line,
    worst,
)


def distance(decibels: float) -> Distance:
    return Distance(signal=1.0, noise=10 ** (-decibels / 10), product=1.0, other=1.0, peak=1.0, count=10)


def answers(kind: str, share: float, total: int = 100) -> Answers:
    return Answers(kind, [share * total] * 2, [float(total)] * 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(("decibels", "level"), [(25, "good"), (15, "doubtful"), (5, "lost"), (float("nan"), "lost")])
def test_without_answers_the_decibels_decide(decibels: float, level: str) -> None:
    assert LEVELS[judge("y", distance(decibels), None).level] == level
    too_few = Answers("classes", [1.0], [1.0])
    assert LEVELS[judge("y", distance(decibels), too_few).level] == level


@pytest.mark.parametrize(("second", "told"), [(1.0, ""), (3.0, " ± 3.5")])
def test_how_far_the_decibels_are_chance_is_told(second: float, told: str) -> None:
    """Two samples of one signal each, whose noise is alike or not."""
    found = Distance()
    for noise in (1.0, second):
        found.update(np.array([10.0, 0.0]), np.array([10.0, noise]))
    assert judge("y", found, None).reason == f"SQNR of y {found.sqnr:.1f} dB{told}"


def test_an_output_whose_answers_are_too_few_says_so() -> None:
    """Every kind that has answers; what has none, or enough of them, does not."""
    told = {
        (kind, total): "too few answers" in judge("y", distance(25), answers(kind, 1.0, total)).reason
        for kind in ("classes", "scores", "boxes", "labels", "values")
        for total in (0, FEW // 2 - 1, FEW)  # of each of two samples
    }
    assert told == {(kind, total): kind != "values" and 2 * total < FEW for kind, total in told}


@pytest.mark.parametrize("kind", [None, "scores", "classes", "labels"])
@pytest.mark.parametrize("noise", [np.inf, np.nan])
def test_what_is_not_finite_is_lost_whatever_answers_are_kept(noise: float, kind: str | None) -> None:
    broken = Distance(signal=1.0, noise=noise, product=1.0, other=1.0, peak=1.0, count=10)
    kept = None if kind is None else answers(kind, 1.0)
    for order in (("broken", "good"), ("good", "broken")):
        found = worst(
            {name: broken if name == "broken" else distance(3) for name in order}, {"broken": kept} if kept else {}
        )
        assert found is not None and (found.name, LEVELS[found.level]) == ("broken", "lost")
        line = accuracy_line(found, "1 sample")
        assert (line.word, line.figure, line.bad) == ("lost", "-inf dB", True) and "NaN, or infinite" in line.reason


@pytest.mark.parametrize(
    ("kind", "decibels", "share", "level"),
    [
        ("scores", 5, 1.0, "good"),  # the noise is where nobody looks
        ("scores", 45, 0.5, "lost"),  # the background has the energy, the boxes are gone
        ("labels", 45, 0.9, "doubtful"),
        ("classes", 15, 0.99, "good"),
        ("classes", 5, 0.99, "doubtful"),  # winners among features mean little: one step at most
        ("classes", 25, 0.5, "doubtful"),
        ("classes", 15, 0.5, "lost"),
    ],
)
def test_answers_decide_where_they_are_what_is_used(kind: str, decibels: float, share: float, level: str) -> None:
    assert LEVELS[judge("y", distance(decibels), answers(kind, share)).level] == level


@pytest.mark.parametrize("decibels", [5, 12, 18, 25, 40])
def test_few_classes_that_win_leave_the_level_to_the_decibels(decibels: float) -> None:
    """All of a few are kept, or all but one: with as many more the level is another one, if the decibels' is."""

    def level(kept: int, total: int) -> str:
        halves = [[kept // 2, kept - kept // 2], [total // 2, total - total // 2]]
        return LEVELS[judge("y", distance(decibels), Answers("classes", *halves)).level]  # type: ignore[arg-type]

    alone = LEVELS[judge("y", distance(decibels), None).level]
    raised = {"lost": "doubtful", "doubtful": "good", "good": "good"}[alone]
    assert [level(16, 16), level(15, 16)] == [alone if decibels > 10 else "doubtful"] * 2
    assert [level(64, 64), level(640, 640)] == [raised] * 2
    assert level(1500, 1600) == {"lost": "doubtful", "doubtful": "doubtful", "good": "doubtful"}[alone]


@pytest.mark.parametrize("order", [("same", "other"), ("other", "same")])
def test_an_output_that_is_exact_does_not_decide(order: tuple[str, str]) -> None:
    """A mask that the model hands out as it came in says nothing, whatever the other output is judged by."""
    exact = Distance(signal=1.0, noise=0.0, product=1.0, other=1.0, peak=1.0, count=10)
    for decibels, read in ((25, None), (25, answers("classes", 1.0)), (15, answers("scores", 1.0))):
        outputs = {"same": exact, "other": distance(decibels)}
        kept = {"same": answers("labels", 1.0)} | ({"other": read} if read else {})
        found = worst({name: outputs[name] for name in order}, kept)
        assert found is not None and found.name == "other"
    found = worst({"same": exact}, {"same": answers("labels", 1.0)})
    assert found is not None and found.name == "same"


def test_an_output_that_is_zero_everywhere_says_nothing() -> None:
    """It was called good, at infinite decibels; where another output says something, that one decides."""
    silent = Distance(count=10)
    found = worst({"y": silent}, {})
    assert found is not None and LEVELS[found.level] == "doubtful" and "y is 0 in both models" in found.reason
    for order in (("y", "z"), ("z", "y")):
        found = worst({name: silent if name == "y" else distance(25) for name in order}, {})
        assert found is not None and (found.name, LEVELS[found.level]) == ("z", "good")
    assert LEVELS[judge("y", Distance(signal=0, noise=1, count=10), None).level] == "lost", "zeros became something"


def test_the_worst_output_decides_and_is_named() -> None:
    found = worst({"a": distance(40), "b": distance(12), "c": distance(18), "empty": Distance()}, {})
    assert found is not None and found.name == "b"
    line = accuracy_line(found, "on 4 samples")
    assert line.bad and "doubtful" in str(line) and "b" in str(line) and "on 4 samples" in str(line)
    assert worst({}, {}) is None and accuracy_line(None, "").bad


def test_another_number_of_detections_is_never_good() -> None:
    found = Answers()
    for rows in (20, 19):
        found.update(np.zeros((20, 7), np.float32), np.zeros((rows, 7), np.float32))
    judged = judge("boxes", Distance(), found)
    assert LEVELS[judged.level] == "doubtful" and "1 of 2 samples" in judged.reason


def test_speed_is_judged_where_it_is_meant() -> None:
    assert [speed_line(before, 1.0).word for before in (1.2, 1.02, 0.98, 0.8)] == ["faster", "same", "same", "slower"]
    assert speed_line(0.8, 1.0).bad and not speed_line(0.8, 1.0, "NPUs").bad
    assert "NPUs" in speed_line(0.8, 1.0, "NPUs").reason


def test_size_and_coverage() -> None:
    assert not size_line(4_000_000, 1_000_000).bad and "4.0 times" in size_line(4_000_000, 1_000_000).reason
    assert size_line(1000, 1300).bad and size_line(1000, 1300).word == "larger"
    same, worse = size_line(1000, 970), size_line(1000, 1001)
    assert (same.word, same.bad, worse.word, worse.bad) == ("same", False, "same", True)
    assert "within 3.1 %" in same.reason
    assert not coverage_line(0.97, 0.99).bad
    low = coverage_line(0.04, 0.99, ["conv1: it computes an index"])
    assert low.bad and "conv1: it computes an index" in low.reason
    for products, weights, told in ((0.94, 0.99, True), (0.99, 0.94, True), (None, 0.94, True), (0.95, 0.95, False)):
        line = coverage_line(products, weights, ["conv1: it computes an index"])
        assert not line.bad and ("in float: conv1" in str(line)) == told
    assert not coverage_line(None, 0.9).bad and coverage_line(None, 0.1).bad


def test_long_names_are_shown_without_their_middle() -> None:
    exported = ";".join(f"model/block_{index}/Conv2D" for index in range(9))
    shown = brief(exported)
    assert len(shown) == 48 and exported.startswith(shown.split("…")[0]) and exported.endswith(shown.split("…")[1])
    assert brief("/model.23/cv2/conv/Conv") == "/model.23/cv2/conv/Conv"


def test_words_and_facts_say_the_same() -> None:
    verdict = Verdict((size_line(2000, 1000), speed_line(1.0, 2.0)), ("quark onnx search m.onnx",))
    assert verdict.bad and verdict.words()[-1].split(maxsplit=1) == ["next", "quark onnx search m.onnx"]
    assert verdict.facts()["speed"]["word"] == "slower" and verdict.facts()["next"] == ["quark onnx search m.onnx"]
    assert [line.figure for line in verdict.lines] == ["2.0×", "0.50×"]
