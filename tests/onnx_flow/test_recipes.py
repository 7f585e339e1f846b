"""Recipes: each row changes what it says, and the loop keeps only what is better."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.config.presets import PRESETS
from quark.errors import ConfigError
from quark.measure.answers import Answers
from quark.measure.distance import Distance
from quark.onnx import Config, climb
from quark.onnx.climb import GOOD, Attempt, Climb, _ordered, layers_apart
from quark.onnx.recipes import RECIPES, Choice, Recipe, Situation, _option, wider
from quark.onnx.trial_files import quantized
from quark.onnx.trials import PURPOSES
from quark.report.verdict import Judged, judge

EVERYTHING = Situation(
    frozenset(["Concat", "Conv", "MatMul", "Softmax"]),
    ("FloatDecoding would help", "ConvertSigmoidToHardSigmoid=False keeps it"),
    npu=True,
    slow=True,
    lost=True,
)


def judged(sqnr: float, level: int = 0) -> Judged:
    return Judged("y", level, f"SQNR of y {sqnr} dB", sqnr, sqnr)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_recipe_changes_a_configuration_that_works(recipe) -> None:  # type: ignore[no-untyped-def]
    presets = (Choice(preset) for preset in ("A8W8", "XINT8", "MATMUL_NBITS"))
    start = next(choice for choice in presets if recipe.applies(EVERYTHING, choice))
    assert recipe.cause
    changed = recipe.change(start)
    assert changed != start
    config = changed.config()
    assert config.compile() if hasattr(config, "compile") else config
    assert " ".join(changed.flags()) != " ".join(start.flags())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_no_recipe_breaks_a_configuration_that_has_it_already(recipe) -> None:  # type: ignore[no-untyped-def]
    """Whatever the preset brings or was typed under another name: each algorithm once, or compiling refuses."""
    for preset in PRESETS:
        once = recipe.change(Choice(preset)) if recipe.applies(EVERYTHING, Choice(preset)) else Choice(preset)
        for choice in (once, replace(once, algorithms=tuple(_OTHER.get(name, name) for name in once.algorithms))):
            again = recipe.change(choice) if recipe.applies(EVERYTHING, choice) else choice
            Config(global_quant_config=again.config()).compile()


@pytest.mark.parametrize(
    "preset", ["A8W8_CPU", "BF16", "UINT8_DYNAMIC_QUANT", "MATMUL_NBITS"]
)  # one of each mode and kind
def test_a_recipe_that_applies_to_what_auto_begins_with_makes_a_model(preset: str, tmp_path: Path) -> None:
    """What a mode refuses is not tried: it would take time, and tell the user of an error."""
    proto, npu = models.cnn(), preset in PURPOSES["npu"].bases
    samples = [models.feeds(proto, seed) for seed in range(2)]
    onnx.save(proto, tmp_path / "m.onnx")
    operators = frozenset(models.op_types(proto))
    assert operators & {"Conv"} and operators & {"Gemm", "MatMul"}
    for recipe in RECIPES:
        choice = Choice(preset)
        if recipe.applies(replace(EVERYTHING, operators=operators, npu=npu, slow=False), choice):
            quantized(tmp_path / "m.onnx", _briefly(recipe.change(choice)), tmp_path / "q.onnx", samples)


def _briefly(choice: Choice) -> Choice:
    trained = (
        f"{name.partition(':')[0]}:num_iterations=2" if name.startswith("ada") else name for name in choice.algorithms
    )
    return replace(choice, algorithms=tuple(trained))


_OTHER = {"smooth_quant": "smoothquant", "channel_equalization": "ce"}


def improve(*given: Any, seconds: float = 60, probe: Any = None, **more: Any) -> tuple[Attempt, int]:
    """The best attempt, and how many were made besides the first."""
    climb = Climb(*given, **more)
    return climb.within(seconds, probe), climb.tried


def test_only_what_is_better_is_kept_and_named() -> None:
    gains = {"FloatDecoding": 3.0, "channel_equalization": 5.0}
    tried: list[Choice] = []

    def measure(choice: Choice) -> Judged:
        tried.append(choice)
        return judged(1.0 + sum(gain for name, gain in gains.items() if name in " ".join(choice.flags())))

    best, count = improve(Attempt(Choice("A8W8"), judged(1.0)), EVERYTHING, measure)
    assert best.choice == Choice("A8W8", {"FloatDecoding": True}, ("channel_equalization",))
    fits = [recipe for recipe in RECIPES if recipe.applies(EVERYTHING, Choice("A8W8"))]
    assert count == len(tried) == len(fits) and len(best.causes) == 2


def test_the_last_step_alone_is_advised_where_it_is_enough() -> None:
    """What came before made the model better, and is not needed."""

    def measure(choice: Choice) -> Judged:
        words = " ".join(choice.flags())
        return judged(30.0, GOOD) if "channel_eq" in words else judged(4.0 if "FloatDecoding" in words else 1.0)

    best, _ = improve(Attempt(Choice("A8W8"), judged(1.0)), EVERYTHING, measure)
    assert best.choice == Choice("A8W8", {}, ("channel_equalization",)) and len(best.causes) == 1
    both = lambda one: judged(30.0, GOOD) if len(one.flags()) > 5 else judged(float(len(one.flags())))  # noqa: E731
    best, _ = improve(Attempt(Choice("A8W8"), judged(1.0)), EVERYTHING, both)
    assert len(best.causes) == 2


SHARE = "keeps 90 % of the classes"


@pytest.mark.parametrize(
    ("ours", "theirs", "better"),
    [
        (Judged("y", 1, "SQNR", 19.04, 19.04), Judged("y", 1, "SQNR", 19.0, 19.0), False),
        (Judged("y", 1, "SQNR", 19.2, 19.2), Judged("y", 1, "SQNR", 19.0, 19.0), True),
        (Judged("y", 2, "SQNR", 20.0, 20.0), Judged("y", 1, "SQNR", 19.98, 19.98), True),
        (Judged("y", 0, "SQNR", 30.0, 30.0), Judged("y", 1, "SQNR", 12.0, 12.0), False),
        (Judged("y", 1, SHARE, 0.91, 5.0), Judged("y", 1, SHARE, 0.90, 9.0), True),
        (Judged("y", 1, SHARE, 0.90, 9.0), Judged("y", 1, SHARE, 0.91, 5.0), False),
        (Judged("y", 1, SHARE, 0.90, 9.0), Judged("y", 1, SHARE, 0.901, 8.0), True),
        (Judged("y", 1, SHARE, 0.901, 8.05), Judged("y", 1, SHARE, 0.90, 8.0), False),
        (None, Judged("y", 0, "SQNR", -3.0, -3.0), False),
        (Judged("y", 0, "SQNR", -3.0, -3.0), None, True),
        (Judged("y", 0, "SQNR", -3.0, -3.0), Judged("y", 0, "NaN", -math.inf, -math.inf), True),
    ],
)
def test_what_is_no_better_by_a_tenth_of_a_decibel_is_not_advised(
    ours: Judged | None, theirs: Judged | None, better: bool
) -> None:
    assert Attempt(Choice("A8W8"), ours).beats(Attempt(Choice("A8W8"), theirs)) is better


@pytest.mark.parametrize(
    ("gains", "tried", "worth"), [((0.2, 0.2), 2, False), ((0.2, 0.9, 0.9), 3, True), ((0.9,), 1, True)]
)
def test_a_limit_of_decibels_that_chance_crosses_is_not_worth_a_command(
    gains: tuple[float, ...], tried: int, worth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """19.9 is doubtful and 20.1 is good; what is to be advised goes on, and a search by itself is content."""
    first = Attempt(Choice("A8W8"), judge("y", _of(19.9), None))
    found = [judge("y", _of(19.9 + gain), None) for gain in gains]
    monkeypatch.setattr(climb, "RECIPES", [replace(one, applies=lambda *_: True) for one in RECIPES[: min(tried, 2)]])
    for advised in (True, False):
        left = iter(found)
        one = Climb(first, Situation(frozenset()), lambda _, left=left: next(left), advised=advised)  # type: ignore[misc]
        best = one.within(1e9)
        assert one.tried == (tried if advised else 1) and (not advised or best.is_worth(first) is worth)


def _of(sqnr: float) -> Distance:
    return Distance(signal=10 ** (sqnr / 10), noise=1.0, count=1)


def _keeping(kept: np.ndarray, sqnr: float) -> Judged:
    """An output that keeps these answers, one number a sample of ten."""
    answers = Answers("classes", kept.tolist(), [10.0] * len(kept))
    return judge("y", Distance(signal=10 ** (sqnr / 10), noise=1.0, count=1), answers)


@pytest.mark.parametrize(
    ("steps", "decibels", "better"),
    [
        ([1, 0] * 10, 0.0, True),  # half of 20 samples keep one answer more
        ([1, 0] * 10, -3.0, True),
        ([3, -2, 2, -3, 3, -1, 0, 0] * 2, -1.5, False),  # more answers here, fewer there: 1.3 points of 10 ± 2
        ([3, -2, 2, -3, 3, -1, 0, 0] * 2, 1.5, True),
        ([-3, 2, -2, 3, -3, 1, 0, 0] * 2, 1.5, True),  # what is lost by chance does not outweigh decibels
        ([-1, 0] * 10, 1.5, False),
        ([0] * 19 + [4], -1.5, False),  # one sample alone
    ],
)
def test_answers_that_are_kept_by_chance_do_not_make_a_configuration_better(
    steps: list[int], decibels: float, better: bool
) -> None:
    theirs = np.full(len(steps), 6.0)
    ours, base = _keeping(theirs + steps, 12.0 + decibels), _keeping(theirs, 12.0)
    assert ours.level == base.level and ours.without
    assert Attempt(Choice("A8W8"), ours).beats(Attempt(Choice("A8W8"), base)) is better


def test_it_stops_when_the_model_is_good_and_when_the_time_is_over() -> None:
    good, count = improve(Attempt(Choice("A8W8"), judged(1.0)), EVERYTHING, lambda one: judged(30.0, GOOD))
    assert count == 1 and good.judged is not None and good.judged.level == GOOD

    def slow(choice: Choice) -> Judged:
        time.sleep(0.02)
        return judged(0.0)

    assert improve(Attempt(Choice("A8W8"), judged(1.0)), EVERYTHING, slow, seconds=0.03)[1] == 1
    assert improve(Attempt(Choice("A8W8"), judged(1.0)), EVERYTHING, slow, seconds=-1)[1] == 0


def test_a_recipe_that_took_long_before_is_not_begun_where_it_would_end_too_late() -> None:
    tried, pace = list[str](), {"AdaRound": 999.0}

    def measure(choice: Choice) -> Judged:
        tried.append(" ".join(choice.flags()))
        return judged(0.0)

    improve(Attempt(Choice("A8W8"), judged(1.0)), EVERYTHING, measure, pace=pace)
    assert not any("adaround" in name for name in tried) and any("adaquant" in name for name in tried)
    assert pace["AdaQuant"] < 60 and pace["AdaRound"] == 999.0


def test_few_samples_set_the_order_and_slow_recipes_come_behind_the_better_half() -> None:
    tried: list[str] = []

    def probe(choices: Sequence[Choice]) -> list[tuple[float, ...] | None]:
        names = [" ".join(one.flags()) for one in choices]
        return [None if "smooth" in name else (0.0, 0.0, 9.0 * ("search" in name)) for name in names]

    def measure(choice: Choice) -> Judged:
        tried.append(" ".join(choice.flags()))
        return judged(0.0)

    improve(Attempt(Choice("A8W8"), judged(1.0)), EVERYTHING, measure, probe=probe)
    place = {word: next(k for k, name in enumerate(tried) if word in name) for word in _PLACES}
    assert sorted(place, key=lambda word: place[word]) == _PLACES


_PLACES = ["FloatDecoding", "calibration_search", "adaround", "smooth_quant"]


def test_a_recipe_that_changes_nothing_on_few_samples_comes_last_behind_one_that_fails_there() -> None:
    tried: list[str] = []

    def probe(choices: Sequence[Choice]) -> list[tuple[float, ...] | None]:
        assert choices[0] == Choice("A8W8")  # what the others may be equal to
        found: dict[str, tuple[float, ...] | None] = {"channel_equalization": (), "smooth_quant": None}
        return [next((rank for word, rank in found.items() if word in one.name), (0.0, 0.0, 1.0)) for one in choices]

    def measure(choice: Choice) -> Judged:
        tried.append(" ".join(choice.flags()))
        return judged(0.0)

    plain = Situation(EVERYTHING.operators)  # nothing is proposed: the first choice stays the best
    improve(Attempt(Choice("A8W8"), judged(1.0)), plain, measure, probe=probe)
    assert "channel_equalization" in tried[-1] and any("smooth_quant" in name for name in tried[-6:-1])
    assert any("calibration_search" in name for name in tried[:-1])


def test_the_first_recipe_is_not_begun_where_one_like_the_first_attempt_would_end_too_late() -> None:
    first = Attempt(Choice("A8W8"), judged(1.0))
    assert improve(first, EVERYTHING, lambda one: judged(0.0), seconds=5.0, slowest=9.0)[1] == 0


@pytest.mark.parametrize("level", [0, 1])
def test_time_is_kept_for_more_bits_while_the_model_is_lost(level: int) -> None:
    """Five attempts of 11 seconds fit into 60: the last one is that of 16 bits, where nothing else has helped."""
    now, tried = [0.0], list[str]()

    def measure(choice: Choice) -> Judged:
        now[0] += 11.0
        tried.append(choice.preset)
        return judged(0.5, level)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quark.onnx.climb.time.perf_counter", lambda: now[0])
        improve(Attempt(Choice("A8W8"), judged(1.0, level)), EVERYTHING, measure, seconds=60)
    assert len(tried) == 5 and ("A16W8" in tried) is (level == 0)


def test_a_model_that_is_lost_under_powers_of_two_is_tried_with_float32_scales() -> None:
    """Only then: another format is another compiler's."""
    (row,) = (recipe for recipe in RECIPES if recipe.name == "float32 scales")
    presets = [name for name in PRESETS if name.startswith("XINT8")]
    assert presets and all(row.change(Choice(name)).preset in PRESETS for name in presets)
    for preset, lost in (("XINT8", True), ("XINT8", False), ("A8W8", True)):
        assert row.applies(replace(EVERYTHING, lost=lost), Choice(preset)) is (lost and preset == "XINT8")


@pytest.mark.parametrize(
    ("preset", "options", "applies"),
    [
        ("A8W8", {}, True),
        ("A16W8", {}, True),
        ("A8W8", {"AlignConcat": False}, False),
        ("A8W8", {"NPULimitationCheck": False}, False),
        ("A8W8_CPU", {}, False),
        ("XINT8", {}, False),
        ("UINT8_DYNAMIC_QUANT", {}, False),
    ],
)
def test_scales_of_a_concat_are_set_free_where_they_are_shared_by_choice(
    preset: str, options: dict[str, Any], applies: bool
) -> None:
    (row,) = (recipe for recipe in RECIPES if recipe.name == "own scales in Concat")
    assert row.applies(EVERYTHING, Choice(preset, options)) is applies
    assert not row.applies(replace(EVERYTHING, operators=frozenset(["Conv"])), Choice(preset, options))


def test_a_recipe_that_does_not_apply_is_not_tried() -> None:
    plain = Situation(frozenset(["Relu"]))
    names = [recipe.name for recipe in RECIPES if recipe.applies(plain, Choice("A8W8_CPU"))]
    assert names == ["calibration search"]


def test_rounding_is_tuned_where_there_are_integers() -> None:
    (adaround,) = (recipe for recipe in RECIPES if recipe.name == "AdaRound")
    assert [adaround.applies(EVERYTHING, Choice(name)) for name in ("A8W8", "BF16")] == [True, False]


def test_an_unknown_algorithm_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'adaround'"):
        Choice("A8W8", algorithms=("adaround2",)).config()


def test_islands_grow_from_the_layer_that_loses_most_and_their_name_says_so() -> None:
    best = Attempt(Choice("A8W8", {"CalibDataSize": 4}), None)
    found = list(layers_apart(best, [f"l{k}" for k in range(9)], "float"))
    assert [list(one.layers) for one in found] == [[f"l{k}" for k in range(n)] for n in (1, 2, 4)]
    assert found[1].name == "A8W8 --set CalibDataSize=4 with 2 layers float"
    assert found[1].config().layers == {"l0": None, "l1": None}
    most = [len(one.layers) for one in layers_apart(best, [f"l{k}" for k in range(8)], "float", most=1.0)]
    assert most == [1, 2, 4]  # eight of eight would be the float model
    assert len(list(layers_apart(best, ["a", "b", "c"], "float"))) == 2  # half of three, rounded up
    assert [len(one.layers) for one in layers_apart(best, [f"l{k}" for k in range(9)], "float", most=1.0)][-1] == 8
    assert wider("A8W8_PER_CHANNEL") == "A16W8_PER_CHANNEL" and wider("XINT8") is None


NO = "UINT8_DYNAMIC_QUANT"  # no ranges, no scales known beforehand
ONLY = {name: {"operators": frozenset([name])} for name in ("Conv", "ConvTranspose", "MatMul", "Relu")}
#: recipe -> presets and facts with which it applies, and those with which it does not; facts differ from EVERYTHING
WHEN: dict[str, tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, dict[str, Any]]]]] = {
    "own timings": ([("A8W8", {})], [("A8W8", {"slow": False}), (NO, {})]),
    "float decoding": ([("A8W8", {})], [("A8W8", {"proposals": EVERYTHING.proposals[1:]}), (NO, {})]),
    "sigmoid": ([("A8W8", {})], [("A8W8", {"proposals": EVERYTHING.proposals[:1]}), (NO, {})]),
    "float outputs": ([("A8W8", {})], [("A8W8", {"npu": False}), ("BF16", {}), (NO, {})]),
    "measured Softmax": ([("A8W8", {})], [("A8W8", ONLY["Conv"]), ("BF16", {}), (NO, {})]),
    "per channel": ([("A8W8", {}), ("XINT8", {"npu": False})], [("XINT8", {}), ("A8W8_PER_CHANNEL", {})]),
    "channel equalization": ([("A8W8", ONLY["ConvTranspose"]), ("A8W8", ONLY["Conv"])], [("A8W8", ONLY["MatMul"])]),
    "32-bit biases": ([("XINT8", ONLY["Conv"])], [("A8W8", {}), ("XINT8", ONLY["MatMul"])]),
    "cross-layer equalization": ([("A8W8", ONLY["Conv"])], [("A8W8", ONLY["ConvTranspose"])]),
    "SmoothQuant": ([("A8W8", ONLY["MatMul"])], [("A8W8", ONLY["Conv"])]),
    "calibration search": ([("A8W8", {})], [("BF16", {}), (NO, {})]),
    "bias correction": ([("A8W8", ONLY["MatMul"]), ("A8W8", ONLY["Conv"])], [("A8W8", ONLY["Relu"]), (NO, {})]),
    "bias correction with gain": ([("A8W8", ONLY["Conv"])], [("A8W8", ONLY["MatMul"]), (NO, {})]),
    "AWQ": ([("MATMUL_NBITS", {})], [("A8W8", {}), ("MATMUL_NBITS", ONLY["Conv"])]),
    "GPTQ": ([("A8W8", ONLY["MatMul"])], [("A8W8", ONLY["Conv"]), (NO, {})]),
    "AdaRound": ([("A8W8", ONLY["MatMul"]), ("A8W8", ONLY["Conv"])], [("A8W8", ONLY["Relu"]), ("BF16", {}), (NO, {})]),
    "AdaQuant": ([("BF16", ONLY["MatMul"]), ("A8W8", ONLY["Conv"])], [("A8W8", ONLY["Relu"]), (NO, {})]),
    "16-bit activations": (
        [("A8W8", {"lost": False}), ("A8W8_PER_CHANNEL", {}), ("XINT8", {})],
        [("XINT8", {"lost": False}), ("XINT8_ADAROUND", {}), ("A8W8", {"npu": False}), ("A8W8", {"apart": True})],
    ),
}


@pytest.mark.parametrize("name", WHEN)
def test_a_recipe_applies_under_every_one_of_its_conditions(name: str) -> None:
    (row,) = (recipe for recipe in RECIPES if recipe.name == name)
    for cases, applies in zip(WHEN[name], (True, False), strict=True):
        for preset, facts in cases:
            assert row.applies(replace(EVERYTHING, **facts), Choice(preset)) is applies, (preset, facts)


def test_every_recipe_has_its_conditions_tested() -> None:
    assert {recipe.name for recipe in RECIPES} - set(WHEN) == {"float32 scales", "own scales in Concat"}  # above
    (own,) = (recipe for recipe in RECIPES if recipe.name == "own timings")
    assert not own.applies(EVERYTHING, Choice("A8W8", {"TunedFloat": ["a"]}))


def _row(name: str, **facts: Any) -> Recipe:
    return Recipe(name, name, lambda situation, choice: name != "unfit", _option(name, True), **facts)


def test_an_algorithm_takes_the_place_of_its_like() -> None:
    rows = {recipe.name: recipe for recipe in RECIPES}
    changed = rows["GPTQ"].change(Choice("A8W8", algorithms=("adaround:num_iterations=9", "cle")))
    assert changed.algorithms == ("cle", "gptq")
    changed = rows["bias correction with gain"].change(Choice("A8W8", algorithms=("bias_correction", "cle")))
    assert changed.algorithms == ("cle", "bias_correction:gain=true")
    paces = [Choice("A8W8", options, ("gptq",)).pace for options in ({}, {"TuneSpeed": True})]
    assert paces == ["trial gptq", "trial timed gptq"]


def test_attempts_rank_by_level_answers_in_hundredths_and_decibels() -> None:
    ranks = [Attempt(Choice("A8W8"), one).rank for one in (None, Judged("y", 1, SHARE, 0.914, 5.0))]
    assert ranks == [(-1, 0.0, 0.0), (1, 0.91, 5.0)]


@pytest.mark.parametrize(
    ("ours", "theirs", "better"),
    [((0.005, 5.0), (0.0, 9.0), False), ((0.0, 9.0), (0.005, 8.0), True), ((0.5, 0.1), (0.5, 0.0), False)],
)
def test_what_lies_on_the_bound_is_not_clear(
    ours: tuple[float, float], theirs: tuple[float, float], better: bool
) -> None:
    one, other = (Attempt(Choice("A8W8"), Judged("y", 1, SHARE, *numbers)) for numbers in (ours, theirs))
    assert one.beats(other) is better


def test_attempts_begin_where_they_end_in_time_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def measure(choice: Choice) -> Judged:
        now[0] += 44.0
        return judged(30.0, GOOD)

    def climb(end: float) -> Climb:
        now[0] = 0.0
        return Climb(Attempt(Choice("A8W8"), judged(1.0)), EVERYTHING, measure, slowest=11.0, end=end)

    monkeypatch.setattr("quark.onnx.climb.time.perf_counter", lambda: now[0])
    for times, end, tried, slowest in ((1.0, 10.0, 0, 11.0), (1.0, 11.0, 1, 44.0), (4.0, 44.0, 1, 11.0)):
        made = climb(end)
        made.over([_row("a", times=times)])
        assert (made.tried, made.slowest) == (tried, slowest)
    for end, tried in ((10.0, 0), (11.0, 1)):
        made, good = climb(end), Attempt(Choice("A16W8"), judged(30.0, GOOD), ("a", "b"))
        assert (made._alone(_row("b"), good) == good) is (tried == 0) and made.tried == tried


def test_time_is_kept_for_a_last_row_that_applies() -> None:
    climb = Climb(Attempt(Choice("A8W8"), judged(1.0)), EVERYTHING, lambda choice: None, slowest=5.0)
    quick, last, unfit = _row("a"), _row("b", last=True), _row("unfit", last=True)
    keeps = [climb._keeps(rows, row) for rows, row in (([quick, last], quick), ([quick, last], last))]
    assert keeps == [True, False] and climb._keeps([quick, unfit], quick) is False


@pytest.mark.parametrize(
    ("left", "names"), [(0.9, []), (1.0, ["last"]), (1.9, ["last"]), (2.0, ["a", "last"]), (5.0, ["a", "b", "last"])]
)
def test_no_more_is_tried_than_attempts_are_left(left: float, names: list[str]) -> None:
    """A row counts by how long it takes, and one attempt is kept for the last while the model is lost."""
    rows = [_row("a"), _row("b", times=3.0), _row("c"), _row("last", last=True)]
    tried = []

    def measure(choice: Choice) -> Judged:
        tried.append(choice)
        return judged(1.0)

    climb = Climb(Attempt(Choice("A8W8"), judged(1.0)), EVERYTHING, measure, end=1e9 + time.perf_counter(), left=left)
    climb.over(rows)
    assert ["".join(choice.options) for choice in tried] == names
    assert climb.left == pytest.approx(left - sum({"b": 3.0}.get(name, 1.0) for name in names))


@pytest.mark.parametrize(("count", "first"), [(3, "cb"), (4, "dc")])
def test_the_better_half_is_tried_in_front_of_the_slow_ones(count: int, first: str) -> None:
    base, asked = Choice("A8W8", {"same": True}), list[Sequence[Choice]]()

    def probe(choices: Sequence[Choice]) -> list[tuple[float, ...] | None]:
        asked.append(choices)
        return [(float(number),) for number in range(len(choices))]  # the later, the better

    quick = [_row(name) for name in "abcd"[:count]]
    found = _ordered([*quick, _row("slow", slow=True), _row("unfit"), _row("same")], base, EVERYTHING, probe)
    rest = [row.name for row in quick if row.name not in first]
    assert [row.name for row in found] == [*first, "slow", *rest, "unfit", "same"]
    assert asked == [[base, *(row.change(base) for row in quick)]]
