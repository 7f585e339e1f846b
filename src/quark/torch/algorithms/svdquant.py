"""SVDQuant for the torch flow: every large linear layer gets a float branch of low rank.

The exponent of the smoothing is found per layer by the error on kept inputs, with the layer's own quantizers. A layer
that would not get better stays as it is.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch import nn

from quark.algorithms.svdquant import ALPHAS, LowRankSplit, best_split, is_excluded
from quark.errors import DataError
from quark.torch.algorithms.context import ModelContext, matrix, new_quantizer
from quark.torch.algorithms.inputs import Watch
from quark.torch.algorithms.scaling import ROWS, PlaceInputs
from quark.torch.algorithms.trial import quantize_new, quantized_matrix
from quark.torch.calibration import run
from quark.torch.config.algorithms import SVDQuantConfig
from quark.torch.corrected import ErrorCorrected
from quark.torch.matching import Match

log = logging.getLogger(__name__)


@torch.no_grad()
def run_svdquant(context: ModelContext, config: SVDQuantConfig) -> None:
    """Wrap the large linear layers of ``context.model``.

    Raises:
        DataError: no samples.
    """
    if not context.samples:
        raise DataError("svdquant needs samples, and there are none: give a dataloader")
    items = [item for item in context.layers().values() if is_wanted(item, config)]
    inputs = read_all(context, items)
    for item in items:
        if item.layer.module in inputs:
            correct(context, item, inputs[item.layer.module], config)


def is_wanted(item: Match, config: SVDQuantConfig) -> bool:
    """Whether a layer is large enough and not excluded (a pattern may name a part of the name)."""
    weight = item.layer.module._parameters["weight"]
    return (
        not is_excluded(item.layer.names, config.exclude_patterns)
        and weight is not None
        and min(weight.shape) >= config.min_layer_size
    )


def read_all(context: ModelContext, items: list[Match]) -> dict[nn.Module, PlaceInputs]:
    """The inputs of layers, from one run of the float model per sample."""
    names = {item.layer.name: item.layer.module for item in items}
    keep = max(1, ROWS // len(context.samples))
    found: dict[nn.Module, PlaceInputs] = {}

    def see(name: str, x: torch.Tensor) -> None:
        if x.numel():
            zeros = torch.zeros(x.shape[-1], device=x.device)
            found.setdefault(names[name], PlaceInputs(zeros, zeros.clone())).add(x, keep, squares=False)

    watch = Watch(names, see, stop=False)
    for sample in context.samples:
        watch.run(partial(run, context.model, sample))
    return found


def correct(context: ModelContext, item: Match, inputs: PlaceInputs, config: SVDQuantConfig) -> None:
    """Find the best smoothing of one layer and wrap it, if that pays."""
    weight, rows = matrix(item.layer.module, item.layer.kind), inputs.sample[:ROWS]
    wanted = rows @ weight.T
    alphas = (config.alpha_candidates or ALPHAS) if config.search_alpha else [config.smooth_alpha]
    plain = quantize_new(new_quantizer(item, "input_tensors"), rows) @ quantized_matrix(item, weight).T

    def error(s: torch.Tensor, parts: list[LowRankSplit]) -> float:
        return error_of(item, parts[0], rows / s, wanted)

    best = best_split([weight], inputs.amax, alphas, config.svd_rank, error, float((plain - wanted).square().mean()))
    if best is None:
        log.info("%s gets no correction: it would not lower the error", item.layer.name)
        return
    s, (parts,) = best
    wrap(context, item, parts, s)


def error_of(item: Match, parts: LowRankSplit, x: torch.Tensor, wanted: torch.Tensor) -> float:
    """Mean squared error of a split layer."""
    quantized = quantize_new(new_quantizer(item, "input_tensors"), x) @ quantized_matrix(item, parts.residual).T
    return float((quantized + x @ parts.down.T @ parts.up.T - wanted).square().mean())


def wrap(context: ModelContext, item: Match, parts: LowRankSplit, s: torch.Tensor) -> None:
    """Put ``ErrorCorrected`` in the place of a layer, under all its names."""
    layer = item.layer.module
    stored = parts.residual.T.contiguous() if item.layer.kind.transposed else parts.residual
    context.undo.set_parameter(layer, "weight", stored)
    module = ErrorCorrected(layer, parts.down, parts.up, s)
    module.train(layer.training)
    for parent in list(context.model.modules()):
        for name, child in list(parent._modules.items()):
            if child is layer and parent is not module:
                parent._modules[name] = module
                context.undo.actions.append(partial(parent._modules.__setitem__, name, layer))
