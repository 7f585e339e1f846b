"""AWQ: activation-aware weight quantization (Lin et al. 2023).

    scales   s = mean|x|^a / max|w|^b, a in 0 .. 1, b in 0 .. 0.5: the best by |Q(W s) / s x - W x|
    clips    each group of a weight is clipped to 1, 0.95 .. 0.55 of its largest magnitude: the best by
             (dw) H_gg (dw)^T, with H_gg the block of the Hessian that belongs to the group

Both searches run on statistics collected once; the model is not run again. Clips are kept per group where they are
better, and a layer whose whole error does not fall keeps its weights. Query and key projections are not clipped: their
errors multiply.
"""

from __future__ import annotations

import torch

from quark.algorithms.gptq import loss
from quark.numerics.granularity import Channel, Granularity, Group
from quark.torch.algorithms.context import Context, matrix, new_quantizer, set_matrix
from quark.torch.algorithms.scaling import Inputs, Judge, Place, scale_places
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

    def choose(context: Context, place: Place, items: list[Match], inputs: Inputs) -> None:
        judge = Judge(items, inputs.sample)
        s, hessian = search(context, place, judge, inputs.mean, weight_ranges(items), *GRID), inputs.hessian
        if hessian is None:
            return
        if s is not None:
            hessian = hessian / s / s[:, None]
        for item in items:
            if not any(word in item.layer.name.rsplit(".", 1)[-1] for word in UNCLIPPED):
                clip(context, item, hessian)

    scale_places(context, config.scaling_layers, config.model_decoder_layers, choose, squares=True)


def clip(context: Context, item: Match, hessian: torch.Tensor) -> None:
    """Clip the groups of one weight where that lowers their error."""
    weight = matrix(item.layer.module, item.layer.kind)
    size = group_size(item, weight)
    if size is None:
        return
    lowest = group_losses(quantized_matrix(item, weight) - weight, hessian, size)
    limit = amax_of(weight, size)
    kept = limit.clone()
    for step in range(1, CLIPS):
        bound = limit * (1 - SHRINK * step)
        clipped = clamp(weight, bound, size)
        losses = group_losses(quantized_matrix(item, clipped) - weight, hessian, size)
        better = losses < lowest
        lowest, kept = torch.where(better, losses, lowest), torch.where(better, bound, kept)
    clipped = clamp(weight, kept, size)
    before, after = (loss(quantized_matrix(item, value) - weight, hessian) for value in (weight, clipped))
    if bool((after < before).any()):
        set_matrix(context, item, torch.where((after < before)[:, None], clipped, weight))


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


def group_losses(error: torch.Tensor, hessian: torch.Tensor, size: int) -> torch.Tensor:
    """e_g H_gg e_g^T per row and group, [rows, groups]."""
    found = []
    for start in range(0, error.shape[1], size):
        part = error[:, start : start + size]
        block = hessian[start : start + size, start : start + size]
        found.append(((part @ block) * part).sum(1))
    return torch.stack(found, 1)
