"""``ModelContext``: what an algorithm is handed, and ``Undo``: what it takes to leave a model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import field
from typing import Any

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.torch.calibration import disabled
from quark.torch.fake_quantize import Quantizer, make_quantizer
from quark.torch.layers import LayerKind, own_parameter
from quark.torch.matching import Match, Matches
from quark.torch.prepare import quantizer_of
from quark.torch.quantized_layer import forget_quantized


@dataclass
class Undo:
    """What a model held before algorithms changed it; each thing is remembered the first time it is changed.

    Attributes:
        actions: what puts the old things back, newest last.
        seen: which parameters are remembered.
    """

    actions: list[Callable[[], None]] = field(default_factory=list)
    seen: set[tuple[int, str]] = field(default_factory=set)

    def set_parameter(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        """Give ``module`` a parameter of its own (a tied one is untied) with ``value``, in the old one's type."""
        old = module._parameters[name]
        if (id(module), name) not in self.seen:
            self.seen.add((id(module), name))
            self.actions.append(lambda: module._parameters.__setitem__(name, old))
        value = value.detach() if old is None else value.detach().to(old.device, old.dtype)
        module._parameters[name] = nn.Parameter(value, requires_grad=old is not None and old.requires_grad)
        forget_quantized([module])

    def restore(self) -> None:
        """Put everything back."""
        while self.actions:
            self.actions.pop()()
        self.seen.clear()


class BlockNotes:
    """What was found out about a block, kept for a job that is interrupted; in memory nothing is."""

    def read(self) -> dict[str, torch.Tensor] | None:
        """The tensors of an interrupted job; None: there are none."""
        return None

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Keep tensors."""


class StreamNotes:
    """What blocks that are done hand on, kept for a job that is interrupted; in memory nothing is."""

    def read(self) -> tuple[int, list[list[torch.Tensor]]]:
        """How many blocks an interrupted job has behind it, and what the last of them made: streams of samples."""
        return 0, [[]]

    def write(self, done: int, streams: Sequence[list[torch.Tensor]]) -> None:
        """Keep what the first ``done`` blocks hand on, in place of what was kept before."""

    def forget(self) -> None:
        """Nothing of it is needed any more."""


class BlockStore:
    """Where decoder blocks are when it is not their turn: in memory; here next to nothing is to be done."""

    @property
    def host(self) -> bool:
        """Whether hidden states wait in the host's memory and not on the device of the blocks."""
        return False

    def recording(self) -> AbstractContextManager[None]:
        """Around runs of the whole float model."""
        return nullcontext()

    def visiting(self, name: str) -> AbstractContextManager[None]:
        """Around work on one block that leaves it as it is."""
        return nullcontext()

    def changing(self, name: str, undo: Undo) -> AbstractContextManager[None]:
        """Around changes of the float parameters of one block, which go through ``undo``."""
        return nullcontext()

    def known(self, name: str) -> BlockNotes:
        """What an algorithm finds out about one block; asked in the same order by every run of a job."""
        return BlockNotes()

    def passing(self) -> StreamNotes:
        """What hidden states of one walk over all blocks are kept in; asked in the same order by every run of a job."""
        return StreamNotes()

    def holding(self, name: str, block: nn.Module) -> AbstractContextManager[Callable[[], None] | None]:
        """Around the work on one block, which is float at first; yields what makes it what an interrupted job made."""
        return nullcontext()


@dataclass(frozen=True)
class ModelContext:
    """A model on its way.

    Attributes:
        model: the model, in ``eval()``.
        samples: what it is calibrated with.
        found: which layer becomes what.
        undo: through which every change goes.
        store: of the decoder blocks.
        workers: that share the work on a block, by joblib; None: as its ``parallel_config`` says.
    """

    model: nn.Module
    samples: list[Any]
    found: Matches
    undo: Undo
    store: BlockStore = field(default_factory=BlockStore)
    workers: int | None = None

    def layers(self) -> dict[nn.Module, Match]:
        """The layers whose weight is quantized and which multiply rows of features by a matrix (Linear, Conv1D)."""
        return {
            item.layer.module: item for item in self.found.quantized if item.layer.kind.tokens and item.stages["weight"]
        }


def matrix(module: nn.Module, kind: LayerKind) -> torch.Tensor:
    """The weight as float32 [out, in]; a copy, or a view of a float32 weight."""
    weight = own_parameter(module).detach().float()
    return weight.T if kind.transposed else weight


def set_matrix(context: ModelContext, item: Match, value: torch.Tensor) -> None:
    """Give a layer the weight ``value`` [out, in]."""
    stored = value.T.contiguous() if item.layer.kind.transposed else value
    context.undo.set_parameter(item.layer.module, "weight", stored)


def new_quantizer(item: Match, slot: str) -> Quantizer | None:
    """A fresh quantizer for one tensor of a layer, not attached, whose scales nobody learns."""
    return quantizer_of(item, slot, make_quantizer)


@contextmanager
def float_weights(context: ModelContext) -> Iterator[None]:
    """The weights of the layers that algorithms tune are multiplied as they are; activations stay quantized."""
    layers = list(context.layers())
    weights = [layer._modules["weight_quantizer"] for layer in layers]
    try:
        with disabled(weight for weight in weights if weight is not None):
            forget_quantized(layers)
            yield
    finally:
        forget_quantized(layers)
