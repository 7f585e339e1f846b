"""From sensitivities to a verified plan.

    minimize cost(plan)   subject to   Σ loss(layer) <= E,   with E such that metric(quantized model) meets the target

Losses add up only to first order, so E is found by measuring: the plan for a first E is quantized and measured, and
the cheapest of all if that was good enough. E moves by what was predicted against what was measured, or to the middle
(geometric) of what is known to be enough and not to be enough, until no plan lies between or the rounds are used up.

Then every plan with one candidate for all layers that is as cheap is measured too, and of all measured plans the
cheapest one that met the target wins (the other costs, then the metric, decide among equals; the best metric, where
none did): no plan that comes back is worse in every cost and in the metric than one that was measured.

HAWQ-V3 (Yao et al., ICML 2021) chooses bit widths by integer programming over sensitivities; the measured loop is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial

import numpy as np

from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.search.knapsack import SLACK, choose
from quark.search.refine import Alone
from quark.search.target import SearchGoal, Target
from quark.search.values import Study, total

Plan = tuple[str, ...]
Measure = Callable[[Sequence[str]], float]
Estimate = Callable[[str], tuple[Study, Alone]]
Groups = Sequence[Sequence[str]]
Costs = Callable[[Sequence[str]], Mapping[str, float]]
#: Plans that are measured until one is within a limit as a whole.
NARROWED = 5
#: From the value of a metric to a loss that grows with Σ loss, where there is such a relation.
LOSS_OF: dict[str, Callable[[float], float]] = {
    "sqnr": lambda value: 10 ** (-value / 10),
    "psnr": lambda value: 10 ** (-value / 10),
    "cosine": lambda value: max(1 / max(value, 1e-9) ** 2 - 1, 0.0),
    "mse": lambda value: value,
    "kl": lambda value: value,
    "loss": lambda value: value,
}
#: Metrics whose values are the sums of losses themselves, so that the target is the first E.
DIRECT = ("sqnr", "cosine", "kl", "loss")


@dataclass(frozen=True)
class Question:
    """What is wanted.

    Attributes:
        target: what the measured metric has to reach.
        budget: the cost that is to be small.
        limit: the most of ``budget``, in the place of a target.
        rounds: plans that are measured, at most, beside those of one candidate and the most precise one.
        compare: also measure every candidate for all layers.
        together: groups of layers that must get one candidate.
        function: ``file.py:function`` of the user's, which gives the metric.
        estimate: given a measure, the losses of layers by a few passes, and who measures those that the plan rests on;
            None: all are tried.
    """

    target: Target
    budget: str
    limit: float | None = None
    rounds: int = 8
    compare: bool = False
    together: Groups = ()
    function: str | None = None
    estimate: Estimate | None = None


def question_of(goal: SearchGoal, target: Target, estimate: Estimate, together: Groups = ()) -> Question:
    """The question of a goal; ``estimate`` where layers are estimated."""
    by = estimate if goal.estimate else None
    return Question(target, goal.budget, goal.limit, goal.rounds, goal.compare, together, goal.metric, by)


@dataclass
class Bracket:
    """What is known of E: ``good`` met the target, ``bad`` did not."""

    good: float
    bad: float
    tried: dict[Plan, float] = field(default_factory=dict)


def cheapest(
    study: Study, question: Question, measure: Measure, costs: Costs | None = None
) -> tuple[Plan, dict[Plan, float]]:
    """The cheapest plan that meets the target; where none does, the one that comes nearest.

    Args:
        study: losses and costs.
        question: what is to be met at the least cost.
        measure: quantizes the model by a plan (a candidate per layer) and gives the metric.
        costs: of a plan that was measured, where they do not add up over layers; the sums otherwise.

    Returns:
        The plan, and the metric of every plan that was measured.
    """
    target, budget = question.target, question.budget
    first, bracket = _opened(study, budget)
    limit = _first(bracket, target)
    for _ in range(question.rounds):
        plan = _plan(study, budget, limit)
        value = _measured(plan, bracket, measure)
        if target.met(value):
            if plan == first:
                break
            bracket.good = max(limit, total(study, "loss", plan))
        else:
            bracket.bad = min(limit, total(study, "loss", plan))
        failed = any(not target.met(other) for other in bracket.tried.values())
        proposed = _next(target, bracket, total(study, "loss", plan), value) if failed else bracket.bad
        if proposed is None or _plan(study, budget, proposed) in bracket.tried:
            proposed = _untried(study, budget, bracket)
        if proposed is None:
            break
        limit = proposed
    return _compared(study, question, bracket, measure, costs), bracket.tried


def first_guess(study: Study, question: Question) -> Plan:
    """The plan that is measured first.

    Raises:
        ConfigError: even the cheapest plan costs more than the limit.
    """
    if question.limit is not None:
        return within(study, question.budget, question.limit)
    return _plan(study, question.budget, _first(_opened(study, question.budget)[1], question.target))


def _opened(study: Study, budget: str) -> tuple[Plan, Bracket]:
    """The cheapest plan of all, and what is known of E before anything is measured."""
    first = _plan(study, budget, math.inf)
    return first, Bracket(float(study.table("loss").min(axis=1).sum()), total(study, "loss", first))


def _first(bracket: Bracket, target: Target) -> float:
    """The first E."""
    direct = target.metric in DIRECT
    return _inside(LOSS_OF[target.metric](target.value) if direct else math.sqrt(bracket.good * bracket.bad), bracket)


def _compared(study: Study, question: Question, bracket: Bracket, measure: Measure, costs: Costs | None) -> Plan:
    """The best of the measured plans and of the uniform ones that could be better."""

    def best() -> Plan:
        return best_of({plan: (value, spent(plan)) for plan, value in bracket.tried.items()}, target, budget)

    target, budget, spent = question.target, question.budget, costs or partial(sums, study)
    if not any(map(target.met, bracket.tried.values())):
        _measured(_plan(study, budget, float(study.table("loss").min(axis=1).sum())), bracket, measure)
    for plan in uniform(study):
        none = not target.met(bracket.tried[best()])
        if costs is not None or none or total(study, budget, plan) <= total(study, budget, best()):
            _measured(plan, bracket, measure)
    return best()


def best_of(measured: Mapping[Plan, tuple[float, Mapping[str, float]]], target: Target, budget: str) -> Plan:
    """The cheapest plan that meets the target; where none does, the one with the best metric.

    The least of (budget, other costs, loss), or of (loss, budget, other costs), in lexicographic order: no other plan
    is at most equal in all of them and less in one.

    Args:
        measured: metric and costs by plan.
        target: what is to be met.
        budget: the cost that counts first.
    """

    def key(plan: Plan) -> tuple[float, ...]:
        value, costs = measured[plan]
        loss = math.inf if math.isnan(value) else -value if target.least else value
        spent = (costs[budget], *(costs[name] for name in sorted(costs) if name != budget))
        return (*spent, loss) if good else (loss, *spent)

    good = [plan for plan, (value, _) in measured.items() if target.met(value)]
    return min(good or measured, key=key)


def uniform(study: Study) -> list[Plan]:
    """The plans with one candidate for all layers, of candidates that fit them all."""
    alike = [(name,) * len(study.layers) for name in study.candidates]
    return [plan for plan in alike if math.isfinite(total(study, "loss", plan))]


def most_precise(
    study: Study, question: Question, measure: Measure, costs: Costs | None = None, also: Sequence[Plan] = ()
) -> tuple[Plan, dict[Plan, float]]:
    """The plan with the best metric within a limit: of those with the least sum of losses, and of the uniform ones.

    Where no plan that was measured is within the limit, the cheapest one.

    Args:
        study, measure, costs: as ``cheapest``.
        question: its limit counts; its target says which metric is better.
        also: more plans within the limit.

    Raises:
        ConfigError: even the cheapest plan costs more.
    """
    target, budget, limit = question.target, question.budget, math.inf if question.limit is None else question.limit
    fit = [plan for plan in uniform(study) if total(study, budget, plan) <= limit * (1 + SLACK)]
    spent, far = costs or partial(sums, study), replace(target, value=math.inf if target.least else -math.inf)
    found = {}
    for plan in dict.fromkeys((*_narrowed(study, budget, limit, spent), *also, *fit)):
        found[plan] = measure(plan), spent(plan)
    kept = {plan: one for plan, one in found.items() if one[1][budget] <= limit * (1 + SLACK)}
    best = best_of(kept, far, budget) if kept else min(found, key=lambda plan: found[plan][1][budget])
    return best, {plan: value for plan, (value, _) in found.items()}


def _narrowed(study: Study, budget: str, limit: float, spent: Costs) -> Iterator[Plan]:
    """Plans within a limit by their sums, of which the last one is within it as a whole, where ``NARROWED`` rounds find
    one: what layers do not have alone (Q and DQ at the borders between types) is taken off the limit of the sums."""
    bound = limit
    for _ in range(NARROWED):
        try:
            plan = within(study, budget, bound)
        except ConfigError:
            if bound == limit:
                raise
            return
        yield plan
        whole = spent(plan)[budget]
        if whole <= limit * (1 + SLACK):
            return
        bound = min(bound, total(study, budget, plan)) * limit / whole


def sums(study: Study, plan: Sequence[str]) -> dict[str, float]:
    """The costs of a plan where they add up over layers."""
    return {name: total(study, name, plan) for name in study.trials[0].costs}


def within(study: Study, budget: str, limit: float) -> tuple[str, ...]:
    """The plan of the least loss whose cost is at most ``limit``.

    Raises:
        ConfigError: even the cheapest plan costs more.
    """
    cost = study.table(budget)
    found = choose(study.table("loss"), cost, limit, cost)
    if found is None:
        least = cost.min(axis=1).sum()
        raise ConfigError(f"--limit {limit:g}: the cheapest plan of these candidates has {budget} {least:.6g}")
    return tuple(study.candidates[column] for column in found)


def _plan(study: Study, budget: str, limit: float) -> tuple[str, ...]:
    """The cheapest plan whose losses add up to at most ``limit``; among equals the one of fewer bits, then loss."""
    loss = study.table("loss")
    limit = min(limit, float(np.where(np.isfinite(loss), loss, 0).sum()))
    ties = (study.table("bits"), loss) if budget != "bits" and _has(study, "bits") else (loss,)
    found = choose(study.table(budget), loss, max(limit, float(loss.min(axis=1).sum())), *ties)
    if found is None:
        raise ConfigError("no choice of candidates fits all layers")
    return tuple(study.candidates[column] for column in found)


def _has(study: Study, name: str) -> bool:
    return all(name in trial.costs for trial in study.trials)


def _measured(plan: tuple[str, ...], bracket: Bracket, measure: Measure) -> float:
    if plan not in bracket.tried:
        bracket.tried[plan] = measure(plan)
    return bracket.tried[plan]


def _inside(limit: float, bracket: Bracket) -> float:
    """``limit`` within what is still open."""
    return min(max(limit, bracket.good), bracket.bad)


def _next(target: Target, bracket: Bracket, predicted: float, value: float) -> float | None:
    """The next E: scaled by what was measured against what was predicted where the metric allows."""
    relation = LOSS_OF.get(target.metric)
    scaled = math.nan
    if relation is not None and predicted > 0 and math.isfinite(value):
        measured = relation(value)
        scaled = predicted * relation(target.value) / measured if measured > 0 else math.nan
    if bracket.good < scaled < bracket.bad:
        return scaled
    return _middle(bracket)


def _middle(bracket: Bracket) -> float | None:
    """Between what is enough and what is not; geometric, with a floor where 0 is enough."""
    if bracket.bad <= 0 or bracket.good >= bracket.bad:
        return None
    return math.sqrt(max(bracket.good, bracket.bad * 1e-4) * bracket.bad)


def _untried(study: Study, budget: str, bracket: Bracket) -> float | None:
    """An E inside the bracket whose plan was not measured; ``None`` where a few halvings find none."""
    low, high = bracket.good, bracket.bad
    for _ in range(12):
        middle = math.sqrt(max(low, high * 1e-4) * high) if high > 0 else 0.0
        plan = _plan(study, budget, middle)
        if plan not in bracket.tried:
            return middle
        low, high = (middle, high) if total(study, "loss", plan) <= bracket.good else (low, middle)
        if not low < high:
            break
    return None
