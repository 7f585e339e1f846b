"""QuaRot: Hadamard rotations spread outliers over all channels (Ashkboos et al. 2024).

    R1  the residual stream: what writes to it is turned, what reads it turned back; norms hand their weight on first
    R2  values, head by head: value projections turned, output projections turned back
    R4  the inputs of down projections: turned when the model runs, the weights turned beforehand
    online R1  as R4, for every layer that reads a norm: needs nothing of the norm or of what writes

Readers, writers and channels are found from the model (``quark.torch.structure``). Whatever was turned, the model must
then answer what it answered before: a model whose residual stream is read or written elsewhere (norms behind the
attention, LayerNorm, which subtracts a mean that is not turned with it) is refused, with what would work. A model
without outliers may lose by being turned: turn by turn, a few choices of signs (randomized Hadamard matrices, as in the
paper) and sizes of blocks are tried, and the best is kept where it makes the quantized answers better by more than
chance (``only_if_better``, ``guard``).

The model is worked on in parts: what is in no decoder block, and block by block. A turn that is tried is made and taken
back in each part as the samples pass it.

R3, queries and keys behind the rotary embedding, only serves caches and is theirs (``quark.torch.kv_cache``).

Not handled: trained rotations.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quark.algorithms.hadamard import Rotation, rotation
from quark.dataclass import dataclass
from quark.errors import ConfigError, ModelError
from quark.measure.guard import best_of
from quark.torch.algorithms.answers import BlockWalk, Change, answers, walk_of
from quark.torch.algorithms.context import ModelContext
from quark.torch.algorithms.guard import change_all, output_distance
from quark.torch.config.algorithms import RotationConfig
from quark.torch.layers import is_transposed, kind_of, own_parameter
from quark.torch.probe import CLOSE, all_equal
from quark.torch.rotated import attach_rotation, detach_rotation
from quark.torch.short_sample import example
from quark.torch.structure import LayerPair, NormGroup, Structure, find_structure

log = logging.getLogger(__name__)
SEEDS = (0, 2, 3)  # of signs; 0: the rotation of the configuration
SIZES = (64, 32)  # of blocks, tried beside whole rotations
ROUNDINGS = 8  # of the type of the weights, by which the answers of a turned model may differ
TURNS = ("r1", "r2", "r4")


@dataclass(frozen=True)
class Turns:
    """Rotations of a model.

    Attributes:
        config: which.
        structure: of the model.
        seed: of the signs of offline turns; 0: as configured.
    """

    config: RotationConfig
    structure: Structure
    seed: int = 0

    def of(self, name: str) -> str:
        """The part of the model that a module is in: a block, or "" outside."""
        return next((block for block in self.structure.names if name.startswith(f"{block}.")), "")

    def make(self, context: ModelContext, part: str) -> None:
        """Turn one part of the model.

        Raises:
            ModelError: what is to be turned is not there.
            ConfigError: a size that does not fit.
        """
        if self.config.r1 and self.config.online_r1_rotation:
            turn_readers(context, self, part)
        elif self.config.r1:
            turn_residual(context, self, part)
        if self.config.r2:
            turn_values(context, self, part)
        if self.config.r4:
            turn_down(context, self, part)


@torch.no_grad()
def run_rotation(context: ModelContext, config: RotationConfig) -> None:
    """Rotate ``context.model``; with ``only_if_better``, by the turns that make its quantized answers better.

    Raises:
        ModelError: the model would not compute the same.
    """
    if not (config.r1 or config.r2 or config.r4):
        return  # r3 belongs to the cache's quantizers
    given = context.samples
    context = replace(context, samples=given or [example(context.model)])
    structure = find_structure(context.model, context.samples[0], config.model_decoder_layers, context.store)
    walk = walk_of(context, config.model_decoder_layers)
    kept = [Turns(config, structure)]
    check(walk, kept)
    if given and config.only_if_better:
        kept = worthwhile(walk, candidates(config, structure))
        names = ", ".join(described(turns) for turns in kept)
        if names:
            log.info("rotation: %s kept; other turns would not make the quantized answers better", names)
        else:
            log.warning("rotation: the model stays as it was; no turn makes its quantized answers better than chance")
    if kept:
        change_all(walk, together(kept))


def described(turns: Turns) -> str:
    """A turn in a word."""
    name = "".join(name for name in TURNS if getattr(turns.config, name))
    return f"{name} (blocks of {turns.config.rotation_size})" if turns.config.rotation_size else name


def together(turns: Sequence[Turns]) -> Change:
    """Several turns as one change."""

    def change(context: ModelContext, part: str) -> None:
        for turn in turns:
            turn.make(context, part)

    return change


def check(walk: BlockWalk, turns: Sequence[Turns]) -> None:
    """The first sample gets the same answer from the turned model.

    Raises:
        ModelError: it does not.
    """
    before, after = answers(walk, [0])[0], answers(walk, [0], change=together(turns))[0]
    types = {value.dtype for value in walk.context.model.parameters() if value.is_floating_point()}
    if not all_equal(after, before, max(CLOSE, *(ROUNDINGS * torch.finfo(dtype).eps for dtype in types))):
        raise ModelError(
            "rotation: the model would not compute the same; its residual stream is read or written by more than "
            "norms, embeddings and linear layers. RotationConfig(r1=True, online_r1_rotation=True) works for all models"
        )


def candidates(config: RotationConfig, structure: Structure) -> Iterator[list[Turns]]:
    """What is tried of each turn of a configuration."""
    for name in (name for name in TURNS if getattr(config, name)):
        turn = replace(config, r1=name == "r1", r2=name == "r2", r4=name == "r4")
        signed = name != "r4" and not config.online_r1_rotation
        sizes = () if name == "r2" or config.rotation_size else SIZES
        found = [Turns(turn, structure, seed) for seed in (SEEDS if signed else SEEDS[:1])]
        yield found + [Turns(replace(turn, rotation_size=size), structure) for size in sizes]


def worthwhile(walk: BlockWalk, tried: Iterable[list[Turns]]) -> list[Turns]:
    """The turns that make the quantized answers better, each beside those before it."""
    measure = output_distance(walk)
    lowest = measure.errors()
    kept: list[Turns] = []
    for alternatives in tried:
        fit = [turn for turn in alternatives if fits(walk, turn)]
        errors = [measure.errors(together([*kept, turn])) for turn in fit]
        best = best_of(errors, lowest)
        if best is not None:
            lowest, kept = errors[best], [*kept, fit[best]]
    return kept


def fits(walk: BlockWalk, turn: Turns) -> bool:
    """Whether the size of a turn's blocks divides what it turns; that of a configuration must."""
    size = turn.config.rotation_size
    modules = dict(walk.context.model.named_modules())
    widths = {features(modules[name]) for name in turned_by(walk.context, turn)}
    return size is None or size not in SIZES or all(width % size == 0 and width > size for width in widths)


def turned_by(context: ModelContext, turn: Turns) -> list[str]:
    """The layers whose inputs a turn of R1 or R4 turns."""
    if turn.config.r4:
        return down_layers(context, turn)
    return [name for group in turn.structure.groups for name in group.linears]


def turn_residual(context: ModelContext, turns: Turns, part: str) -> None:
    """R1, offline: what reads and writes the residual stream in one part."""
    modules, config, structure = dict(context.model.named_modules()), turns.config, turns.structure
    readers = {group.norm: (*group.linears, *group.others) for group in structure.groups}
    if not readers:
        raise ModelError("rotation: r1 found no norm that linear layers read; online_r1_rotation=True needs none")
    size = features(modules[next(iter(readers.values()))[0]])
    turn = rotation(size, config.rotation_size, turns.seed or (0 if config.random_r1 else None))
    # a norm of another width stands inside a block (Mamba 2), not in the stream; what reads it writes into the stream
    stream = [group for group in structure.groups if features(modules[readers[group.norm][0]]) == size]
    every = [name for group in stream for name in readers[group.norm]]
    groups = [group for group in stream if group.block == part]
    for group in groups:
        fuse_norm(context, group, modules)
    for name in (name for group in groups for name in (*group.linears, *group.others)):
        set_weight(context, modules[name], turn.apply(out_in(modules[name])))
    for module in writers(modules, part, set(every), size):
        turn_rows(context, module, turn)
    for name, module in modules.items():
        if isinstance(module, nn.Embedding) and module.embedding_dim == size and turns.of(name) == part:
            context.undo.set_parameter(module, "weight", turn.apply(module.weight.detach().double()))
    if not part:
        untie(context)


def untie(context: ModelContext) -> None:
    """A head that shared its weight with the embedding no longer does, and the configuration says so."""
    config: Any = getattr(context.model, "config", None)
    if getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False
        context.undo.actions.append(lambda: setattr(config, "tie_word_embeddings", True))


def fuse_norm(context: ModelContext, group: NormGroup, modules: dict[str, nn.Module]) -> None:
    """Move the weight of a norm into the layers that read it.

    Raises:
        ModelError: the norm subtracts the mean.
    """
    norm = modules[group.norm]
    if isinstance(norm, nn.LayerNorm) or norm._parameters.get("bias") is not None:
        raise ModelError(
            f"rotation: r1 needs norms without a mean (RMSNorm), and {group.norm!r} is a {type(norm).__name__}; "
            f"RotationConfig(r1=True, online_r1_rotation=True) works for it"
        )
    scale = own_parameter(norm).detach().double() + group.offset
    for name in (*group.linears, *group.others):
        set_weight(context, modules[name], out_in(modules[name]) * scale)
    context.undo.set_parameter(norm, "weight", torch.full_like(scale, 1 - group.offset))


def writers(modules: dict[str, nn.Module], part: str, readers: set[str], size: int) -> Iterable[nn.Module]:
    """The linear layers of a block that read no norm and write vectors of ``size``: those behind attention and
    feed-forward parts. That they are the right ones is proved by the model's answer."""
    for name, module in modules.items():
        kind = kind_of(module)
        inside = part and name.startswith(f"{part}.")
        if kind and kind.tokens and inside and name not in readers and width_of(module) == size:
            yield module


def turn_values(context: ModelContext, turns: Turns, part: str) -> None:
    """R2: each head of the values.

    Raises:
        ModelError: no value projections, or heads of unknown width.
    """
    modules = dict(context.model.named_modules())
    pairs = [pair for pair in turns.structure.pairs if is_value(pair, turns.structure)]
    if not pairs:
        raise ModelError("rotation: r2 found no projection whose channels attention hands on to another; set r2=False")
    width = head_width(context.model)
    turn = rotation(width, seed=turns.seed or (1 if turns.config.random_r2 else None))
    for pair in (pair for pair in pairs if pair.block == part):
        source, target, channels = modules[pair.source], modules[pair.target], pair.channels
        used = torch.zeros(width_of(source), dtype=torch.bool)
        used[channels] = True
        turn_rows(context, source, turn, used.nonzero()[:, 0])
        weight = out_in(target)
        set_weight(context, target, turn.apply(weight.reshape(len(weight), -1, width)).reshape(weight.shape))


def is_value(pair: LayerPair, structure: Structure) -> bool:
    """Whether a pair is that of attention: its source is read with the queries', or makes them too."""
    groups = [group for group in structure.groups if pair.source in group.linears]
    first = next((group for group in structure.groups if group.block == pair.block), None)
    return bool(groups) and groups[0] == first and pair == next(p for p in structure.pairs if p.block == pair.block)


def turn_down(context: ModelContext, turns: Turns, part: str) -> None:
    """R4: the layers that read no norm and are not behind attention.

    Raises:
        ModelError: there are none.
    """
    targets = down_layers(context, turns)
    if not targets:
        raise ModelError("rotation: r4 found no quantized layer behind a feed-forward part; set r4=False")
    turn_inputs(context, turns, targets, part)


def down_layers(context: ModelContext, turns: Turns) -> list[str]:
    """The names of the layers of R4."""
    structure = turns.structure
    readers = {name for group in structure.groups for name in group.linears}
    values = {pair.target for pair in structure.pairs if is_value(pair, structure)}
    quantized = [item.layer.name for item in context.layers().values()]
    return [name for name in quantized if turns.of(name) and name not in readers | values]


def turn_readers(context: ModelContext, turns: Turns, part: str) -> None:
    """R1, online: every quantized layer that reads a norm."""
    quantized = {item.layer.name for item in context.layers().values()}
    readers = [name for group in turns.structure.groups for name in group.linears if name in quantized]
    turn_inputs(context, turns, readers, part)


def turn_inputs(context: ModelContext, turns: Turns, names: Iterable[str], part: str) -> None:
    """Turn the inputs of those of the layers that are in a part."""
    modules = dict(context.model.named_modules())
    for name in names:
        if turns.of(name) == part:
            turn_online(context, modules[name], turns.config.rotation_size)


def turn_online(context: ModelContext, module: nn.Module, block: int | None) -> None:
    """Turn the inputs of a layer when it runs, and its weight now."""
    turn = rotation(features(module), block)
    set_weight(context, module, turn.apply(out_in(module)))
    attach_rotation(module, turn)
    context.undo.actions.append(lambda: detach_rotation(module))


def features(module: nn.Module) -> int:
    """Length of the vectors that a layer reads."""
    return int(own_parameter(module).shape[0 if is_transposed(module) else 1])


def width_of(module: nn.Module) -> int:
    """Length of the vectors that a layer writes."""
    return int(own_parameter(module).shape[1 if is_transposed(module) else 0])


def out_in(module: nn.Module) -> torch.Tensor:
    """The weight as float64 [out, in]."""
    weight = own_parameter(module).detach().double()
    return weight.T if is_transposed(module) else weight


def set_weight(context: ModelContext, module: nn.Module, value: torch.Tensor) -> None:
    """Give a layer the weight ``value`` [out, in]."""
    stored = value.T.contiguous() if is_transposed(module) else value
    context.undo.set_parameter(module, "weight", stored)


def turn_rows(context: ModelContext, module: nn.Module, turn: Rotation, rows: torch.Tensor | None = None) -> None:
    """Turn what a layer writes; with ``rows``, only these, in runs of the rotation's size."""

    def turned(value: torch.Tensor) -> torch.Tensor:  # [.., out]
        if rows is None:
            return turn.apply(value)
        part = value[..., rows]
        out = value.clone()
        out[..., rows] = turn.apply(part.reshape(*part.shape[:-1], -1, turn.size)).reshape(part.shape)
        return out

    set_weight(context, module, turned(out_in(module).T).T)
    if module._parameters.get("bias") is not None:
        context.undo.set_parameter(module, "bias", turned(own_parameter(module, "bias").detach().double()))


def head_width(model: nn.Module) -> int:
    """Width of an attention head, from the configuration of the model or from an attribute of its attention.

    Raises:
        ConfigError: neither says it.
    """
    config: Any = getattr(model, "config", None)
    width = getattr(config, "head_dim", None)
    if width is None and getattr(config, "num_attention_heads", None):
        width = config.hidden_size // config.num_attention_heads
    found = [value for m in model.modules() if isinstance(value := getattr(m, "head_dim", None), int)]
    width = width or (found[0] if found else None)
    if width is None:
        raise ConfigError(
            "rotation: r2 needs the width of a head; give the model an attribute head_dim, or set r2=False"
        )
    return int(width)
