"""A float model as both flows try and search it: what a flow implements, and all that follows from it.

layers          names, kinds, and what every candidate that fits costs
tried           layers under candidates, each quantized alone and measured
PlanMetric      whole plans, quantized for real and measured (``quark.search.plan_metric``)

study           every layer under every candidate, finished trials from the ledger
searched        study → integer programming → plans measured → judged on samples that decided nothing
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from quark.dataclass import dataclass
from quark.files.journal import Journal
from quark.measure.outputs import EXACT
from quark.search.function import digest_of
from quark.search.loop import Question
from quark.search.parts import Split
from quark.search.plan_metric import PlanMetric
from quark.search.solve import Judges, solve
from quark.search.trials import Measured, Pair, Progress, all_measured, loss_of, of_float, say_if_first
from quark.search.values import FLOAT, Found, Study, Trial

#: Measures that need no function; each is also a loss, in which ``sqnr`` and ``cosine`` are the noise.
MEASURES = ("sqnr", "mse", "cosine", "kl")


@dataclass(frozen=True)
class TriedLayer:
    """What is tried: its name, its operator or class, and its costs under every candidate that fits it."""

    name: str
    kind: str
    costs: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class TriedModel(ABC):
    """A float model, calibrated once for all candidates.

    Attributes:
        USUAL: the measure that layers are ranked by where a function of the user's judges plans.
        layers: in their order.
        model: what a function of the user's is called with.
        samples: how many the layers are tried on.
        outputs: how many are compared.
    """

    USUAL: ClassVar[str]
    layers: Sequence[TriedLayer]
    model: Any
    samples: int
    outputs: int

    @abstractmethod
    def belongs(self) -> dict[str, str]:
        """What tells this model, its samples and its configuration from others, for a ledger."""

    @abstractmethod
    def tried(self, pairs: Sequence[Pair], metric: str) -> Iterable[tuple[Pair, Measured]]:
        """Layers under candidates that quantize them, each as it is finished; ``size`` counts among the costs."""


def ledger_of(flow: TriedModel, path: str | Path | None, metric: str) -> Journal:
    """The ledger of a job; refused where it belongs to another one. ``metric``: what is measured, in words."""
    return Journal(None, {}) if path is None else Journal(path, {**flow.belongs(), "metric": metric})


def study(
    flow: TriedModel,
    metric: str,
    ledger: Journal,
    progress: Progress | None = None,
    known: Mapping[Pair, Measured] | None = None,
) -> Study:
    """The loss of every layer under every candidate, with only that layer quantized.

    Args:
        flow: the layers.
        metric: a name in ``MEASURES``, or ``file.py:function``.
        ledger: where finished trials are kept.
        progress: called with the number of finished trials and of all.
        known: pairs that need no trial.
    """
    start = time.perf_counter()
    say_if_first(metric, flow.outputs)
    exact: Measured = {name: value for name, value in EXACT.items() if name != "kl" or metric == "kl"}
    if ":" in metric:
        exact = {"value": ledger.number("the float model", lambda: of_float(metric, flow.model))}
    pairs = [(layer.name, name) for layer in flow.layers for name in layer.costs if name != FLOAT]
    found = all_measured(pairs, metric, ledger, lambda left: flow.tried(left, metric), progress, known)
    trials = []
    for layer in flow.layers:
        for name, costs in layer.costs.items():
            measured = dict(exact if name == FLOAT else found[layer.name, name])
            own = {**costs, **({"size": measured.pop("size")} if "size" in measured else {})}
            loss = loss_of(measured, metric, exact.get("value", 0.0))
            trials.append(Trial(layer.name, layer.kind, name, loss, measured, own))
    return Study(tuple(trials), metric, flow.samples, time.perf_counter() - start)


def ranked(flow: TriedModel, metric: str, ledger: str | Path | None, progress: Progress | None) -> Study:
    """``study`` as a job of its own, with the file of its ledger."""
    book = ledger_of(flow, ledger, digest_of(metric) if ":" in metric else metric)
    found = study(flow, metric, book, progress)
    book.settle()
    return found


def searched(
    flow: TriedModel,
    plans: Callable[[Journal], PlanMetric],
    split: Split,
    question: Question,
    ledger: str | Path | None = None,
    progress: Progress | None = None,
) -> Found:
    """The plan that answers a question, judged on samples that decided nothing.

    Args:
        flow: the layers.
        plans: the metric of whole plans, given the ledger.
        split: the samples by what they decide; the layers are tried on those that fit.
        question: what is wanted.
        ledger: a JSON file that finished trials and measurements are kept in.
        progress: called with the number of finished trials and of all.

    Raises:
        ConfigError: no plan is within the limit, or a ledger of something else.
    """
    target = question.target.metric
    name = "kl" if target in ("kl", "perplexity") else "sqnr"
    name = flow.USUAL if question.function is not None else name
    book = ledger_of(flow, ledger, f"{name} for {target} by {digest_of(question.function)}")
    if question.estimate is None:
        found, alone = study(flow, name, book, progress), None
    else:
        found, alone = question.estimate(name)
    whole, report = plans(book).apart(split)
    found, budget, costs = whole.priced(found, question.budget)
    judges = Judges(whole, report, costs, split.notes, alone)
    solved = solve(found, replace(question, budget=budget), judges)
    book.settle()
    return solved
