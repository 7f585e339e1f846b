"""Float models changed before they are quantized, for a model that stays in its files: scalings and rotations.

    structure → changes of one block after the other, each into a file → whether the quantized answers got better,
    block by block → what changed, and where it is

The changes are those that a model in memory gets, bit for bit. Memory holds what is outside of the decoder blocks, one
block, and the samples' hidden states. An interrupted job makes the changes anew, from what it had found block by block
(scales and clips, which take the time); a finished one is not done again.

Not handled: SVDQuant, which puts modules beside layers, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field

from quark.algorithms.hadamard import Rotation
from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.files.journal import Journal
from quark.torch.algorithms.context import ModelContext, Undo
from quark.torch.algorithms.registry import run_algorithms
from quark.torch.calibration import evaluating
from quark.torch.config.algorithms import AlgoConfig
from quark.torch.export.checkpoint import opened
from quark.torch.files.block_files import BlocksInFiles, RunInFiles, opened_model
from quark.torch.files.skeleton import DTYPES, StoredSource
from quark.torch.rotated import Dense, online_rotations

UNTIED = "the head is untied"  # the entry that is kept last
OUTSIDE = "outside"


@dataclass(frozen=True)
class Changes:
    """What became of the float model.

    Attributes:
        tensors: where changed tensors are, by their names in memory; perhaps new ones (a head that was tied).
        turns: of layers whose inputs are turned online, by name.
        untied: the head no longer shares the embedding's weight.
    """

    tensors: Mapping[str, StoredSource] = field(default_factory=dict)
    turns: Mapping[str, Rotation] = field(default_factory=dict)
    untied: bool = False


def changed_model(job: RunInFiles, early: Sequence[AlgoConfig]) -> Changes:
    """Run the algorithms that transform the float model.

    Raises:
        ModelError: no decoder blocks, or a parameter that no file has.
        ConfigError: the journal is damaged.
    """
    if not early:
        return Changes()
    if (known := known_changes(job.journal)) is not None:
        return known
    skeleton, found = job.opened()
    model = skeleton.model
    blocks = opened_model(skeleton, job, getattr(early[0], "model_decoder_layers", None) or "")
    store = BlocksInFiles(blocks, model, dict(skeleton.tensors), job.checkpoint.folder, job.journal, job.device)
    tied = is_tied(model)
    before = outside(store)
    with evaluating(model):
        run_algorithms(early, ModelContext(model, list(job.samples), found, Undo(), store, job.workers), tunes=False)
    new = {name: value for name, value in outside(store).items() if value is not before[name]}
    store.tensors.update(store.write(OUTSIDE, {name: value.detach() for name, value in new.items()}))
    moved = {name: stored for name, stored in store.tensors.items() if stored is not skeleton.tensors.get(name)}
    turns = {name: turn for name, _, turn in online_rotations(model) if not isinstance(turn, Dense)}
    changes = Changes(moved, turns, tied and not is_tied(model))
    keep(job.journal, changes, store.keys)
    return changes


def is_tied(model: torch.nn.Module) -> bool:
    """Whether the head shares the weight of the embedding."""
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def outside(store: BlocksInFiles) -> dict[str, torch.Tensor]:
    """The parameters outside of the blocks, a shared one under each name."""
    inside = tuple(f"{name}." for name in store.blocks)
    named = store.model.named_parameters(remove_duplicate=False)
    return {name: value for name, value in named if not name.startswith(inside)}


def keep(journal: Journal, changes: Changes, keys: Mapping[str, str]) -> None:
    """Changes as entries of a journal; ``keys``: of the files with the tensors. The last one says that they are all."""
    journal.finish("changed tensors", {name: keys[stored.file] for name, stored in changes.tensors.items()})
    journal.finish("turns", {name: [turn.size, *turn.orders] for name, turn in changes.turns.items()})
    signs = {name: list(turn.signs) for name, turn in changes.turns.items() if turn.signs is not None}
    journal.finish("signs of turns", signs)
    journal.finish(UNTIED, int(changes.untied))


def known_changes(journal: Journal) -> Changes | None:
    """What ``keep`` kept; ``None`` where the changes are still to be made.

    Raises:
        ConfigError: the journal holds something else there.
    """
    untied = journal.done(UNTIED, Literal[0, 1])
    if untied is None:
        return None
    keys = journal.done("changed tensors", dict[str, str])
    files = {key: journal.file(key) for key in set(keys.values())}
    tensors = {name: stored_in(files[key], name) for name, key in keys.items()}
    signs = journal.done("signs of turns", dict[str, list[Literal[-1, 1]]])
    turns = {
        name: Rotation(size, tuple(orders), tuple(signs[name]) if name in signs else None)
        for name, (size, *orders) in journal.done("turns", dict[str, Annotated[list[int], Field(min_length=1)]]).items()
    }
    return Changes(tensors, turns, bool(untied))


def stored_in(path: Path | None, name: str) -> StoredSource:
    """A tensor of a file, by its header."""
    if path is None:
        raise ConfigError(f"the journal of the job has no file for {name!r}; delete the folder, and begin anew")
    with opened(path) as file:
        part = file.get_slice(name)
        return StoredSource(str(path), name, tuple(part.get_shape()), DTYPES[part.get_dtype()])


def homes(changes: Changes, tensors: Mapping[str, StoredSource]) -> dict[str, StoredSource]:
    """The tensors of a checkpoint and the new ones, each with the file that it will be in.

    A head that was tied comes into the file of the embedding.
    """
    new = [name for name in changes.tensors if name not in tensors]
    shared = next((stored for stored in tensors.values() if new and len(stored.shape) == 2), None)
    return {
        **tensors,
        **{name: replace(changes.tensors[name], file=shared.file) for name in new if shared is not None},
    }
