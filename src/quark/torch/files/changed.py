"""Float models changed before they are quantized, for a model that stays in its files: scalings and rotations.

    structure → changes of one block after the other, each into a file → whether the quantized answers got better,
    block by block → what changed, and where it is

The changes are those that a model in memory gets, bit for bit. Memory holds what is outside of the decoder blocks, one
block, and the samples' hidden states. An interrupted job makes the changes anew, from what it had found block by block
(scales and clips, which take the time); a finished one is not done again.

Not handled: SVDQuant, which puts modules beside layers, and is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from quark.algorithms.hadamard import Rotation
from quark.config.plan import Plan
from quark.errors import ConfigError
from quark.files.untrusted import FileName, Schema, own_file, read_state
from quark.files.whole import replace_file
from quark.torch.algorithms.context import Context, Undo
from quark.torch.algorithms.registry import run_algorithms
from quark.torch.calibration import evaluating
from quark.torch.config.algorithms import AlgoConfig
from quark.torch.config.model import QConfig
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.export.shards import is_whole
from quark.torch.files.home import FOUND, InFiles, opened_model
from quark.torch.files.skeleton import DTYPES, StoredSource, read_skeleton
from quark.torch.matching import Matches, find_candidates
from quark.torch.rotated import Dense, online_rotations

log = logging.getLogger(__name__)
NAMES = {dtype: name for name, dtype in DTYPES.items()}
DONE = "changes.json"
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


def changed_model(
    checkpoint: Checkpoint,
    config: QConfig,
    plan: Plan,
    early: Sequence[AlgoConfig],
    folder: Path,
    samples: Iterable[Any] | None,
) -> Changes:
    """Run the algorithms that transform the float model.

    Args:
        checkpoint: whose.
        config, plan: how it is quantized.
        early: the algorithms.
        folder: of this job.
        samples: as ``quantize_model`` takes them.

    Raises:
        ModelError: no decoder blocks, or a parameter that no file has.
    """
    if not early:
        return Changes()
    if (known := read(folder / DONE)) is not None:
        return known
    (folder / FOUND).mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.safetensors"):  # of an interrupted job, whose changes are made anew
        path.unlink()
    skeleton = read_skeleton(checkpoint, buffers=True, eager=config.softmax_quant_spec is not None)
    model, found = skeleton.model, Matches(plan, tuple(find_candidates(skeleton.model)))
    blocks = opened_model(skeleton, checkpoint, getattr(early[0], "model_decoder_layers", None) or "")
    home = InFiles(blocks, model, dict(skeleton.tensors), checkpoint.folder, folder)
    tied = is_tied(model)
    before = outside(home)
    with evaluating(model):
        run_algorithms(early, Context(model, list(samples or ()), found, Undo(), home), tunes=False)
    new = {name: value for name, value in outside(home).items() if value is not before[name]}
    home.tensors.update(home.write(OUTSIDE, {name: value.detach() for name, value in new.items()}))
    moved = {name: stored for name, stored in home.tensors.items() if stored is not skeleton.tensors.get(name)}
    turns = {name: turn for name, _, turn in online_rotations(model) if not isinstance(turn, Dense)}
    changes = Changes(moved, turns, tied and not is_tied(model))
    write(folder / DONE, changes)
    return changes


def is_tied(model: torch.nn.Module) -> bool:
    """Whether the head shares the weight of the embedding."""
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def outside(home: InFiles) -> dict[str, torch.Tensor]:
    """The parameters outside of the blocks, a shared one under each name."""
    inside = tuple(f"{name}." for name in home.blocks)
    named = home.model.named_parameters(remove_duplicate=False)
    return {name: value for name, value in named if not name.startswith(inside)}


class Tensor(Schema):
    """A changed tensor, in a file beside the list."""

    file: FileName
    shape: tuple[Annotated[int, Field(ge=0)], ...] = Field(strict=False)
    dtype: Literal[tuple(DTYPES)]  # type: ignore[valid-type]


class Turn(Schema):
    """A rotation."""

    size: int = Field(ge=1)
    orders: tuple[int, ...] = Field(strict=False)
    signs: tuple[Literal[-1, 1], ...] | None = Field(default=None, strict=False)


class Done(Schema):
    """What the list of changes holds."""

    tensors: dict[str, Tensor]
    turns: dict[str, Turn]
    untied: bool


def write(path: Path, changes: Changes) -> None:
    """The list of changes, which appears when it is whole."""
    tensors = {
        name: Tensor(file=Path(stored.file).name, shape=stored.shape, dtype=NAMES[stored.dtype])
        for name, stored in changes.tensors.items()
    }
    turns = {name: Turn(**asdict(turn)) for name, turn in changes.turns.items()}
    replace_file(path, Done(tensors=tensors, turns=turns, untied=changes.untied).model_dump_json())


def read(path: Path) -> Changes | None:
    """What ``write`` wrote; ``None`` where it is not there, or not whole: then the stage is done again."""
    if not path.is_file():
        return None
    try:
        found = read_state(path, Done, ConfigError)
        places = {name: own_file(path.parent, row.file, ConfigError) for name, row in found.tensors.items()}
    except ConfigError as error:
        log.warning("%s: %s; the changes are made again", path, error)
        return None
    if not all(map(is_whole, set(places.values()))):
        return None
    tensors = {
        name: StoredSource(str(places[name]), name, row.shape, DTYPES[row.dtype]) for name, row in found.tensors.items()
    }
    turns = {name: Rotation(row.size, row.orders, row.signs) for name, row in found.turns.items()}
    return Changes(tensors, turns, found.untied)


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
