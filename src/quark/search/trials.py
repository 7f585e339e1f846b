"""Layers that are tried alone, in both flows: finished trials come from a ledger, and what is measured becomes a loss.

A flow implements a ``TriedModel``: names, kinds and costs of layers, and trials of them.

loss    of a measure: the measure itself (``quark.measure.outputs.loss_name``)
        of a function of the user's: |f(float model) − f(model with one layer quantized)|
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from quark.dataclass import dataclass
from quark.files.journal import Journal
from quark.measure.outputs import EXACT, loss_name
from quark.numerics.metrics import decibel
from quark.search.function import checked_reference, digest_of, load_function, number_of
from quark.search.values import FLOAT, Study, Trial

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
#: A layer and a candidate.
Pair = tuple[str, str]
#: The measures of one trial, by name; ``value`` is that of a function of the user's.
Measured = dict[str, float]
#: Measures that need no function; each is also a loss, in which ``sqnr`` and ``cosine`` are the noise.
MEASURES = ("sqnr", "mse", "cosine", "kl")


@dataclass(frozen=True)
class Trying:
    """How layers are tried.

    Attributes:
        workers: trials at a time; of a torch model in processes, which need its folder.
        ledger: a JSON file that finished trials and measurements are kept in; a run that was killed goes on with it.
        progress: called with the number of finished trials and of all.
    """

    workers: int = 1
    ledger: str | Path | None = None
    progress: Progress | None = None


ONE_BY_ONE = Trying()


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


def all_measured(
    pairs: Sequence[Pair],
    metric: str,
    ledger: Journal,
    measure: Callable[[Sequence[Pair]], Iterable[tuple[Pair, Measured]]],
    progress: Progress | None = None,
    known: Mapping[Pair, Measured] | None = None,
) -> dict[Pair, Measured]:
    """What was measured of all pairs.

    Args:
        pairs: layers under candidates.
        metric: what ranks the layers.
        ledger: where finished trials are kept.
        measure: tries pairs, and gives each as it is finished.
        progress: called with the number of finished trials and of all.
        known: pairs that need no trial.
    """
    kind = ("value", loss_name(metric))
    kept = {pair: ledger.done(_key(pair), Measured, kind) for pair in pairs}
    found = {pair: one for pair, one in kept.items() if one is not None} | dict(known or {})
    for pair, one in measure([pair for pair in pairs if pair not in found]):
        found[pair] = one
        ledger.finish(_key(pair), one)
        if progress is not None:
            progress(len(found), len(pairs))
    return found


def _key(pair: Pair) -> str:
    """The entry of a ledger."""
    return f"{pair[0]} as {pair[1]}"


def say_if_first(metric: str, outputs: int) -> None:
    """Say where a metric looks at the first of several outputs."""
    if metric == "kl" and outputs > 1:
        log.warning("kl is of the first of the model's %d outputs: take sqnr where all of them count", outputs)


def by_function(metric: str, model: Any) -> Measured:
    """What a user's function, ``file.py:function``, says of a model or of the path of one."""
    return {"value": number_of(load_function(metric)(model), shown(metric))}


def of_float(metric: str, model: Any) -> float:
    """What a user's function says of the float model.

    Raises:
        ConfigError: it is nothing that anything can be compared with.
    """
    return checked_reference(by_function(metric, model)["value"])


def loss_of(measured: Measured, metric: str, reference: float) -> float:
    """The loss of one trial; infinite, which no plan chooses, where it is not a number.

    Args:
        measured: of the trial.
        metric: what ranks the layers.
        reference: what a function of the user's says of the float model.
    """
    loss = abs(measured["value"] - reference) if "value" in measured else measured[loss_name(metric)]
    return math.inf if math.isnan(loss) else loss


def shown(metric: str) -> str:
    """A metric without the file of its function."""
    return metric.rpartition(":")[2]


def estimated(loss: float, metric: str) -> Measured:
    """The measures that an estimated loss stands for; the SQNR is that of a single output."""
    name = loss_name(metric)
    return {name: loss, **({"sqnr": decibel(1.0, loss)} if name == "noise" else {})}


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


def ranked(flow: TriedModel, metric: str, trying: Trying) -> Study:
    """``study`` as a job of its own, with the file of its ledger."""
    book = ledger_of(flow, trying.ledger, digest_of(metric) if ":" in metric else metric)
    found = study(flow, metric, book, trying.progress)
    book.settle()
    return found
