"""Quantizers put on the layers that were matched, and taken off again; ``freeze``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quark.torch.config.model import SLOTS
from quark.torch.fake_quantize import Quantizer, calibrate_with, parts
from quark.torch.layers import own_parameter
from quark.torch.learned import LearnedScale, learning_quantizer
from quark.torch.matching import Match, Matches
from quark.torch.quantized_layer import OWN, QuantLayer, attach, detach, forget_quantized


def prepare(found: Matches, ranges: bool = True) -> None:
    """Attach quantizers to every layer, and (where they are in memory) fix the ranges of weights and biases."""
    for item in found.quantized:
        module = item.layer.module
        quantizers = {slot: quantizer_of(item, slot) for slot in SLOTS}
        for slot in ("weight", "bias"):
            quantizer = quantizers[slot]
            if quantizer is not None and ranges:
                calibrate_with(quantizer, getattr(module, slot))
        attach(module, quantizers)
        for quantizer in quantizers.values():
            if quantizer is not None:
                quantizer.train(module.training)


def quantizer_of(item: Match, slot: str, make: Callable[..., Quantizer] = learning_quantizer) -> Quantizer | None:
    """A fresh quantizer for one tensor of a layer, not attached."""
    return make(item.stages[slot], f"{slot} of {item.layer.name!r}", slot in OWN) if item.stages[slot] else None


def restore(found: Matches) -> None:
    """Make every layer what it was."""
    for item in found.quantized:
        detach(item.layer.module)


def bake(layers: list[QuantLayer]) -> None:
    """Replace the parameters of ``layers`` by their quantized values; equal ones stay shared.

    ``before`` keeps the float parameters alive, so that their ids stay theirs.
    """
    made: dict[tuple[Any, ...], nn.Parameter] = {}
    before = [layer._parameters[name] for layer in layers for name in OWN if name in layer._parameters]
    for layer in layers:
        for name, value in layer.quantized_parameters().items():
            old, quantizer = own_parameter(layer, name), layer.own_quantizer(name)
            keep_ranges(quantizer, old.detach())
            learned = tuple(id(part) for part in parts(quantizer) if isinstance(part, LearnedScale))
            key = (id(old), str(quantizer), type(layer).__name__, learned)
            if key not in made:
                made[key] = nn.Parameter(value, requires_grad=old.requires_grad)
            layer._parameters[name] = made[key]
        layer.frozen = True
        forget_quantized([layer])
    del before


def keep_ranges(quantizer: Quantizer, x: torch.Tensor) -> None:
    """Dynamic ranges stay those of the float values ``x``: the quantized ones would not give them again."""
    stages = list(parts(quantizer))
    for part in stages:
        if part.scale is None:
            part.scale, part.zero_point = part.parameters_from(x)
        x = x if part is stages[-1] else part.quantized(x)
