"""QuaRot: Hadamard rotations spread outliers over all channels (Ashkboos et al. 2024).

    R1  the residual stream: what writes to it is turned, what reads it turned back; norms hand their weight on first
    R2  values, head by head: value projections turned, output projections turned back
    R4  the inputs of down projections: turned when the model runs, the weights turned beforehand
    online R1  as R4, for every layer that reads a norm: needs nothing of the norm or of what writes

Readers, writers and channels are found from the model (``quark.torch.structure``). Whatever was turned, the model must
then answer what it answered before: a model whose residual stream is read or written elsewhere (norms behind the
attention, LayerNorm, which subtracts a mean that is not turned with it) is refused, with what would work. A model
without outliers may lose by being turned: its quantized answers to a few samples are compared, turn by turn, with a few
choices of signs (randomized Hadamard matrices, as in the paper), and a turn is kept where they get 2 % better, also on
samples that the choice has not seen (``only_if_better``).

R3, queries and keys behind the rotary embedding, only serves caches and is theirs (``quark.torch.kv_cache``).

Not handled: trained rotations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quark.algorithms.hadamard import Rotation, rotation
from quark.errors import ConfigError, ModelError
from quark.torch.algorithms.context import Context, Undo
from quark.torch.algorithms.guard import MODEL_SAMPLES, WORTH, model_error
from quark.torch.config.algorithms import RotationConfig
from quark.torch.layers import kind_of
from quark.torch.probe import equal
from quark.torch.rotated import attach_rotation, detach_rotation
from quark.torch.structure import NormGroup, Pair, Structure, answer, example, find_structure, run_model

log = logging.getLogger(__name__)
SEEDS = (0, 2, 3, 4)  # 0: the rotation of the configuration
TURNS = ("r1", "r2", "r4")


@torch.no_grad()
def run_rotation(context: Context, config: RotationConfig) -> None:
    """Rotate ``context.model``; with ``only_if_better``, by the turns that make its quantized answers better.

    Raises:
        ModelError: the model would not compute the same.
    """
    if not (config.r1 or config.r2 or config.r4):
        return  # r3 belongs to the cache's quantizers
    sample = context.samples[0] if context.samples else example(context.model)
    structure = find_structure(context.model, sample, config.model_decoder_layers)
    if not context.samples or not config.only_if_better:
        rotate(context, config, structure, sample, 0)
        return
    errors = halves(context)
    lowest = errors()
    kept = []
    for name in [name for name in TURNS if getattr(config, name)]:
        turn = replace(config, r1=name == "r1", r2=name == "r2", r4=name == "r4")
        seeds = (0,) if name == "r4" or config.online_r1_rotation else SEEDS
        found = [(attempt(context, turn, structure, sample, seed, errors), seed) for seed in seeds]
        best, seed = min(found)
        if all(new <= WORTH * old for new, old in zip(best, lowest, strict=True)):
            rotate(context, turn, structure, sample, seed)
            lowest = best
            kept.append(name)
    log.info("rotation: %s kept; other turns would not make the quantized answers better", ", ".join(kept) or "nothing")


def halves(context: Context) -> Callable[[], tuple[float, ...]]:
    """The errors on every other sample, by which signs are chosen, and on those between, by which the choice must hold:
    the best of several choices looks better than it is where it was chosen."""
    parts = [context.samples[k : 2 * MODEL_SAMPLES : 2] for k in (0, 1)]
    errors = [model_error(replace(context, samples=part)) for part in parts if part]
    return lambda: tuple(error() for error in errors)


def attempt(
    context: Context,
    config: RotationConfig,
    structure: Structure,
    sample: Any,
    seed: int,
    errors: Callable[[], tuple[float, ...]],
) -> tuple[float, ...]:
    """The errors with some turns, which are taken back."""
    undo = Undo()
    try:
        rotate(replace(context, undo=undo), config, structure, sample, seed)
        return errors()
    finally:
        undo.restore()


def rotate(context: Context, config: RotationConfig, structure: Structure, sample: Any, seed: int) -> None:
    """All turns of a configuration.

    Args:
        context: the model.
        config: which turns.
        structure: of the model.
        sample: on which the model must answer what it answered before.
        seed: of the signs of offline turns; 0: as configured.

    Raises:
        ModelError: the model would not compute the same.
    """
    before = answer(run_model(context.model, sample))
    if config.r1 and config.online_r1_rotation:
        turn_readers(context, structure, config)
    elif config.r1:
        turn_residual(context, structure, config, seed or (0 if config.random_r1 else None))
    if config.r2:
        turn_values(context, structure, seed or (1 if config.random_r2 else None))
    if config.r4:
        turn_down(context, structure, config)
    if not equal(answer(run_model(context.model, sample)).float(), before.float()):
        raise ModelError(
            "rotation: the model would not compute the same; its residual stream is read or written by more than "
            "norms, embeddings and linear layers. RotationConfig(r1=True, online_r1_rotation=True) works for all models"
        )


def turn_residual(context: Context, structure: Structure, config: RotationConfig, seed: int | None) -> None:
    """R1, offline, with the signs of a seed."""
    modules = dict(context.model.named_modules())
    readers = [name for group in structure.groups for name in (*group.linears, *group.others)]
    size = features(modules[readers[0]]) if readers else 0
    turn = rotation(size, config.rotation_size, seed) if size else None
    if turn is None or not structure.groups:
        raise ModelError("rotation: r1 found no norm that linear layers read; online_r1_rotation=True needs none")
    for group in structure.groups:
        fuse_norm(context, group, modules)
    for name in readers:
        set_weight(context, modules[name], turn.apply(out_in(modules[name])))
    for module in writers(modules, structure, readers, size):
        turn_rows(context, module, turn)
    for module in modules.values():
        if isinstance(module, nn.Embedding) and module.embedding_dim == size:
            context.undo.set_parameter(module, "weight", turn.apply(module.weight.detach().double()))
    untie(context)


def untie(context: Context) -> None:
    """A head that shared its weight with the embedding no longer does, and the configuration says so."""
    config = getattr(context.model, "config", None)
    if getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False  # type: ignore[union-attr]
        context.undo.actions.append(lambda: setattr(config, "tie_word_embeddings", True))


def fuse_norm(context: Context, group: NormGroup, modules: dict[str, nn.Module]) -> None:
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
    scale = norm._parameters["weight"].detach().double() + group.offset  # type: ignore[union-attr]
    for name in (*group.linears, *group.others):
        set_weight(context, modules[name], out_in(modules[name]) * scale)
    context.undo.set_parameter(norm, "weight", torch.full_like(scale, 1 - group.offset))


def writers(
    modules: dict[str, nn.Module], structure: Structure, readers: Iterable[str], size: int
) -> Iterable[nn.Module]:
    """The linear layers of the blocks that read no norm and write vectors of ``size``: those behind attention and
    feed-forward parts. That they are the right ones is proved by the model's answer."""
    known = set(readers)
    for name, module in modules.items():
        kind = kind_of(module)
        inside = any(name.startswith(f"{block}.") for block in structure.names)
        if kind and kind.tokens and inside and name not in known and len(out_in(module)) == size:
            yield module


def turn_values(context: Context, structure: Structure, seed: int | None) -> None:
    """R2: each head of the values.

    Raises:
        ModelError: no value projections, or heads of unknown width.
    """
    modules = dict(context.model.named_modules())
    pairs = [pair for pair in structure.pairs if is_value(pair, structure)]
    if not pairs:
        raise ModelError("rotation: r2 found no projection whose channels attention hands on to another; set r2=False")
    width = head_width(context.model)
    turn = rotation(width, seed=seed)
    for pair in pairs:
        source, target, channels = modules[pair.source], modules[pair.target], pair.channels
        used = torch.zeros(len(out_in(source)), dtype=torch.bool)
        used[channels] = True
        turn_rows(context, source, turn, used.nonzero()[:, 0])
        weight = out_in(target)
        set_weight(context, target, turn.apply(weight.reshape(len(weight), -1, width)).reshape(weight.shape))


def is_value(pair: Pair, structure: Structure) -> bool:
    """Whether a pair is that of attention: its source is read with the queries', or makes them too."""
    groups = [group for group in structure.groups if pair.source in group.linears]
    first = next((group for group in structure.groups if group.block == pair.block), None)
    return bool(groups) and groups[0] == first and pair == next(p for p in structure.pairs if p.block == pair.block)


def turn_down(context: Context, structure: Structure, config: RotationConfig) -> None:
    """R4: the layers that read no norm and are not behind attention.

    Raises:
        ModelError: there are none.
    """
    modules = dict(context.model.named_modules())
    readers = {name for group in structure.groups for name in group.linears}
    values = {pair.target for pair in structure.pairs if is_value(pair, structure)}
    quantized = [item.layer.name for item in context.layers().values()]
    inside = [name for name in quantized if any(name.startswith(f"{block}.") for block in structure.names)]
    targets = [name for name in inside if name not in readers | values]
    if not targets:
        raise ModelError("rotation: r4 found no quantized layer behind a feed-forward part; set r4=False")
    for name in targets:
        turn_online(context, modules[name], config.rotation_size)


def turn_readers(context: Context, structure: Structure, config: RotationConfig) -> None:
    """R1, online: every quantized layer of the blocks that is not behind an attention or feed-forward part."""
    modules = dict(context.model.named_modules())
    quantized = {item.layer.name for item in context.layers().values()}
    readers = [name for group in structure.groups for name in group.linears if name in quantized]
    for name in readers:
        turn_online(context, modules[name], config.rotation_size)


def turn_online(context: Context, module: nn.Module, block: int | None) -> None:
    """Turn the inputs of a layer when it runs, and its weight now."""
    turn = rotation(features(module), block)
    set_weight(context, module, turn.apply(out_in(module)))
    attach_rotation(module, turn)
    context.undo.actions.append(lambda: detach_rotation(module))


def features(module: nn.Module) -> int:
    """Length of the vectors that a layer reads."""
    return int(out_in(module).shape[1])


def out_in(module: nn.Module) -> torch.Tensor:
    """The weight as float64 [out, in]."""
    kind = kind_of(module)
    weight = module._parameters["weight"].detach().double()  # type: ignore[union-attr]
    return weight.T if kind is not None and kind.transposed else weight


def set_weight(context: Context, module: nn.Module, value: torch.Tensor) -> None:
    """Give a layer the weight ``value`` [out, in]."""
    kind = kind_of(module)
    stored = value.T.contiguous() if kind is not None and kind.transposed else value
    context.undo.set_parameter(module, "weight", stored)


def turn_rows(context: Context, module: nn.Module, turn: Rotation, rows: torch.Tensor | None = None) -> None:
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
        context.undo.set_parameter(module, "bias", turned(module._parameters["bias"].detach().double()))  # type: ignore[union-attr]


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
