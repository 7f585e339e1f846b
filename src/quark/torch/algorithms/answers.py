"""What a model answers, with one decoder block in memory at a time, and with changes that are tried out on the way.

    embedding and what else is in front → block by block, on all samples → norm and head

In front of the blocks and behind them the model's own forward runs, with blocks that hand on what enters; the last one
hands on what the real blocks made. That the answer of the first sample is then the model's own is checked; a model for
which it is not, and one without decoder blocks, runs as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.errors import known
from quark.torch.algorithms.blocks import Blocks, Stream, equal_arguments, find_blocks, handing_on, record, recorded
from quark.torch.algorithms.context import ModelContext, Undo
from quark.torch.algorithms.trial import quantizing
from quark.torch.calibration import without_cache
from quark.torch.matching import Match
from quark.torch.outputs import tensors_of
from quark.torch.short_sample import kinds
from quark.torch.structure import run_model

log = logging.getLogger(__name__)
ROWS = 256  # of each answer of a model that are compared, at most
VALUES = 1 << 20  # of each answer that are compared, or a few rows: vocabularies are wide
Change = Callable[[ModelContext, str], None]  # of one block, or ("") of what is in none


@dataclass(frozen=True)
class BlockWalk:
    """A float model, and what runs through it.

    Attributes:
        context: the model.
        blocks: its decoder blocks; the model itself under the name "" where there are none.
        stream: in front of the first block.
    """

    context: ModelContext
    blocks: Blocks
    stream: Stream

    @property
    def items(self) -> list[Match]:
        """The layers whose weights are quantized."""
        return [item for item in self.context.found.quantized if item.stages["weight"]]

    def inside(self, block: nn.Module) -> list[Match]:
        """Those of a block."""
        modules = set(block.modules())
        return [item for item in self.items if item.layer.module in modules]

    @property
    def outside(self) -> list[Match]:
        """Those in no block."""
        modules = {module for block in self.blocks.modules.values() for module in block.modules()}
        return [item for item in self.items if item.layer.module not in modules]

    @property
    def parts(self) -> list[str]:
        """What is changed one by one: all that is in no block (""), then the blocks."""
        return ["", *self.blocks.modules] if self.blocks.path else [""]


def walk_of(context: ModelContext, path: str) -> BlockWalk:
    """The blocks of a model, and what enters them.

    Args:
        context: the float model, with samples.
        path: where the blocks are; empty: found.
    """
    blocks, stream = record(context.model, find_blocks(context.model, path), context.samples, context.store)
    walk, chosen = BlockWalk(context, blocks, stream), kinds(context.samples)
    with context.store.recording():
        wanted = [rows_of(run_model(context.model, context.samples[k])) for k in chosen]
    if blocks.path and not equal_arguments(answers(walk, chosen), wanted):
        log.info("%r are not all that computes in the model; it runs as a whole", blocks.path)
        return BlockWalk(context, Blocks("", {"": context.model}), Stream(list(context.samples)))
    return walk


@torch.no_grad()
def answers(
    walk: BlockWalk, samples: list[int], quantized: bool = False, change: Change | None = None
) -> list[list[torch.Tensor]]:
    """Rows of every answer of the model to some samples.

    Args:
        walk: the model.
        samples: numbers of samples.
        quantized: as the model will be when it is quantized; False: as it is.
        change: makes the changes of one part of the model; they are taken back.
    """
    context = walk.context
    with changed(context, change, ""):
        if not walk.blocks.path:
            with quantizing(walk.items if quantized else []):
                return [rows_of(run_model(context.model, context.samples[k])) for k in samples]
        given = [context.samples[k] for k in samples]
        entering = recorded(context.model, walk.blocks, given, walk.stream.host, walk.stream.values)
        stream = replace(walk.stream.of(samples), hidden=known(entering, "a chain of blocks").hidden)
        for name, block in walk.blocks.modules.items():
            inside = walk.inside(block) if quantized else []
            with context.store.visiting(name), changed(context, change, name), quantizing(inside):
                hidden = [stream.handed_on(name, block, k) for k in range(len(samples))]
            stream = replace(stream, hidden=hidden)
        with quantizing(walk.outside if quantized else []):
            return [exit_of(walk, k, hidden) for k, hidden in zip(samples, stream.hidden, strict=True)]


@contextmanager
def changed(context: ModelContext, change: Change | None, part: str) -> Iterator[None]:
    """A part of the model with a change, which is taken back."""
    undo = Undo()
    try:
        if change is not None:
            change(replace(context, undo=undo), part)
        yield
    finally:
        undo.restore()


def exit_of(walk: BlockWalk, sample: int, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Rows of the model's answers where its last block hands on ``hidden``."""
    model = walk.context.model
    hidden = walk.stream.called(hidden, model)
    with handing_on(walk.blocks.modules.values(), walk.stream.values, lambda: hidden), without_cache(model):
        return rows_of(run_model(model, walk.context.samples[sample]))


def rows_of(output: Any) -> list[torch.Tensor]:
    """Some rows of every answer."""
    return [some_rows(tensor) for tensor in tensors_of(output) if tensor.numel()]


def some_rows(output: torch.Tensor) -> torch.Tensor:
    """Up to ``ROWS`` rows of an answer, evenly spread; float32."""
    rows = output.detach().reshape(-1, output.shape[-1]) if output.dim() else output.detach().reshape(1, 1)
    count = min(ROWS, max(ROWS // 16, VALUES // max(rows.shape[1], 1)))
    return rows[:: max(1, -(-len(rows) // count))].float().clone()
