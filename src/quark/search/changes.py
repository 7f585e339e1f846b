"""Changes of single layers, each of which is made or not: as many, or as few, as a loss allows.

A search (``quark.search.loop``) among plans in which every layer costs the same, measured in a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from quark.search.loop import Question, cheapest
from quark.search.target import Target
from quark.search.values import Study, Trial, total

#: What a layer may be, and what the search saves.
LEFT, MADE, LAYERS = "left", "made", "layers"


def taken(
    names: Sequence[str],
    losses: Sequence[float],
    loss_with: Callable[[Sequence[int]], float],
    bound: float,
    many: bool,
) -> tuple[list[int], bool]:
    """The numbers of the changes that are made, and whether the loss with them is within the bound.

    Args:
        names: of the layers.
        losses: of the model with each change alone; infinite where it is not known.
        loss_with: the loss with some of the changes, by number.
        bound: the most that may be lost.
        many: as many changes as the bound allows, or as few as meet it.
    """

    def numbers(plan: Sequence[str]) -> list[int]:
        return [number for number, option in enumerate(plan) if option == MADE]

    base, trials = loss_with(()), list[Trial]()
    for name, loss in zip(names, losses, strict=True):
        gain = base - loss if math.isfinite(loss) else -math.inf
        for option, lost, wanted in ((LEFT, gain, not many), (MADE, -gain, many)):
            trials.append(Trial(name, "", option, max(lost, 0.0), costs={LAYERS: float(not wanted)}))
    study = Study(tuple(trials), "loss", 0)
    left = base - total(study, "loss", (LEFT,) * len(names))  # what is not of single layers
    left = left if math.isfinite(left) else 0.0
    target = Target("loss", False, bound - left)
    plan, _ = cheapest(
        study, Question(target, LAYERS, rounds=len(names) + 1), lambda plan: loss_with(numbers(plan)) - left
    )
    return numbers(plan), target.met(loss_with(numbers(plan)) - left)
