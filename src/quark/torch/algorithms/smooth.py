"""SmoothQuant and AutoSmoothQuant for the torch flow.

    SmoothQuant       s = (max|x|^alpha / max|w|^(1 - alpha))^t at every place, or (max|x|^alpha)^t; the best of
                      t = 1, 1/2, 1/4
    AutoSmoothQuant   the best s = max|x|^r, r = 0, 0.1 .. 0.9, by the error of the layers that read it

A place where the error on the calibration inputs would grow is smoothed by less (t below 1), or left as it is:
smoothing pays where activations are quantized, and a weight-only int4 layer can lose by the whole of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from quark.algorithms.smoothquant import smoothing_scales
from quark.torch.algorithms.context import Context, matrix
from quark.torch.algorithms.guard import WORTH
from quark.torch.algorithms.scaling import Inputs, Judge, Place, effective, fold, scale_places
from quark.torch.config.algorithms import AutoSmoothQuantConfig, SmoothQuantConfig
from quark.torch.matching import Match

log = logging.getLogger(__name__)
POWERS = {"MSE": 2.0, "MAE": 1.0, "RMSE": 0.5}
STRENGTHS = (1.0, 0.5, 0.25)
GRID = 10
SMALLEST = 1e-4


def run_smooth(context: Context, config: SmoothQuantConfig) -> None:
    """SmoothQuant at every place of the model."""

    def choose(context: Context, place: Place, items: list[Match], inputs: Inputs) -> None:
        weight_max = torch.stack([matrix(item.layer.module, item.layer.kind).abs().amax(0) for item in items]).amax(0)
        s = smoothing_scales(inputs.amax, weight_max, config.alpha, config.scale_clamp_min)
        range_only = normalized(inputs.amax, config.alpha)
        candidates = [scale**strength for scale in (s, range_only) for strength in STRENGTHS]
        best(context, place, Judge(items, inputs.sample), candidates)

    scale_places(context, config.scaling_layers, config.model_decoder_layers, choose)


def run_autosmooth(context: Context, config: AutoSmoothQuantConfig) -> None:
    """The best exponent at every place of the model."""
    power = POWERS[config.compute_scale_loss]

    def choose(context: Context, place: Place, items: list[Match], inputs: Inputs) -> None:
        judge = Judge(items, inputs.sample, power)
        best(context, place, judge, (normalized(inputs.amax, k / GRID) for k in range(1, GRID)))

    scale_places(context, config.scaling_layers, config.model_decoder_layers or "", choose)


def normalized(statistic: torch.Tensor, exponent: float) -> torch.Tensor:
    """statistic^exponent, so scaled that its largest and smallest value are reciprocal."""
    s = statistic.clamp(min=SMALLEST) ** exponent
    return s / (s.max() * s.min()).sqrt()


def best(context: Context, place: Place, judge: Judge, candidates: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Fold the candidate with the least error into the model, if that is less than without scales; return it."""
    lowest, found = WORTH * judge.error(), None
    for candidate in candidates:
        s = effective(context, place, candidate)
        error = judge.error(s)
        if error < lowest:
            lowest, found = error, s
    if found is None:
        log.info("%s keeps its scale: no other lowers the error", place.source)
    else:
        fold(context, place, found)
    return found
