"""Gain: what the last layers answer gets back the size of its deviations from the mean (``BiasCorrectionConfig.gain``).

    w' = g w,   b' = g b        g: one over the slope of the quantized answers over the float ones, channel by channel

Clipped and noisy inputs, and weights trained on them, make answers that keep their mean and shrink towards it, so that
rare large ones come out too small. A scale per output channel grows with its channel, so that all codes stay; where
channels share scales, the codes are rounded again, and a channel grows no further than they reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from quark.algorithms.bias_correction import growth, room
from quark.torch.algorithms.cle import array, channel_view, rescale
from quark.torch.algorithms.context import ModelContext
from quark.torch.fake_quantize import parts, zero_point_of
from quark.torch.layers import own_parameter
from quark.torch.matching import Match
from quark.torch.probe import edited, powers, trace
from quark.torch.structure_channels import Spread, along, axis_of, has_channels


def last_layers(model: nn.Module, forward: Callable[[], list[torch.Tensor]]) -> frozenset[nn.Module]:
    """The layers behind which no other stands: with their channels scaled, all others read what they read before.

    Args:
        model: in ``eval()``.
        forward: runs it on a sample and returns its answers.
    """
    layers = {name: module for name, module in model.named_modules() if has_channels(module)}
    seen, found = trace(layers, forward), set()
    for name in seen.order:
        with edited(layers, {}, {name: partial(scaled, layers[name])}):
            now = trace(layers, forward)
        others = (other for other in seen.order if other != name)
        if all(other in now.inputs and torch.equal(now.inputs[other], seen.inputs[other]) for other in others):
            found.add(layers[name])
    return frozenset(found)


def scaled(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """What a layer writes, each channel times a power of two of its own."""
    return y * along(powers(y.shape[axis_of(layer, y)], 5, y.device), layer, y)


def rows(layer: nn.Module, y: torch.Tensor) -> np.ndarray:
    """What a layer wrote, [positions, channels], float64."""
    y = y.movedim(axis_of(layer, y), -1)
    return array(y.reshape(-1, y.shape[-1]))


def amplify(
    context: ModelContext, name: str, item: Match, wanted: Sequence[np.ndarray], found: Sequence[np.ndarray]
) -> None:
    """Make the channels of the layer ``name`` larger by what they have lost.

    Args:
        context: of the model.
        name: of the layer in it.
        item: the layer.
        wanted, found: [positions, channels], what the float and the quantized layer wrote, sample by sample.
    """
    layer = item.layer.module
    factors, quantizer = growth(wanted, found, 1), layer._modules["weight_quantizer"]
    for part in parts(quantizer) if quantizer is not None else ():
        if part.scale is None:  # blocks find their scales when they are rounded
            continue
        scale, spec, weight = part.scale, part.stage.spec, own_parameter(layer)
        if scale.numel() == len(factors) > 1 and spec.scale_rule == "float32":
            part.scale = (scale.double() * torch.from_numpy(factors).to(scale.device).reshape(scale.shape)).float()
            continue
        steps, zeros = (
            array(part.granularity.expand(one, tuple(weight.shape))) for one in (scale, zero_point_of(part))
        )
        reach = channel_view(layer, torch.from_numpy(room(array(weight), steps, zeros, spec.row)))
        factors = np.minimum(factors, np.maximum(array(reach.flatten(0, 1).flatten(1).amin(1)), 1))
    rescale(context, Spread(name, ()), factors)
