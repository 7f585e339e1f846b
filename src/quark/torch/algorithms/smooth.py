"""SmoothQuant and AutoSmoothQuant for the torch flow.

    SmoothQuant       s = max|x|^(alpha u) / max|w|^((1 - alpha) v): the best parts u and v, 0 to 1, at every place
    AutoSmoothQuant   s = max|x|^a / max|w|^b: the best exponents at every place

The best by the error of the layers that read the place, first on a coarse grid, then around what was best there, then
channel by channel where groups of columns have scales of their own (``channels``). Smoothing pays where activations are
quantized, and a weight-only int4 layer can lose by the whole of it: there the parts come out small, or 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from quark.algorithms.awq import Pair, best_exponents, scale_of
from quark.algorithms.smoothquant import smoothing_scales
from quark.dataclass import dataclass
from quark.torch.algorithms.channels import by_channels
from quark.torch.algorithms.context import ModelContext, matrix
from quark.torch.algorithms.judge import ScaleJudge, judge_of
from quark.torch.algorithms.scaling import Place, ReadPlace, effective, scale_places
from quark.torch.config.algorithms import AutoSmoothQuantConfig, SmoothQuantConfig
from quark.torch.matching import Match

log = logging.getLogger(__name__)
POWERS = {"MSE": 2.0, "MAE": 1.0, "RMSE": 0.5}
PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
GRID = ((0.0, 0.2, 0.4, 0.6, 0.8), (0.0, 0.2, 0.4, 0.6))


def run_smooth(context: ModelContext, config: SmoothQuantConfig) -> None:
    """SmoothQuant at every place of the model."""
    alpha = config.alpha

    def family(one: ReadPlace) -> Family:
        ranges, inputs = weight_ranges(one.items), one.inputs
        whole = smoothing_scales(inputs.amax, ranges, alpha, config.scale_clamp_min)
        grid = [part * alpha for part in PARTS], [part * (1 - alpha) for part in PARTS]
        return Family(judge_of(one.items, inputs), inputs.amax, ranges, grid, (whole,))

    choose = partial(best_of_families, family)
    scale_places(context, config.scaling_layers, config.model_decoder_layers, choose, squares=True)


def run_autosmooth(context: ModelContext, config: AutoSmoothQuantConfig) -> None:
    """The best exponents at every place of the model."""
    power = POWERS[config.compute_scale_loss]

    def family(one: ReadPlace) -> Family:
        judge = judge_of(one.items, one.inputs, power)
        return Family(judge, one.inputs.amax, weight_ranges(one.items), GRID)

    choose = partial(best_of_families, family)
    scale_places(context, config.scaling_layers, config.model_decoder_layers or "", choose, squares=power == 2)


def weight_ranges(items: Iterable[Match]) -> torch.Tensor:
    """The largest weight that each input channel meets in the layers that read it, [channels]."""
    return torch.stack([matrix(item.layer.module, item.layer.kind).abs().amax(0) for item in items]).amax(0)


@dataclass(frozen=True)
class Family:
    """Scales among which the best is looked for.

    Attributes:
        judge: says what is best.
        inputs, weights: what stands for each channel of them, [channels].
        exponents: of inputs and of weights in the coarse grid, rising; the same value throughout: that one is fixed.
        others: further candidates.
    """

    judge: ScaleJudge
    inputs: torch.Tensor
    weights: torch.Tensor
    exponents: tuple[Sequence[float], Sequence[float]]
    others: tuple[torch.Tensor, ...] = ()


def best_of_families(
    family: Callable[[ReadPlace], Family], context: ModelContext, asked: Sequence[ReadPlace]
) -> Iterator[torch.Tensor | None]:
    """The best scale of each place's family, improved channel by channel; None: none lowers the error."""
    families = [family(one) for one in asked]
    starts = [best_start(context, one.place, own) for one, own in zip(asked, families, strict=True)]
    here = [
        (one.place, own.judge, torch.ones_like(own.inputs) if start is None else start)
        for one, own, start in zip(asked, families, starts, strict=True)
    ]
    for (_, judge, _), start, finer in zip(here, starts, by_channels(here), strict=True):
        found = [finer, start]
        if finer is not None and start is not None and judge.apart.error(start) <= judge.apart.error(finer):
            found = [start]
        yield next((s for s in found if s is not None and judge.error(s) < judge.error()), None)


def best_start(context: ModelContext, place: Place, family: Family) -> torch.Tensor | None:
    """The best scale of a family, by some outputs; None: none lowers the error."""

    def scales(pair: Pair) -> torch.Tensor:
        return effective(context, place, scale_of(family.inputs, family.weights, pair))

    coarse, known = family.judge.coarse, dict[Pair, float]()

    def errors(pairs: list[Pair]) -> list[float]:
        scaled = [pair for pair in pairs if any(pair)]  # exponents of 0 make scales of 1
        known.update(dict.fromkeys(pairs, coarse.error()))
        known.update(zip(scaled, coarse.errors([scales(pair) for pair in scaled]), strict=True))
        return [known[pair] for pair in pairs]

    pair = best_exponents(errors, family.exponents)
    others = [effective(context, place, other) for other in family.others]
    return least(place, coarse, [(known[pair], scales(pair)), *zip(coarse.errors(others), others, strict=True)])


def best(place: Place, judge: ScaleJudge, candidates: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The candidate with the least error, if that is less than without scales."""
    return least(place, judge, list(zip(judge.errors(candidates), candidates, strict=True)))


def least(place: Place, judge: ScaleJudge, found: Sequence[tuple[float, torch.Tensor]]) -> torch.Tensor | None:
    """The scales of the least error, if that is less than without scales."""
    error, s = min(found, key=lambda pair: pair[0])
    if error < judge.error():
        return s
    log.info("%s keeps its scale: no other lowers the error", place.source)
    return None
