"""HQQ for the torch flow: better scales, or real zero points, for the weights, without data.

Scales move, and with them the zero points that are real numbers (``ZeroPointType.float32``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from quark.algorithms.hqq import Descent, HQQParameters, hqq
from quark.errors import as_a
from quark.numerics.elements import Int
from quark.torch.algorithms.context import ModelContext
from quark.torch.config.algorithms import HQQConfig
from quark.torch.fake_quantize import FakeQuantize, Quantizer, parts, scale_of, zero_point_of
from quark.torch.layers import own_parameter
from quark.torch.quantized_layer import weight_quantizer

log = logging.getLogger(__name__)


@torch.no_grad()
def run_hqq(context: ModelContext, config: HQQConfig) -> None:
    """Improve the scales of every integer weight of ``context.model``."""
    layers = [item.layer.module for item in context.found.quantized if item.stages["weight"]]
    warn_of_fixed([weight_quantizer(layer) for layer in layers])
    for layer in layers:
        refine(weight_quantizer(layer), own_parameter(layer).detach(), config)


@torch.no_grad()
def refine(quantizer: Quantizer, weight: torch.Tensor, config: HQQConfig) -> None:
    """Improve the scales of one quantizer, if it has any to move."""
    if can_move(quantizer):
        improve(next(iter(parts(quantizer))), weight.float(), config)


def can_move(quantizer: Quantizer) -> bool:
    """Whether there is one stage, of integer codes under scales that are free."""
    part, *others = parts(quantizer)
    stage = part.stage
    free = stage.calibrated and isinstance(stage.format, Int) and stage.spec.scale_rule == "float32"
    return free and not others


def warn_of_fixed(quantizers: Sequence[Quantizer]) -> None:
    """Say of how many weights the scales stay, and why."""
    fixed = [next(iter(parts(quantizer))) for quantizer in quantizers if not can_move(quantizer)]
    if fixed:
        log.warning(
            "hqq leaves %d of %d weights rounded to nearest: it moves static scales of integer codes, and theirs are "
            "none (%s: %s)", len(fixed), len(quantizers), fixed[0].tensor_name, fixed[0].stage.spec.describe(),
        )  # fmt: skip


def improve(part: FakeQuantize, weight: torch.Tensor, config: HQQConfig) -> None:
    """New parameters for one quantizer.

    The real zero point of a quantizer counts from the lowest code; HQQ's does too.
    """
    tiles = part.granularity.tile(weight)
    tiles = tiles.reshape(-1, tiles.shape[-1])
    start = HQQParameters(scale_of(part).reshape(-1), zero_point_of(part).reshape(-1).float())
    descent = Descent(config.iterations, config.lp_norm, config.beta, config.kappa)
    found = hqq(tiles, start, as_a(Int, part.stage.format), True, part.stage.real_zero, descent)
    part.scale = found.scale.reshape(scale_of(part).shape)
    if part.stage.real_zero:
        part.zero_point = found.zero.reshape(zero_point_of(part).shape)
