"""No plan that comes back is worse than one that was measured: random tables, random truths, every budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from quark.search.loop import Question, cheapest, most_precise
from quark.search.parts import how_far, parts_of, split
from quark.search.solve import Judges, solve
from quark.search.target import Target
from quark.search.ties import fused, tied
from quark.search.values import Study, Trial

NAMES = ("a", "b", "c")


def table(seed: int) -> tuple[Study, dict[tuple[str, ...], float]]:
    """Random losses and costs of four layers, and what every whole plan really loses: only roughly the sum."""
    draw = np.random.default_rng(seed)
    layers = [f"l{k}" for k in range(4)]
    trials = [
        Trial(layer, "Conv", name, float(draw.integers(1, 6)), {}, {key: float(draw.integers(1, 5)) for key in COSTS})
        for layer in layers
        for name in NAMES
        if name == "a" or draw.random() < 0.9
    ]
    study = Study(tuple(trials), "kl", 4)
    truth = {
        plan: sum(one.loss for one in found if one) * float(draw.uniform(0.3, 3))
        for plan in itertools.product(study.candidates, repeat=4)
        if all(found := [study.of(*pair) for pair in zip(layers, plan, strict=True)])
    }
    return study, truth


COSTS = ("size", "bits", "latency")


def costs(study: Study, plan: Sequence[str]) -> tuple[float, ...]:
    """Sums over the layers, from the trials alone."""
    chosen = {(one.layer, one.candidate): one.costs for one in study.trials}
    spent = [chosen[pair] for pair in zip(study.layers, plan, strict=True)]
    return tuple(sum(one[name] for one in spent) for name in COSTS)


@pytest.mark.parametrize("seed", range(20))
def test_borders_between_types_count_against_a_limit(seed: int) -> None:
    """A whole plan costs more than its layers: it is within the limit, or hardly any is, and that is said."""
    study, truth = table(seed)

    def spent(plan: Mapping[str, str]) -> dict[str, float]:
        chosen = [plan[layer] for layer in study.layers]
        borders = sum(one != other for one, other in itertools.pairwise(chosen))
        return {name: value + borders for name, value in zip(COSTS, costs(study, chosen), strict=True)}

    sums = study.table("latency")
    limit = float(sums.min(axis=1).sum()) + 2.0
    judges = Judges(lambda plan: truth[tuple(plan[layer] for layer in study.layers)], costs=spent)
    found = solve(study, Question(Target("kl", False, math.inf), "latency", limit), judges)
    assert found.costs == spent(found.layers) and found.met == (found.costs["latency"] <= limit)
    if not found.met:
        alone = [
            plan for plan in map(tuple, truth) if spent(dict(zip(study.layers, plan, strict=True)))["latency"] <= limit
        ]
        assert len(alone) <= len(truth) // 8, "there were plans within the limit, and none was found"


@pytest.mark.parametrize("seed", range(40))
def test_nothing_that_was_measured_dominates_the_plan(seed: int) -> None:
    study, truth = table(seed)
    draw = np.random.default_rng(1000 + seed)
    bound = float(draw.choice([*truth.values(), 0.0]))
    budget, target, seen = str(draw.choice(COSTS)), Target("kl", False, bound), {}

    def measure(plan: Sequence[str]) -> float:
        seen[tuple(plan)] = truth[tuple(plan)]
        return truth[tuple(plan)]

    if seed % 3:
        plan, tried = cheapest(study, Question(target, budget, rounds=3), measure)
    else:
        limit = sorted(costs(study, plan)[COSTS.index(budget)] for plan in truth)[len(truth) // 3]
        plan, tried = most_precise(study, Question(target, budget, limit), measure)
        assert costs(study, plan)[COSTS.index(budget)] <= limit
    assert tried == seen
    mine = (*costs(study, plan), truth[plan])
    alike = [(name,) * 4 for name in NAMES if (name,) * 4 in truth]
    for other in {*seen, *(alike if seed % 3 else ())}:
        theirs = (*costs(study, other), truth[other])
        assert not (theirs != mine and all(x <= y for x, y in zip(theirs, mine, strict=True))), (plan, other)
    if seed % 3:
        good = [other for other in seen if truth[other] <= bound]
        place = COSTS.index(budget)
        assert (truth[plan] <= bound) == bool(good)
        assert not good or costs(study, plan)[place] == min(costs(study, other)[place] for other in good)


def test_nan_never_wins_and_costs_of_whole_plans_count() -> None:
    study, _ = table(1)
    values = {"a": math.nan, "b": 3.0, "c": 2.0}
    plan, _ = cheapest(
        study,
        Question(Target("kl", False, 1.0), "size"),
        lambda plan: values[plan[0]] if len(set(plan)) == 1 else math.nan,
    )
    assert set(plan) <= {"b", "c"}
    both = [Trial("l", "Conv", name, 1.0, {}, {"latency": cost}) for name, cost in (("a", 1.0), ("b", 2.0))]
    borders = {"a": {"latency": 9.0}, "b": {"latency": 2.0}}
    chosen, _ = cheapest(
        Study(tuple(both), "kl", 1),
        Question(Target("kl", False, 5.0), "latency"),
        lambda plan: 1.0,
        costs=lambda p: borders[p[0]],
    )
    assert chosen == ("b",)


def test_what_is_reported_comes_from_other_samples_than_what_chose() -> None:
    study, truth = table(2)
    seen: list[tuple[str, ...]] = []

    def report(layers: Mapping[str, str]) -> float:
        seen.append(tuple(layers.values()))
        return 7.0

    judges = Judges(lambda layers: truth[tuple(layers.values())], report, notes=("few",))
    found = solve(study, Question(Target("kl", False, 0.0), "size"), judges)
    assert not found.met and found.reported == 7.0 and found.notes == ("few",)
    assert seen == [tuple(found.layers.values())] and found.value == min(
        truth[p] for p in truth if truth[p] == found.value
    )


def test_layers_of_one_kernel_get_one_candidate() -> None:
    names = [f"m.0.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")]
    experts = [f"m.1.mlp.experts.{k}.{part}" for k in range(2) for part in ("gate_proj", "down_proj")]
    groups = fused([*names, *experts], [["*q_proj", "*k_proj", "*v_proj"], ["gate_proj", "up_proj"]])
    assert groups == [tuple(names[:3]), tuple(names[4:]), tuple(experts)]
    draw = np.random.default_rng(0)
    trials = [
        Trial(layer, "Linear", name, float(draw.uniform()), {}, {"size": cost})
        for layer in [*names, *experts]
        for name, cost in (("low", 1.0), ("high", 2.0))
        if (layer, name) != (names[1], "low")
    ]
    study = Study(tuple(trials), "kl", 1)
    found = solve(
        study,
        Question(Target("kl", False, math.inf), "size", together=groups),
        Judges(lambda layers: sum(layer == "low" for layer in layers.values())),
    )
    for group in groups:
        assert len({found.layers[name] for name in group}) == 1
    assert found.layers[names[0]] == "high" and list(found.layers) == [*names, *experts]
    rows, behind = tied(study, groups)
    assert rows.table("size").shape == (4, 2) and sum(map(len, behind.values())) == len(study.layers)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 7, 8, 33])
def test_no_sample_decides_twice_where_there_are_enough(count: int) -> None:
    found = parts_of(count)
    assert all(found) and bool(how_far(count, 1)) == (count < 8)
    if count >= 4:
        assert sorted(index for part in found for index in part) == list(range(count))
    made = split(list(range(count)))
    assert (made.fit, made.choose) == found[:2] and made.report == (found[2] if count >= 4 else None)
