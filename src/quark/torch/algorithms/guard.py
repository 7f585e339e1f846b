"""Whether a change of a float model makes its quantized answers better, for more than chance.

    gains g_k = error before - error after, of sample k        better: mean g > 1.75 standard errors of it

Each sample is compared with itself, so that small gains are told from chance, and large ones that a few samples make
are not taken for certain. With fewer than four samples there is no telling: there the error must fall by 2 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

import torch
from torch import nn

from quark.torch.algorithms.answers import Change, Walk, answers, walk_of
from quark.torch.algorithms.blocks import Stream, first
from quark.torch.algorithms.context import Context
from quark.torch.algorithms.trial import quantizing

SAMPLES = 8  # that a block is judged on
MODEL_SAMPLES = 16  # that a model is judged on
FEW = 4  # samples below which nothing is said about chance
APART = 8  # samples from which some choose and others judge
SURE = 1.75  # standard errors; a gain that 16 samples show by chance once in twenty times (Student's distribution)
WORTH = 0.98  # part of the error that may be left where samples are few


def surely_lower(after: Sequence[float], before: Sequence[float], sure: float = SURE) -> bool:
    """Whether errors fell by more than chance, sample by sample.

    Args:
        after, before: errors of the same samples.
        sure: standard errors that the mean gain must exceed.
    """
    gains = [old - new for new, old in zip(after, before, strict=True)]
    if len(gains) < FEW:
        return sum(after) <= WORTH * sum(before) and sum(after) < sum(before)
    return fmean(gains) > sure * stdev(gains) / sqrt(len(gains))


def choosing(count: int) -> list[int]:
    """The samples by which changes are chosen: every other one, or all where they are few."""
    return list(range(0, count, 2 if count >= APART else 1))


def judging(count: int) -> list[int]:
    """The samples by which a choice must hold: those between, or all where they are few."""
    return list(range(1 if count >= APART else 0, count, 2 if count >= APART else 1))


@dataclass(frozen=True)
class Ruler:
    """Measures how far the answers of the quantized model are from those of the float one.

    Answers as wide as an embedding's table are scores of words: the mean KL divergence of what they predict, of which
    squared differences say little (a shift of all scores means nothing). Others: the mean squared difference.

    Attributes:
        walk: the float model.
        samples: numbers of samples.
        wanted: what the float model answers to them.
        distance: of two answers.
    """

    walk: Walk
    samples: list[int]
    wanted: list[torch.Tensor]
    distance: Callable[[torch.Tensor, torch.Tensor], float]

    def errors(self, change: Change | None = None) -> tuple[float, ...]:
        """The error of each sample, of the model as it is now or with a change, which is taken back."""
        found = answers(self.walk, self.samples, True, change)
        return tuple(self.distance(x, y) for x, y in zip(found, self.wanted, strict=True))


def ruler(walk: Walk, samples: list[int]) -> Ruler:
    """A ruler for the model as it is now."""
    wanted = answers(walk, samples)
    tables = [module.num_embeddings for module in walk.context.model.modules() if isinstance(module, nn.Embedding)]
    return Ruler(walk, samples, wanted, divergence if wanted and wanted[0].shape[-1] in tables else squared)


def model_error(context: Context) -> Callable[[], float]:
    """A function: how far the answers of the model, quantized as it will be, are from those that it gives now."""
    found = ruler(walk_of(context, ""), list(range(min(MODEL_SAMPLES, len(context.samples)))))
    return lambda: sum(found.errors())


def squared(x: torch.Tensor, y: torch.Tensor) -> float:
    """The mean squared difference."""
    return float((x - y).square().double().mean())


def divergence(x: torch.Tensor, y: torch.Tensor) -> float:
    """The mean KL divergence of the scores ``x`` from the scores ``y``, [rows, words]."""
    p, q = y.double().log_softmax(-1), x.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def better_block(
    context: Context, name: str, block: nn.Module, stream: Stream, samples: list[int], change: Callable[[], None]
) -> bool:
    """Change a block; put its parameters back if its quantized answers are then further from the float ones.

    Args:
        context: the float model.
        name, block, stream: the block and what enters it.
        samples: that judge.
        change: of the parameters of the block, which leaves its float answers as they are.

    Returns:
        Whether the change was kept.
    """
    inside = set(block.modules())
    items = [item for module, item in context.layers().items() if module in inside]
    wanted = [first(stream.forward(name, block, k)) for k in samples]

    def errors() -> list[float]:
        with quantizing(items):
            found = [first(stream.forward(name, block, k)) for k in samples]
        return [squared(x.float(), y.float()) for x, y in zip(found, wanted, strict=True)]

    before, parameters = errors(), {module: dict(module._parameters) for module in block.modules()}
    change()
    if sum(errors()) < sum(before):
        return True
    for module, values in parameters.items():
        module._parameters.update(values)
    return False
