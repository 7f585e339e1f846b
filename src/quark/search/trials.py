"""Layers that are tried alone, in both flows: finished trials come from a ledger, and what is measured becomes a loss.

loss    of a measure: the measure itself (``quark.measure.outputs.loss_name``)
        of a function of the user's: |f(float model) − f(model with one layer quantized)|
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quark.files.journal import Journal
from quark.measure.outputs import loss_name
from quark.search.function import checked_reference, load_function, number_of

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
#: A layer and a candidate.
Pair = tuple[str, str]
#: The measures of one trial, by name; ``value`` is that of a function of the user's.
Measured = dict[str, float]


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
