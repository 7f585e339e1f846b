"""A question, a study and ways to measure a plan: the plan that answers the question, and how far it can be trusted.

A flow implements a ``TriedModel`` and a ``PlanMetric``; ``searched`` is all that follows from these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from quark.dataclass import dataclass
from quark.files.journal import Journal
from quark.search.function import digest_of
from quark.search.knapsack import SLACK
from quark.search.loop import Costs, Question, cheapest, first_guess, most_precise, sums
from quark.search.parts import Split
from quark.search.plan_metric import PlanCosts, PlanMetric
from quark.search.refine import Alone, refined
from quark.search.ties import spread, tied
from quark.search.trials import TriedModel, Trying, ledger_of, study
from quark.search.values import Found, Study

Measure = Callable[[Mapping[str, str]], float]


@dataclass(frozen=True)
class Judges:
    """Who measures a plan (candidate by layer).

    Attributes:
        choose: the metric on the samples that choose.
        report: the metric on samples that decide nothing; None: there are none.
        costs: of a plan that was measured, where they do not add up over layers.
        notes: what a reader must know about the samples, a sentence each.
        alone: measures the losses of single layers, where those of the study are estimates.
    """

    choose: Measure
    report: Measure | None = None
    costs: PlanCosts | None = None
    notes: tuple[str, ...] = ()
    alone: Alone | None = None


def solve(study: Study, question: Question, judges: Judges) -> Found:
    """The best plan that was measured, judged on samples that decided nothing.

    Raises:
        ConfigError: no plan is within the limit, or no candidate fits a group.
    """
    also: list[tuple[str, ...]] = []
    if judges.alone is not None:
        also = [_first(tied(study, question.together)[0], question)]
        study = refined(study, partial(_guessed, question=question), judges.alone)
    rows, behind = tied(study, question.together)
    full = partial(spread, behind)

    def measure(plan: Sequence[str]) -> float:
        return judges.choose(full(plan))

    own, target = judges.costs, question.target
    costs: Costs | None = None if own is None else lambda plan: own(full(plan))
    if question.limit is None:
        plan, tried = cheapest(rows, question, measure, costs)
    else:
        plan, tried = most_precise(rows, question, measure, costs, also)
    spent = costs or partial(sums, rows)
    uniform = {}
    for name in rows.candidates:
        same = (name,) * len(rows.layers)
        fits = all(rows.of(layer, name) is not None for layer in rows.layers)
        if fits and (same in tried or question.compare):
            value = tried[same] if same in tried else measure(same)
            uniform[name] = value, spent(same)
    reported = None if judges.report is None else judges.report(full(plan))
    over = question.limit is not None and spent(plan)[question.budget] > question.limit * (1 + SLACK)
    met = target.met(tried[plan]) and not over
    layers = {name: full(plan)[name] for name in study.layers}
    return Found(
        layers, target.metric, tried[plan], spent(plan), len(tried), study, uniform, met, reported, judges.notes
    )


def _guessed(study: Study, question: Question) -> dict[str, str]:
    """The plan of a study, before anything is measured: a candidate by layer."""
    rows, behind = tied(study, question.together)
    return spread(behind, _first(rows, question))


def _first(rows: Study, question: Question) -> tuple[str, ...]:
    return first_guess(rows, question)


def searched(
    flow: TriedModel,
    plans: Callable[[Journal], PlanMetric],
    split: Split,
    question: Question,
    trying: Trying,
) -> Found:
    """The plan that answers a question, judged on samples that decided nothing.

    Args:
        flow: the layers.
        plans: the metric of whole plans, given the ledger.
        split: the samples by what they decide; the layers are tried on those that fit.
        question: what is wanted.
        trying: how layers are tried.

    Raises:
        ConfigError: no plan is within the limit, or a ledger of something else.
    """
    target = question.target.metric
    name = "kl" if target in ("kl", "perplexity") else "sqnr"
    name = flow.USUAL if question.function is not None else name
    book = ledger_of(flow, trying.ledger, f"{name} for {target} by {digest_of(question.function)}")
    if question.estimate is None:
        found, alone = study(flow, name, book, trying.progress), None
    else:
        found, alone = question.estimate(name)
    whole, report = plans(book).apart(split)
    found, budget, costs = whole.priced(found, question.budget)
    judges = Judges(whole, report, costs, split.notes, alone)
    solved = solve(found, replace(question, budget=budget), judges)
    book.settle()
    return solved
