"""Estimated losses, and trials for the layers that a plan rests on.

    estimate → plan → the layers that lose most under it are tried for real → corrected losses → plan → …

An integer program picks what looks cheap, so it picks what was underestimated: the losses that it rests on are the ones
to measure. What was overestimated it never picks; so plans that say what to try are made of losses that are
``HOPE`` times as large where no trial knows them. Estimates are corrected by what trials showed of their candidate and
of their layer (geometric means of measured over estimated, drawn to 1 while they are few). It ends when nearly all of
the loss of such a plan is measured, or the trials are used up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from quark.dataclass import dataclass
from quark.files.journal import Journal
from quark.measure.outputs import loss_name
from quark.search.trials import Pair, TriedModel, estimated
from quark.search.trials import study as study_of
from quark.search.values import Study, Trial

ENOUGH = 0.98
"""The part of a plan's loss that is to be measured."""
HOPE, LEAST = 0.5, 1 / 32
"""How much less than estimated a loss may turn out to be, and its layer still be found: at first, and at last."""
AT_ONCE = 4
"""Trials between two plans."""
FEWER = 20
"""How many times fewer runs of the model than one trial per layer and candidate estimates take."""


@dataclass(frozen=True)
class Alone:
    """Who measures the losses of layers under candidates, each alone.

    Attributes:
        losses: of pairs (layer, candidate), in their order.
        left: pairs that may still be measured, of the number that was.
    """

    losses: Callable[[Sequence[Pair]], Sequence[float]]
    left: Callable[[int], int]


def affordable(allowed: float, estimates: float, measured: float, each: float, pairs: int, done: int) -> int:
    """Pairs that may still be measured, so that all of it takes the runs that are allowed.

    Args:
        allowed: runs of the model that all of it may take.
        estimates: those that the estimates took.
        measured: those that measuring pairs took.
        each: those that measuring one pair takes, at most.
        pairs: what may be measured in small models and with few samples, where the estimates alone take all runs.
        done: pairs that were measured.
    """
    left = allowed - estimates
    return pairs - done if left < each else int((left - measured) / each)


def by_trials(
    flow: TriedModel, metric: str, losses: Mapping[Pair, float], spent: float, brief: TriedModel
) -> tuple[Study, Alone]:
    """The study of estimated losses, and trials on few samples for what a plan rests on.

    Args:
        flow: the layers.
        metric: a name in ``quark.search.trials.MEASURES``.
        losses: estimates of every layer under every candidate.
        spent: runs of the model that these took.
        brief: the layers on few samples.
    """
    found = study_of(flow, metric, Journal(), known={pair: estimated(one, metric) for pair, one in losses.items()})
    allowed, few = len(losses) * flow.samples / FEWER, len(losses) // FEWER

    def measured(pairs: Sequence[Pair]) -> list[float]:
        tried = dict(brief.tried(pairs, metric))
        return [tried[pair][loss_name(metric)] for pair in pairs]

    each = brief.samples
    return found, Alone(measured, lambda done: affordable(allowed, spent, done * each, each, few, done))


def refined(study: Study, plan_of: Callable[[Study], Mapping[str, str]], alone: Alone) -> Study:
    """The study, with measured losses where plans rest on them.

    Args:
        study: estimated losses.
        plan_of: the plan of a study, a candidate by layer.
        alone: measures.
    """
    known: dict[Pair, float] = {}
    hope = HOPE
    while (most := min(AT_ONCE, alone.left(len(known)))) > 0 and hope >= LEAST:
        hoped = corrected(study, known, hope)
        heavy = _heavy(hoped, plan_of(hoped), known)[:most]
        if heavy:
            known |= dict(zip(heavy, alone.losses(heavy), strict=True))
        else:
            hope /= 2
    return corrected(study, known)


def _heavy(study: Study, plan: Mapping[str, str], known: Mapping[Pair, float]) -> list[Pair]:
    """The layers of a plan that are not tried yet, of those that make most of its loss, the largest first."""
    losses = {(one.layer, one.candidate): one.loss for one in study.trials if plan[one.layer] == one.candidate}
    found, seen, bound = [], 0.0, ENOUGH * sum(losses.values())
    for pair in sorted(losses, key=lambda pair: -losses[pair]):
        if seen >= bound:
            break
        seen += losses[pair]
        found.append(pair)
    return [pair for pair in found if pair not in known]


def corrected(study: Study, known: Mapping[Pair, float], hope: float = 1.0) -> Study:
    """Measured losses where they are known, the others scaled as those of their candidate and layer were wrong."""
    wrong = {
        pair: math.log(known[pair] / one.loss)
        for one in study.trials
        if known.get(pair := (one.layer, one.candidate), 0.0) > 0 and one.loss > 0
    }
    of_candidate = _drawn((candidate, value) for (_, candidate), value in wrong.items())
    of_layer = _drawn((layer, value - of_candidate[candidate]) for (layer, candidate), value in wrong.items())

    def better(one: Trial) -> Trial:
        shift = of_candidate.get(one.candidate, 0.0) + of_layer.get(one.layer, 0.0)
        loss = known.get((one.layer, one.candidate), hope * math.exp(shift) * one.loss)
        return one if loss == one.loss else replace(one, loss=loss, metrics=estimated(loss, study.metric))

    return replace(study, trials=tuple(map(better, study.trials)))


def _drawn(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The mean of the values of each name, as if there were one more of 0."""
    found: dict[str, list[float]] = {}
    for name, value in values:
        found.setdefault(name, []).append(value)
    return {name: sum(one) / (len(one) + 1) for name, one in found.items()}
