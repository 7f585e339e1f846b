"""``BlocksInFiles``: decoder blocks that are in files when it is not their turn, and so are float changes of them.

A changed parameter gets a file of its block's changes, and from then on is read from there; what it was is still where
it was, so that changes are taken back by forgetting their files.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from quark.config.plan import Plan
from quark.dataclass import dataclass
from quark.errors import ModelError
from quark.files.journal import Journal
from quark.torch.algorithms.blocks import find_blocks
from quark.torch.algorithms.context import BlockNotes, BlockStore, StreamNotes, Undo
from quark.torch.config.model import QConfig
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.export.shards import item_of, write_file
from quark.torch.files.skeleton import Skeleton, StoredSource, read_skeleton
from quark.torch.matching import Matches, find_candidates
from quark.torch.quantized_layer import forget_quantized

SIZES = "blocks done, streams, samples"


@dataclass(frozen=True)
class BlockNotesInJournal(BlockNotes):
    """Tensors that are an entry of a job's journal.

    Attributes:
        journal: of the job.
        key: of the entry.
        device: that they are read to.
    """

    journal: Journal
    key: str
    device: str = "cpu"

    def read(self) -> dict[str, torch.Tensor] | None:
        """Those of an interrupted job."""
        path = self.journal.file(self.key)
        return None if path is None else load_file(path, self.device)

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Keep tensors."""
        kept(self.journal, self.key, values)


@dataclass(frozen=True)
class StreamNotesInJournal(StreamNotes):
    """Hidden states that are one entry of a job's journal, which the next ones replace.

    Attributes:
        journal: of the job.
        key: of the entry.
    """

    journal: Journal
    key: str

    def read(self) -> tuple[int, list[list[torch.Tensor]]]:
        """Those of an interrupted job."""
        path = self.journal.file(self.key)
        if path is None:
            return super().read()
        values = load_file(path)
        done, count, samples = values.pop(SIZES).tolist()
        return done, [[values[f"{stream}.{k}"] for k in range(samples)] for stream in range(count)]

    def write(self, done: int, streams: Sequence[list[torch.Tensor]]) -> None:
        """Keep hidden states, where a file can give them back as they lie in memory; else none are."""
        values = {f"{number}.{k}": value for number, stream in enumerate(streams) for k, value in enumerate(stream)}
        if values and all(value.is_contiguous() for value in values.values()):
            sizes = torch.tensor([done, len(streams), len(streams[0])])
            kept(self.journal, self.key, {SIZES: sizes, **values})

    def forget(self) -> None:
        """Remove the entry."""
        self.journal.forget(self.key)


def kept(journal: Journal, key: str, values: Mapping[str, torch.Tensor]) -> Path:
    """The file of a new entry of a journal, which holds ``values``."""
    items = [item_of(name, value.contiguous()) for name, value in values.items()]
    path = journal.finish_file(key, lambda part: write_file(part, items))
    if path is None:
        raise ValueError("a job on files has a journal in its folder")
    return path


@dataclass(frozen=True)
class BlocksInFiles(BlockStore):
    """Blocks that are read when they are needed.

    Attributes:
        blocks: by name.
        model: of which they are.
        tensors: of the checkpoint, by the names in memory; changed ones are in files of ``journal``.
        source: folder of the checkpoint.
        journal: of the job, which keeps changes.
        device: that blocks are read to.
        keys: of the journal's entries that hold changed tensors, by the path of their file.
        asked: the blocks of which something was to be kept, in order.
        walks: whose hidden states were to be kept, in order.
    """

    blocks: Mapping[str, nn.Module]
    model: nn.Module
    tensors: dict[str, StoredSource]
    source: Path
    journal: Journal
    device: str = "cpu"
    keys: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    walks: list[StreamNotes] = field(default_factory=list)

    @property
    def host(self) -> bool:
        """Hidden states of all samples would fill a device."""
        return torch.device(self.device).type != "cpu"

    def own(self, name: str) -> list[str]:
        """The tensors of a block."""
        return [tensor for tensor in self.tensors if tensor.startswith(f"{name}.")]

    def load(self, name: str) -> None:
        """Read a block."""
        load(self.model, self.own(name), self.tensors, self.source, self.device)

    def drop(self, name: str) -> None:
        """Forget a block."""
        drop(self.model, self.own(name))
        give_back_memory()

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
        self.tensors.update(self.write(name, values))

    def write(self, name: str, values: Mapping[str, torch.Tensor]) -> dict[str, StoredSource]:
        """A new file of changed tensors; where each is then."""
        if not values:
            return {}
        entry = f"change {len(self.keys)}, of {name}"
        path = kept(self.journal, entry, values)
        self.keys[str(path)] = entry
        return {key: StoredSource(str(path), key, tuple(value.shape), value.dtype) for key, value in values.items()}

    def known(self, name: str) -> BlockNotes:
        """What an algorithm finds out about a block, in an entry that is named by when it was asked for."""
        self.asked.append(name)
        return BlockNotesInJournal(self.journal, f"found {len(self.asked)}, of {name}", self.device)

    def passing(self) -> StreamNotes:
        """Hidden states in an entry that is named by when it was asked for."""
        key = f"hidden states, {type(self).__name__} {len(self.walks)}"
        self.walks.append(StreamNotesInJournal(self.journal, key))
        return self.walks[-1]


@dataclass(frozen=True)
class RunInFiles:
    """What a run of samples over a checkpoint needs that stays in its files.

    Attributes:
        checkpoint: whose tensors are read, block by block.
        config, plan: how it is quantized.
        journal: of the job, with what is finished.
        samples: as ``quantize_model`` takes them.
        device: where blocks run, and what is outside of them.
        workers: that share the work on a block.
    """

    checkpoint: Checkpoint
    config: QConfig
    plan: Plan
    journal: Journal
    samples: Sequence[Any] = ()
    device: str = "cpu"
    workers: int | None = 1

    def opened(self) -> tuple[Skeleton, Matches]:
        """The model without weights, and its quantized layers."""
        skeleton = read_skeleton(self.checkpoint, buffers=True, eager=self.config.softmax_quant_spec is not None)
        return skeleton, Matches(self.plan, tuple(find_candidates(skeleton.model)))


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a tensor, and the tensor's name there."""
    path, _, last = name.rpartition(".")
    try:
        return model.get_submodule(path), last
    except AttributeError as error:
        raise ModelError(f"the checkpoint has the tensor {name!r}, for which the model has no module") from error


def load(
    model: nn.Module, names: Iterable[str], tensors: Mapping[str, StoredSource], folder: Path, device: str = "cpu"
) -> None:
    """Give parameters and buffers the values of the files, on ``device``."""
    for name in names:
        owner, last = owner_of(model, name)
        value = tensors[name].read(folder).to(device)
        if last in owner._buffers:
            owner._buffers[last] = value
        else:
            owner._parameters[last] = nn.Parameter(value, requires_grad=False)


def move_buffers(model: nn.Module, device: str) -> None:
    """Those that have values are on ``device`` then; parameters stay where they are, most of them without values."""
    for module in model.modules():
        for name, value in module._buffers.items():
            if value is not None and not value.is_meta:
                module._buffers[name] = value.to(device)


def drop(model: nn.Module, names: Iterable[str]) -> None:
    """Take the values away again."""
    for name in names:
        owner, last = owner_of(model, name)
        value = owner._parameters.get(last)
        if value is not None:
            owner._parameters[last] = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)
        forget_quantized([owner])


def check_loaded(model: nn.Module, inside: tuple[str, ...]) -> None:
    """Everything outside the blocks has values."""
    named = [*model.named_parameters(), *model.named_buffers()]
    missing = [name for name, value in named if value.is_meta and not name.startswith(inside)]
    if missing:
        raise ModelError(f"the checkpoint has no tensor {missing[0]!r}, which the model needs to run")


def give_back_memory() -> None:
    """Have the C library return what is free: glibc keeps a block's worth of freed tensors for every block."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries have none, and keep less
        if trim is not None:
            trim(0)


def opened_model(skeleton: Skeleton, job: RunInFiles, path: str = "") -> Mapping[str, nn.Module]:
    """Give everything outside of the decoder blocks its values, on the job's device.

    Args:
        skeleton: with values in its buffers (``read_skeleton(..., buffers=True)``).
        job: whose.
        path: where the blocks are; empty: found.

    Returns:
        The blocks.

    Raises:
        ModelError: no decoder blocks, or a parameter that no file has.
    """
    model = skeleton.model
    blocks = find_blocks(model, path)
    if not blocks.path:
        raise ModelError("the checkpoint has no decoder blocks, which are run one by one in files")
    inside = tuple(f"{name}." for name in blocks.modules)
    outside = [name for name in skeleton.tensors if not name.startswith(inside)]
    move_buffers(model, job.device)
    load(model, outside, skeleton.tensors, job.checkpoint.folder, job.device)
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    check_loaded(model, inside)
    return blocks.modules
