"""Cross-layer equalization for the torch flow: channels scaled between a layer and those that read it.

In a model with decoder blocks the places are its pairs of linear layers (``scaling``), block by block. In any other
model every linear layer and convolution is tried (``quark.torch.structure_channels``): readers may be several, may
read other layers too, and may stand behind a flattening. The model keeps its function; the scales of a layer that do
not lower the error of the quantized model on a few samples are taken back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from quark.algorithms.cle import magnitudes, pair_scales
from quark.errors import DataError
from quark.torch.algorithms.blocks import find_blocks
from quark.torch.algorithms.context import ModelContext, matrix
from quark.torch.algorithms.guard import model_error
from quark.torch.algorithms.judge import ScaleJudge
from quark.torch.algorithms.scaling import ReadPlace, effective, scale_places
from quark.torch.algorithms.smooth import best
from quark.torch.config.algorithms import CLEConfig
from quark.torch.layers import kind_of, known_kind, own_parameter
from quark.torch.outputs import tensors_of
from quark.torch.structure import run_model
from quark.torch.structure_channels import ChannelReader, Spread, find_spreads

log = logging.getLogger(__name__)


@torch.no_grad()
def run_cle(context: ModelContext, config: CLEConfig) -> None:
    """Equalize the channels of ``context.model``.

    Raises:
        DataError: no samples.
    """
    if not context.samples:
        raise DataError("cle finds the layers that read each other by running the model: give a dataloader")
    if find_blocks(context.model, config.model_decoder_layers).path:
        scale_places(context, None, config.model_decoder_layers, partial(equalize_pairs, config))
        return
    forward = partial(answers_of, context)
    spreads = list(find_spreads(context.model, forward))
    quantized = {name for item in context.found.quantized for name in item.layer.names}
    spreads = [spread for spread in spreads if quantized & {spread.source, *(r.name for r in spread.readers)}]
    log.info("cle: %d layers whose channels can be scaled", len(spreads))

    error = model_error(context)
    lowest = error() if spreads else 0.0
    for _ in range(config.cle_steps):
        for spread in spreads:
            lowest = keep_if_better(context, spread, config, error, lowest)


def keep_if_better(
    context: ModelContext, spread: Spread, config: CLEConfig, error: Callable[[], float], lowest: float
) -> float:
    """Equalize one place, and put its weights back if the error is not below ``lowest``; the error left."""
    modules = dict(context.model.named_modules())
    touched = [modules[name] for name in (spread.source, *(reader.name for reader in spread.readers))]
    before = [dict(module._parameters) for module in touched]
    equalize(context, spread, config)
    now = error()
    if now < lowest:
        return now
    for module, parameters in zip(touched, before, strict=True):
        module._parameters.update(parameters)
    return lowest


def answers_of(context: ModelContext) -> list[torch.Tensor]:
    """What the model answers to the first sample."""
    return tensors_of(run_model(context.model, context.samples[0]))


def equalize_pairs(
    config: CLEConfig, context: ModelContext, asked: Sequence[ReadPlace]
) -> Iterator[torch.Tensor | None]:
    """Pairs of linear layers of a block, each when those before it are equalized: what it writes counts."""
    return (equalize_pair(config, context, one) for one in asked)


def equalize_pair(config: CLEConfig, context: ModelContext, one: ReadPlace) -> torch.Tensor | None:
    """One pair of linear layers of a block."""
    place, items, inputs = one.place, one.items, one.inputs
    if place.channels is None:
        return None
    source = dict(context.model.named_modules())[place.source]
    head = matrix(source, known_kind(source))[place.channels].abs().amax(1)
    tail = torch.stack([matrix(item.layer.module, item.layer.kind).abs().amax(0) for item in items]).amax(0)
    s = pair_scales(head.double().cpu().numpy(), tail.double().cpu().numpy(), config.cle_weight_threshold)
    wanted = torch.from_numpy(1 / s).float().to(head.device)
    return best(place, ScaleJudge(items, inputs.sample), [effective(context, place, wanted)])


def equalize(context: ModelContext, spread: Spread, config: CLEConfig) -> None:
    """Scale what a layer writes and those that read it, as ``pair_scales`` says."""
    modules = dict(context.model.named_modules())
    source = modules[spread.source]
    view = channel_view(source)
    rows = view.reshape(view.shape[0] * view.shape[1], -1)
    bias = source._parameters.get("bias")
    count = bias if config.cle_scale_append_bias else None
    head = magnitudes(array(rows), None if count is None else array(count))
    tail = np.max([read_magnitudes(modules[reader.name], reader, len(head)) for reader in spread.readers], 0)
    rescale(context, spread, pair_scales(head, tail, config.cle_weight_threshold))


def rescale(context: ModelContext, spread: Spread, scales: np.ndarray) -> None:
    """Multiply what a layer writes by ``scales`` [channels], and divide where it is read."""
    modules = dict(context.model.named_modules())
    source = modules[spread.source]
    view, bias = channel_view(source), source._parameters.get("bias")
    s = torch.from_numpy(scales).to(view.device)
    set_view(context, source, view * s.reshape(view.shape[0], view.shape[1], 1, 1))
    if bias is not None:
        context.undo.set_parameter(source, "bias", bias.detach().double() * s)
    for reader in spread.readers:
        module = modules[reader.name]
        view = channel_view(module)
        back = torch.where(reader.channels < 0, torch.ones_like(reader.channels, dtype=s.dtype), s[reader.channels])
        set_view(context, module, view / back.reshape(view.shape[0], 1, view.shape[2], 1))


def read_magnitudes(module: nn.Module, reader: ChannelReader, count: int) -> np.ndarray:
    """The largest weight that each of ``count`` channels meets in a layer, [count]."""
    view = channel_view(module)
    columns = view.abs().amax((1, 3)).reshape(-1)
    used = reader.channels >= 0
    found = torch.zeros(count, dtype=columns.dtype, device=columns.device)
    return array(found.scatter_reduce(0, reader.channels[used], columns[used], "amax"))


def array(x: torch.Tensor) -> np.ndarray:
    """``x`` as float64 NumPy."""
    return x.detach().double().cpu().numpy()


def channel_view(module: nn.Module, values: torch.Tensor | None = None) -> torch.Tensor:
    """The weight, or ``values`` of its elements, as float64 [groups, out / groups, in / groups, positions]."""
    kind = kind_of(module)
    weight = (own_parameter(module).detach() if values is None else values).double()
    groups = getattr(module, "groups", 1)
    if kind is not None and kind.transposed:  # [in, out]
        return weight.T[None, :, :, None]
    if isinstance(module, nn.ConvTranspose2d):  # [in, out / groups, ..]
        parts = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
        return parts.transpose(1, 2)
    return weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)


def set_view(context: ModelContext, module: nn.Module, view: torch.Tensor) -> None:
    """Give a layer the weight that ``channel_view`` would show as ``view``."""
    kind = kind_of(module)
    shape = own_parameter(module).shape
    if kind is not None and kind.transposed:
        view = view[0, :, :, 0].T
    elif isinstance(module, nn.ConvTranspose2d):
        view = view.transpose(1, 2)
    context.undo.set_parameter(module, "weight", view.reshape(shape).contiguous())
