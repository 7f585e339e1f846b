"""Plans by estimates and a few trials: nearly those of all trials, on tables whose estimates are wrong by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from quark.search.loop import within
from quark.search.refine import Alone, Pair, corrected, refined
from quark.search.values import Study, Trial

SIZES = {"low": 1.0, "middle": 2.0, "high": 4.0}
LAYERS = 30


def tables(seed: int) -> tuple[Study, Study]:
    """What 30 layers really lose, and estimates that are wrong by a factor of each layer and one of each candidate."""
    draw = np.random.default_rng(seed)
    weights, losses = draw.lognormal(0, 1.0, LAYERS), draw.lognormal(0, 1.5, LAYERS)
    noise, lean = draw.lognormal(0, 1.0, LAYERS), draw.lognormal(0, 0.5, 3)
    true = [
        Trial(f"l{k}", "Conv", name, losses[k] * 16.0 ** -SIZES[name], {}, {"size": SIZES[name] * weights[k]})
        for k in range(LAYERS)
        for name in SIZES
    ]
    guessed = [replace(one, loss=one.loss * noise[k // 3] * lean[k % 3]) for k, one in enumerate(true)]
    return Study(tuple(true), "sqnr", 4), Study(tuple(guessed), "sqnr", 4)


def gap(true: Study, study: Study, limit: float) -> float:
    """Decibels that the plan of ``study`` really loses more than the best one."""

    def loss(plan: Sequence[str]) -> float:
        found = [true.of(*pair) for pair in zip(true.layers, plan, strict=True)]
        return sum(one.loss for one in found if one is not None)

    return 10 * math.log10(loss(within(study, "size", limit)) / loss(within(true, "size", limit)))


def test_a_tenth_of_the_trials_makes_plans_that_are_nearly_the_best() -> None:
    before, after = [], []
    for seed in range(8):
        true, guessed = tables(seed)
        limit, tried = 0.5 * true.table("size")[:, [0, 2]].sum(), list[Pair]()

        def measure(pairs: Sequence[Pair], tried: list[Pair] = tried, true: Study = true) -> list[float]:
            tried += pairs
            return [one.loss for pair in pairs if (one := true.of(*pair)) is not None]

        def plan(study: Study, limit: float = limit) -> dict[str, str]:
            return dict(zip(study.layers, within(study, "size", limit), strict=True))

        most = len(true.trials) // 10
        found = refined(guessed, plan, Alone(measure, lambda done, most=most: most - done))
        assert len(tried) == len(set(tried)) <= most
        assert all(found.of(*pair).loss == true.of(*pair).loss for pair in tried)
        before.append(gap(true, guessed, limit))
        after.append(gap(true, found, limit))
    assert np.median(after) < 0.3 < np.median(before), (before, after)


def test_estimates_that_are_right_stay_and_trials_are_only_as_many_as_the_plan_needs() -> None:
    true, _ = tables(0)
    alone = Alone(lambda pairs: [one.loss for pair in pairs if (one := true.of(*pair)) is not None], lambda done: 99)
    found = refined(true, lambda study: dict.fromkeys(study.layers, "high"), alone)
    assert [one.loss for one in found.trials] == pytest.approx([one.loss for one in true.trials])


def test_what_a_trial_showed_of_a_layer_holds_for_its_other_candidates() -> None:
    study = Study(tuple(Trial(layer, "Conv", name, 1.0) for layer in "ab" for name in ("x", "y")), "sqnr", 4)
    found = {(one.layer, one.candidate): one.loss for one in corrected(study, {("a", "x"): 8.0}).trials}
    assert found["a", "x"] == 8.0 and found["b", "x"] == pytest.approx(8**0.5) and found["b", "y"] == 1.0
    assert found["a", "y"] == pytest.approx(8**0.25)
