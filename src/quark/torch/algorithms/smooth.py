"""SmoothQuant and AutoSmoothQuant for the torch flow.

    SmoothQuant       s = max|x|^(alpha u) / max|w|^((1 - alpha) v): the best parts u and v, 0 to 1, at every place
    AutoSmoothQuant   s = max|x|^a / max|w|^b: the best exponents at every place

The best by the error of the layers that read the place, first on a coarse grid, then around what was best there, then
channel by channel where groups of columns have scales of their own (``channels``). Smoothing pays where activations are
quantized, and a weight-only int4 layer can lose by the whole of it: there the parts come out small, or 0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import torch

from quark.algorithms.awq import Pair, best_exponents, scale_of
from quark.algorithms.smoothquant import smoothing_scales
from quark.torch.algorithms.channels import by_channel
from quark.torch.algorithms.context import ModelContext, matrix
from quark.torch.algorithms.judge import ScaleJudge, judge_of
from quark.torch.algorithms.scaling import Place, PlaceInputs, effective, scale_places
from quark.torch.config.algorithms import AutoSmoothQuantConfig, SmoothQuantConfig
from quark.torch.matching import Match

log = logging.getLogger(__name__)
POWERS = {"MSE": 2.0, "MAE": 1.0, "RMSE": 0.5}
PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
GRID = ((0.0, 0.2, 0.4, 0.6, 0.8), (0.0, 0.2, 0.4, 0.6))


def run_smooth(context: ModelContext, config: SmoothQuantConfig) -> None:
    """SmoothQuant at every place of the model."""
    alpha = config.alpha

    def choose(context: ModelContext, place: Place, items: list[Match], inputs: PlaceInputs) -> torch.Tensor | None:
        judge, ranges = judge_of(items, inputs), weight_ranges(items)
        whole = smoothing_scales(inputs.amax, ranges, alpha, config.scale_clamp_min)
        grid = [part * alpha for part in PARTS], [part * (1 - alpha) for part in PARTS]
        return search(context, place, judge, (inputs.amax, ranges), grid, [whole])

    scale_places(context, config.scaling_layers, config.model_decoder_layers, choose, squares=True)


def run_autosmooth(context: ModelContext, config: AutoSmoothQuantConfig) -> None:
    """The best exponents at every place of the model."""
    power = POWERS[config.compute_scale_loss]

    def choose(context: ModelContext, place: Place, items: list[Match], inputs: PlaceInputs) -> torch.Tensor | None:
        judge = judge_of(items, inputs, power)
        return search(context, place, judge, (inputs.amax, weight_ranges(items)), GRID)

    scale_places(context, config.scaling_layers, config.model_decoder_layers or "", choose, squares=power == 2)


def weight_ranges(items: Iterable[Match]) -> torch.Tensor:
    """The largest weight that each input channel meets in the layers that read it, [channels]."""
    return torch.stack([matrix(item.layer.module, item.layer.kind).abs().amax(0) for item in items]).amax(0)


def search(
    context: ModelContext,
    place: Place,
    judge: ScaleJudge,
    channels: tuple[torch.Tensor, torch.Tensor],
    exponents: tuple[Sequence[float], Sequence[float]],
    others: Sequence[torch.Tensor] = (),
) -> torch.Tensor | None:
    """The best scale of a family, improved channel by channel; None: none lowers the error.

    Args:
        context, place, judge: where, and what is best.
        channels: what stands for each channel of the inputs and of the weights, [channels] each.
        exponents: of inputs and of weights in the coarse grid, rising; the same value throughout: that one is fixed.
        others: further candidates.
    """

    def scales(pair: Pair) -> torch.Tensor:
        return effective(context, place, scale_of(*channels, pair))

    coarse = judge.coarse
    s = scales(best_exponents(lambda pair: coarse.error(scales(pair)), exponents))
    start = keep_best(place, coarse, [(coarse.error(s), s), *measured(context, place, coarse, others)])
    finer = by_channel(place, judge, torch.ones_like(channels[0]) if start is None else start)
    if finer is not None and start is not None and judge.apart.error(start) <= judge.apart.error(finer):
        finer = None
    return next((s for s in (finer, start) if s is not None and judge.error(s) < judge.error()), None)


def measured(
    context: ModelContext, place: Place, judge: ScaleJudge, candidates: Iterable[torch.Tensor]
) -> Iterator[tuple[float, torch.Tensor]]:
    """Candidates as they would be applied, with their errors."""
    for candidate in candidates:
        s = effective(context, place, candidate)
        yield judge.error(s), s


def best(
    context: ModelContext, place: Place, judge: ScaleJudge, candidates: Iterable[torch.Tensor]
) -> torch.Tensor | None:
    """The candidate with the least error, as it would be applied, if that is less than without scales."""
    return keep_best(place, judge, measured(context, place, judge, candidates))


def keep_best(place: Place, judge: ScaleJudge, found: Iterable[tuple[float, torch.Tensor]]) -> torch.Tensor | None:
    """As ``best``, of candidates with their errors."""
    error, s = min(found, key=lambda pair: pair[0])
    if error < judge.error():
        return s
    log.info("%s keeps its scale: no other lowers the error", place.source)
    return None
