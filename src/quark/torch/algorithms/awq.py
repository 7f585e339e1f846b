"""AWQ: activation-aware weight quantization (Lin et al. 2023).

    scales   s = mean|x|^a / max|w|^b, a in 0 .. 1, b in 0 .. 0.5: the best by |Q(W s) / s x - W x|
    clips    each group of a weight is clipped to 1, 0.95 .. 0.55 of its largest magnitude: the best by
             (dw) H_gg (dw)^T, with H_gg the block of the Hessian that belongs to the group

Both searches run on statistics collected once; the model is not run again. Clips are kept per group where they are
better, and a layer whose whole error does not fall keeps its weights. Query and key projections are not clipped: their
errors multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from quark.algorithms.gptq import loss
from quark.numerics.granularity import Channel, Granularity, Group
from quark.torch.algorithms.context import Context, matrix, new_quantizer, set_matrix
from quark.torch.algorithms.scaling import Inputs, Place, judge_of, scale_places
from quark.torch.algorithms.smooth import search, weight_ranges
from quark.torch.algorithms.trial import quantized_matrix
from quark.torch.config.algorithms import AWQConfig
from quark.torch.fake_quantize import parts
from quark.torch.matching import Match

GRID = ((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), (0.0, 0.25, 0.5))
CLIPS = 10
SHRINK = 0.05
UNCLIPPED = ("q_", "k_", "query", "key", "Wqkv", "qkv", "c_attn")


def run_awq(context: Context, config: AWQConfig) -> None:
    """Scales at every place, then clips of the layers that read it."""

    def choose(context: Context, place: Place, items: list[Match], inputs: Inputs) -> torch.Tensor | None:
        return search(context, place, judge_of(items, inputs), inputs.mean, weight_ranges(items), *GRID)

    scale_places(context, config.scaling_layers, config.model_decoder_layers, choose, clip_all, squares=True)


def clip_all(
    context: Context, items: list[Match], inputs: Inputs, s: torch.Tensor | None
) -> tuple[Callable[[Context], None], ...]:
    """Clip the weights that read one place, which have its scales; the clips."""
    hessian = inputs.hessian
    if hessian is None:
        return ()
    if s is not None:
        hessian = hessian / s / s[:, None]
    unclipped = [any(word in item.layer.name.rsplit(".", 1)[-1] for word in UNCLIPPED) for item in items]
    found = [(item, steps_of(item, hessian)) for item, keep in zip(items, unclipped, strict=True) if not keep]
    changes = tuple(partial(clip, item=item, steps=steps) for item, steps in found if steps is not None)
    for change in changes:
        change(context)
    return changes


def clip(context: Context, item: Match, steps: torch.Tensor) -> None:
    """Clip each group of a weight to ``1 - SHRINK * steps`` of its largest magnitude; steps: uint8 [rows, groups]."""
    weight = matrix(item.layer.module, item.layer.kind)
    size = group_size(item, weight) or weight.shape[1]
    set_matrix(context, item, clamp(weight, amax_of(weight, size) * (1 - SHRINK * steps), size))


def steps_of(item: Match, hessian: torch.Tensor) -> torch.Tensor | None:
    """How far each group of a weight is best clipped; None where clips mean nothing, or nothing is gained."""
    weight = matrix(item.layer.module, item.layer.kind)
    size = group_size(item, weight)
    if size is None:
        return None
    blocks = diagonal_blocks(hessian, size)
    lowest = group_losses(quantized_matrix(item, weight) - weight, blocks, size)
    limit = amax_of(weight, size)
    steps = torch.zeros(limit.shape, dtype=torch.uint8, device=limit.device)
    for step in range(1, CLIPS):
        clipped = clamp(weight, limit * (1 - SHRINK * step), size)
        losses = group_losses(quantized_matrix(item, clipped) - weight, blocks, size)
        better = losses < lowest
        lowest, steps = torch.where(better, losses, lowest), torch.where(better, step, steps)
    clipped = clamp(weight, limit * (1 - SHRINK * steps), size)
    before, after = (loss(quantized_matrix(item, value) - weight, hessian) for value in (weight, clipped))
    return torch.where((after < before)[:, None], steps, 0).to(torch.uint8) if bool((after < before).any()) else None


def group_size(item: Match, weight: torch.Tensor) -> int | None:
    """Columns that share a scale in a row; None where rows share scales, or the format finds them itself."""
    (part,) = list(parts(new_quantizer(item, "weight")))[:1]  # type: ignore[arg-type]
    if not part.stage.calibrated or len(item.stages["weight"]) > 1:
        return None
    written: Granularity = item.stages["weight"][0].spec.granularity
    if isinstance(written, Group) and written.axis % 2 == 1:
        return min(written.size, weight.shape[1])
    return weight.shape[1] if isinstance(written, Channel) and written.axis % 2 == 0 else None


def tiles(x: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, columns] as [rows, groups, size], padded with 0."""
    return Group(1, size).tile(x)


def amax_of(weight: torch.Tensor, size: int) -> torch.Tensor:
    """The largest magnitude per row and group, [rows, groups]."""
    return tiles(weight, size).abs().amax(-1)


def clamp(weight: torch.Tensor, bound: torch.Tensor, size: int) -> torch.Tensor:
    """Each group of a weight limited to its bound."""
    limit = Group(1, size).expand(bound, tuple(weight.shape))
    return torch.minimum(torch.maximum(weight, -limit), limit)


def diagonal_blocks(hessian: torch.Tensor, size: int) -> torch.Tensor:
    """H_gg of each group, [groups, size, size], padded with 0."""
    count = hessian.shape[0]
    found = hessian.new_zeros(-(-count // size), size, size)
    for block, start in zip(found, range(0, count, size), strict=True):
        part = hessian[start : start + size, start : start + size]
        block[: len(part), : len(part)] = part
    return found


def group_losses(error: torch.Tensor, blocks: torch.Tensor, size: int) -> torch.Tensor:
    """e_g H_gg e_g^T per row and group, [rows, groups]."""
    parts = tiles(error, size).reshape(len(error), len(blocks), size).transpose(0, 1)
    return (torch.bmm(parts, blocks) * parts).sum(-1).T
