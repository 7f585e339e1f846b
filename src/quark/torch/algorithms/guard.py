"""Which change of a float model makes its quantized answers better, and whether one does.

Each sample is compared with itself, by the test of both flows (``quark.measure.gain``). Several changes are tried, so
that the best of them may be a lucky one: beside others that do nothing but round weights differently the best is a gain
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np
import torch
from torch import nn

from quark.dataclass import dataclass
from quark.measure import outputs
from quark.measure.gain import FEW, Gain, gain, surest
from quark.torch.algorithms.answers import BlockWalk, Change, answers, walk_of
from quark.torch.algorithms.context import ModelContext

MODEL_SAMPLES = 32  # that a model is judged on
CERTAIN = 3.0  # standard errors of a gain that leave no doubt


def best_of(errors: Sequence[Sequence[float]], before: Sequence[float]) -> int | None:
    """The number of the change that gains most, if it surely does; None: none is worth it.

    Args:
        errors: of each change, sample by sample.
        before: of the same samples without a change.
    """
    return surest({number: gain_of(after, before) for number, after in enumerate(errors)})


def gain_of(after: Sequence[float], before: Sequence[float]) -> Gain:
    """What a change brings."""
    return gain(*(np.asarray(one, np.float64)[:, None] for one in (after, before)))


def certain(after: Sequence[float], before: Sequence[float]) -> bool:
    """Whether a change gains so much on the samples that no other need be tried."""
    found = gain_of(after, before)
    return len(before) >= FEW and found.mean > CERTAIN * found.error


@dataclass(frozen=True)
class OutputDistance:
    """Measures how far the answers of the quantized model are from those of the float one.

    Answers as wide as an embedding's table are scores of words: the mean KL divergence of what the first predict, of
    which squared differences say little (a shift of all scores means nothing). Others: the mean squared difference, of
    several answers the mean of these over the energies of the answers.

    Attributes:
        walk: the float model.
        samples: numbers of samples.
        wanted: what the float model answers to them.
        distance: of two answers.
    """

    walk: BlockWalk
    samples: list[int]
    wanted: list[list[torch.Tensor]]
    distance: Callable[[list[torch.Tensor], list[torch.Tensor]], float]

    def errors(self, change: Change | None = None) -> tuple[float, ...]:
        """The error of each sample, of the model as it is now or with a change, which is taken back."""
        found = answers(self.walk, self.samples, True, change)
        return tuple(self.distance(x, y) for x, y in zip(found, self.wanted, strict=True))


def output_distance(walk: BlockWalk, samples: list[int]) -> OutputDistance:
    """A output_distance for the model as it is now."""
    wanted = answers(walk, samples)
    tables = [module.num_embeddings for module in walk.context.model.modules() if isinstance(module, nn.Embedding)]
    words = any(first.shape[-1] in tables for first in wanted[0][:1]) if wanted else False
    return OutputDistance(walk, samples, wanted, divergence if words else squared if single(wanted) else shares)


def single(wanted: list[list[torch.Tensor]]) -> bool:
    """Whether there is one answer to a sample."""
    return all(len(answers) == 1 for answers in wanted)


def model_error(context: ModelContext) -> Callable[[], float]:
    """A function: how far the answers of the model, quantized as it will be, are from those that it gives now."""
    found = output_distance(walk_of(context, ""), list(range(min(MODEL_SAMPLES, len(context.samples)))))
    return lambda: sum(found.errors())


def squared(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The mean squared difference of the first answers."""
    return float((found[0] - wanted[0]).square().double().mean())


def shares(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The energy of the differences over that of the answers, which all count alike; mean over the answers."""
    pairs = list(zip(found, wanted, strict=True))
    energies = [max(float(y.square().double().mean()), 1e-30) for _, y in pairs]
    return fmean(squared([x], [y]) / energy for (x, y), energy in zip(pairs, energies, strict=True))


def divergence(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The mean KL divergence of the scores that come first, [rows, words]."""
    return float(outputs.divergence(wanted[0], found[0]).mean())


def best_change(walk: BlockWalk, changes: Sequence[Change]) -> Change | None:
    """The change by which the quantized answers get better; None: no change is worth it.

    Args:
        walk: the float model.
        changes: which leave its float answers as they are; the first is taken alone where its gain is certain.
    """
    if not changes:
        return None
    measure = output_distance(walk, list(range(len(walk.context.samples)))[:MODEL_SAMPLES])
    before, errors = measure.errors(), [measure.errors(changes[0])]
    if not certain(errors[0], before):
        errors += [measure.errors(change) for change in changes[1:]]
    best = best_of(errors, before)
    return None if best is None else changes[best]


def change_all(walk: BlockWalk, change: Change) -> None:
    """Make a change in every part of the model."""
    for part in walk.parts:
        with walk.context.store.changing(part, walk.context.undo):
            change(walk.context, part)
