"""The walk of an algorithm over decoder blocks, with what enters each; an interrupted job goes on where it was."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from quark.torch.algorithms.blocks import Blocks, Stream
from quark.torch.algorithms.context import BlockStore

Again = Callable[[], None] | None
Work = Callable[[str, nn.Module, list[Stream], Again], list[Stream]]


def walk(
    store: BlockStore,
    blocks: Blocks,
    streams: list[Stream],
    work: Work,
    update: Callable[[int, int], None] | None = None,
) -> None:
    """Work on one block after the other.

    Args:
        store: of the blocks; it keeps what the last one handed on, so that blocks that are done are not run again.
        blocks: in order.
        streams: what enters the first one.
        work: gets name, block, what enters it, and what makes the block what an interrupted job made of it, if one did;
            returns what comes behind it.
        update: hears how many blocks are done, and of how many.
    """
    notes = store.passing()
    before, kept = notes.read()
    for done, (name, block) in enumerate(blocks.modules.items()):
        if update is not None:
            update(done, len(blocks.modules))
        if done < before:
            streams = [stream.behind(name, hidden) for stream, hidden in zip(streams, kept, strict=True)]
            continue
        with store.holding(name, block) as again:
            streams = work(name, block, streams, again)
        notes.write(done + 1, [stream.hidden for stream in streams])
    notes.forget()
