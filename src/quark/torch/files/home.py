"""``InFiles``: decoder blocks that are in files when it is not their turn, and so are float changes of them.

A changed parameter gets a file of its block's changes, and from then on is read from there; what it was is still where
it was, so that changes are taken back by forgetting their files.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from quark.errors import ModelError
from quark.files.whole import part_of
from quark.torch.algorithms.blocks import find_blocks
from quark.torch.algorithms.context import BlockNotes, Home, Undo
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.export.shards import is_whole, item_of, write_file
from quark.torch.files.skeleton import Skeleton, StoredSource
from quark.torch.files.static import check_loaded, drop, load

FOUND = "found"  # a folder of what was found out about blocks


@dataclass(frozen=True)
class BlockNotesInFile(BlockNotes):
    """Tensors in a file that appears when it is whole.

    Attributes:
        path: of the file.
    """

    path: Path

    def read(self) -> dict[str, torch.Tensor] | None:
        """Those of an interrupted job."""
        return load_file(self.path) if is_whole(self.path) else None

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Keep tensors."""
        with part_of(self.path) as part:
            write_file(part, [item_of(name, value.contiguous()) for name, value in values.items()])


@dataclass(frozen=True)
class InFiles(Home):
    """Blocks that are read when they are needed.

    Attributes:
        blocks: by name.
        model: of which they are.
        tensors: of the checkpoint, by the names in memory; changed ones are those of ``folder``.
        source: folder of the checkpoint.
        folder: where changes are kept.
        replaced: what changed tensors were, by the ``Undo`` that takes them back.
        files: names of the files of changes.
        asked: the blocks of which something was to be kept, in order.
    """

    blocks: Mapping[str, nn.Module]
    model: nn.Module
    tensors: dict[str, StoredSource]
    source: Path
    folder: Path
    replaced: dict[int, dict[str, StoredSource]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def own(self, name: str) -> list[str]:
        """The tensors of a block."""
        return [tensor for tensor in self.tensors if tensor.startswith(f"{name}.")]

    def load(self, name: str) -> None:
        """Read a block."""
        load(self.model, self.own(name), self.tensors, self.source)

    def drop(self, name: str) -> None:
        """Forget a block."""
        drop(self.model, self.own(name))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Blocks are read when they are called."""
        with ExitStack() as undo:
            for name, block in self.blocks.items():
                before = block.register_forward_pre_hook(lambda *_, name=name: self.load(name))
                after = block.register_forward_hook(lambda *_, name=name: self.drop(name), always_call=True)
                undo.callback(before.remove)
                undo.callback(after.remove)
            yield

    @contextmanager
    def visiting(self, name: str) -> Iterator[None]:
        """A block with values."""
        self.load(name)
        try:
            yield
        finally:
            self.drop(name)

    @contextmanager
    def changing(self, name: str, undo: Undo) -> Iterator[None]:
        """A block with values, whose changes are kept in a file; what ``undo`` holds of it goes with it."""
        if not name:
            yield
            return
        known = len(undo.actions)
        with self.visiting(name):
            yield
            self.keep(name, undo)
        inside = {id(module) for module in self.blocks[name].modules()}
        undo.seen.difference_update({key for key in undo.seen if key[0] in inside})
        del undo.actions[known:]
        give_back_memory()

    def keep(self, name: str, undo: Undo) -> None:
        """The changed parameters of a block into a file."""
        values = {
            f"{name}.{path}.{key}" if path else f"{name}.{key}": value.detach()
            for path, module in self.blocks[name].named_modules()
            for key, value in module._parameters.items()
            if value is not None and (id(module), key) in undo.seen
        }
        before = self.replaced.setdefault(id(undo), {})
        for key, stored in self.write(name, values).items():
            before.setdefault(key, self.tensors[key])
            self.tensors[key] = stored

    def write(self, name: str, values: Mapping[str, torch.Tensor]) -> dict[str, StoredSource]:
        """A new file of changed tensors, which appears when it is whole; where each is then."""
        if not values:
            return {}
        path = self.folder / f"{len(self.files)}.{name}.safetensors"
        with part_of(path) as part:
            write_file(part, [item_of(key, value.contiguous()) for key, value in values.items()])
        self.files.append(path.name)
        return {key: StoredSource(str(path), key, tuple(value.shape), value.dtype) for key, value in values.items()}

    def known(self, name: str) -> BlockNotes:
        """What an algorithm finds out about a block, in a file that is named by when it was asked for."""
        self.asked.append(name)
        return BlockNotesInFile(self.folder / FOUND / f"{len(self.asked)}.{name}.safetensors")

    def put_back(self, undo: Undo) -> None:
        """Forget the files of changes."""
        self.tensors.update(self.replaced.pop(id(undo), {}))
        undo.restore()


def give_back_memory() -> None:
    """Have the C library return what is free: glibc keeps a block's worth of freed tensors for every block."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries have none, and keep less
        if trim is not None:
            trim(0)


def opened_model(skeleton: Skeleton, checkpoint: Checkpoint, path: str = "") -> Mapping[str, nn.Module]:
    """Give everything outside of the decoder blocks its values.

    Args:
        skeleton: with values in its buffers (``read_skeleton(..., buffers=True)``).
        checkpoint: whose.
        path: where the blocks are; empty: found.

    Returns:
        The blocks.

    Raises:
        ModelError: no decoder blocks, or a parameter that no file has.
    """
    model = skeleton.model
    blocks = find_blocks(model, path)
    if not blocks.path:
        raise ModelError("the checkpoint has no decoder blocks, which algorithms work on one by one in files")
    inside = tuple(f"{name}." for name in blocks.modules)
    outside = [name for name in skeleton.tensors if not name.startswith(inside)]
    load(model, outside, skeleton.tensors, checkpoint.folder)
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    check_loaded(model, inside)
    return blocks.modules
