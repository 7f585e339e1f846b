"""Changes of single layers, each of which is made or not: as many, or as few, as a loss allows.

A search (``quark.search.loop``) among plans in which every layer costs the same, measured in a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from quark.dataclass import dataclass
from quark.search.loop import Question, cheapest
from quark.search.target import Target
from quark.search.trials import Pair
from quark.search.values import Study, Trial, total

#: What a layer may be, and what the search saves.
LEFT, MADE, LAYERS = "left", "made", "layers"


@dataclass(frozen=True)
class Chosen:
    """The changes that are made, the metric with them (None: nothing was measured), whether it meets its bound."""

    trials: Sequence[Trial] = ()
    value: float | None = None
    met: bool = True


def pairs_of(trials: Sequence[Trial]) -> list[Pair]:
    """The layers, and what they become."""
    return [(one.layer, one.candidate) for one in trials]


def ranked(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Trials of layers, those that lose least first; of several of one layer the best."""
    ordered = sorted(trials, key=lambda one: one.loss)
    best = {one.layer: one for one in reversed(ordered)}
    return tuple(one for one in ordered if best[one.layer] is one)


def chosen_of(
    trials: Sequence[Trial],
    value: Callable[[Sequence[Pair]], float],
    loss: Callable[[float], float],
    bound: float | None,
    many: bool,
) -> Chosen:
    """The changes that are made for a bound on a metric.

    Args:
        trials: one of each layer, ``value`` among its metrics.
        value: the metric with several changes.
        loss: of a metric.
        bound: the worst value; None: nothing is changed; 0: everything is.
        many: as of ``taken``.
    """

    def known(some: Sequence[Trial]) -> float:
        return some[0].metrics["value"] if len(some) == 1 else value(pairs_of(some))

    if bound is None:
        return Chosen()
    if bound == 0:
        return Chosen(trials, known(trials))
    found, met = taken(trials, lambda some: loss(known(some)), loss(bound), many)
    return Chosen(found, known(found), met)


def taken(
    trials: Sequence[Trial], loss_with: Callable[[Sequence[Trial]], float], bound: float, many: bool
) -> tuple[list[Trial], bool]:
    """The changes that are made, and whether the loss with them is within the bound.

    Args:
        trials: one of each layer, its loss that of the model with this change alone; infinite where it is not known.
        loss_with: the loss with some of the changes.
        bound: the most that may be lost.
        many: as many changes as the bound allows, or as few as meet it.
    """

    def made(plan: Sequence[str]) -> list[Trial]:
        return [one for one, option in zip(trials, plan, strict=True) if option == MADE]

    base, options = loss_with(()), list[Trial]()
    for one in trials:
        gain = base - one.loss if math.isfinite(one.loss) else -math.inf
        for option, lost, wanted in ((LEFT, gain, not many), (MADE, -gain, many)):
            options.append(Trial(one.layer, "", option, max(lost, 0.0), costs={LAYERS: float(not wanted)}))
    study = Study(tuple(options), "loss", 0)
    left = base - total(study, "loss", (LEFT,) * len(trials))  # what is not of single layers
    left = left if math.isfinite(left) else 0.0
    target = Target("loss", False, bound - left)
    plan, _ = cheapest(
        study, Question(target, LAYERS, rounds=len(trials) + 1), lambda plan: loss_with(made(plan)) - left
    )
    return made(plan), target.met(loss_with(made(plan)) - left)
