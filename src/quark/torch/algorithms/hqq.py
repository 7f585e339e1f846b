"""HQQ for the torch flow: better scales, or real zero points, for the weights, without data.

Scales move, and with them the zero points that are real numbers (``ZeroPointType.float32``).
"""

from __future__ import annotations

import logging

import torch

from quark.algorithms.hqq import hqq
from quark.numerics.elements import Int
from quark.torch.algorithms.context import Context
from quark.torch.config.algorithms import HQQConfig
from quark.torch.fake_quantize import FakeQuantize, Quantizer, parts

log = logging.getLogger(__name__)


@torch.no_grad()
def run_hqq(context: Context, config: HQQConfig) -> None:
    """Improve the scales of every integer weight of ``context.model``."""
    for item in context.found.quantized:
        quantizer = item.layer.module._modules["weight_quantizer"]
        if quantizer is not None:
            refine(quantizer, item.layer.module._parameters["weight"].detach(), config)  # type: ignore[arg-type, union-attr]


@torch.no_grad()
def refine(quantizer: Quantizer, weight: torch.Tensor, config: HQQConfig) -> None:
    """Improve the scales of one quantizer, as far as its format has integer codes and free scales."""
    *before, part = parts(quantizer)
    stage = part.stage
    if before or not stage.calibrated or not isinstance(stage.format, Int) or stage.spec.scale_rule != "float32":
        log.warning(
            "hqq: %s keeps its scales: the method moves those of integer codes, which %s does not have",
            part.tensor_name, stage.spec.describe(),
        )  # fmt: skip
        return
    improve(part, weight.float(), config)


def improve(part: FakeQuantize, weight: torch.Tensor, config: HQQConfig) -> None:
    """New parameters for one quantizer.

    The real zero point of a quantizer counts from the lowest code; HQQ's does too.
    """
    tiles = part.granularity.tile(weight)
    tiles = tiles.reshape(-1, tiles.shape[-1])
    scale, zero = part.scale.reshape(-1), part.zero_point.reshape(-1).float()  # type: ignore[union-attr]
    found = hqq(
        tiles, scale, zero, part.stage.format, True,  # type: ignore[arg-type]
        config.iterations, config.lp_norm, config.beta, config.kappa, part.stage.real_zero,
    )  # fmt: skip
    part.scale = found.scale.reshape(part.scale.shape)  # type: ignore[union-attr]
    if part.stage.real_zero:
        part.zero_point = found.zero.reshape(part.zero_point.shape)  # type: ignore[union-attr]
