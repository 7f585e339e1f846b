"""Which change of a float model makes its quantized answers better, and whether one does.

Each sample is compared with itself, by the test of both flows (``quark.measure.gain``). Several changes are tried, so
that the best of them may be a lucky one: beside others that do nothing but round weights differently the best is a gain
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.measure.outputs import scores_apart, shares, squared
from quark.torch.algorithms.answers import BlockWalk, Change, answers, exit_of, walk_of
from quark.torch.algorithms.context import ModelContext

MODEL_SAMPLES = 32  # that a model is judged on


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


def output_distance(walk: BlockWalk, handed_on: Sequence[torch.Tensor] = ()) -> OutputDistance:
    """That of the model as it is now.

    Args:
        walk: the model.
        handed_on: what its last block makes of each sample, where that is known.
    """
    samples = list(range(min(MODEL_SAMPLES, len(walk.context.samples))))
    known = walk.blocks.path and len(handed_on) >= len(samples)
    wanted = [exit_of(walk, k, handed_on[k]) for k in samples] if known else answers(walk, samples)
    tables = [module.num_embeddings for module in walk.context.model.modules() if isinstance(module, nn.Embedding)]
    words = any(first.shape[-1] in tables for first in wanted[0][:1]) if wanted else False
    single = all(len(found) == 1 for found in wanted)
    return OutputDistance(walk, samples, wanted, scores_apart if words else squared if single else shares)


def model_error(context: ModelContext) -> Callable[[], float]:
    """A function: how far the answers of the model, quantized as it will be, are from those that it gives now."""
    found = output_distance(walk_of(context, ""))
    return lambda: sum(found.errors())


def change_all(walk: BlockWalk, change: Change) -> None:
    """Make a change in every part of the model."""
    for part in walk.parts:
        with walk.context.store.changing(part, walk.context.undo):
            change(walk.context, part)
