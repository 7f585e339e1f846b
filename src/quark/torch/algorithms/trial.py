"""Float layers that answer as if they were quantized, for as long as it takes to see what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from quark.torch.algorithms.context import matrix, new_quantizer
from quark.torch.fake_quantize import Quantizer, calibrate_with, parts
from quark.torch.layers import own_parameter
from quark.torch.matching import Match


@contextmanager
def quantizing(items: list[Match]) -> Iterator[None]:
    """Float layers that answer as if they were quantized; static input ranges are those of each input."""
    saved = [(item.layer.module, item.layer.module._parameters["weight"]) for item in items]
    hooks = []
    for item in items:
        module, kind = item.layer.module, item.layer.kind
        value = quantized_matrix(item, matrix(module, kind))
        stored = value.T if kind.transposed else value
        module._parameters["weight"] = nn.Parameter(stored.to(own_parameter(module).dtype), requires_grad=False)
        if item.stages["input_tensors"]:
            hooks.append(module.register_forward_pre_hook(input_hook(item)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, weight in saved:
            module._parameters["weight"] = weight


def input_hook(item: Match) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Quantizes the first input of a layer."""

    def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (quantize_new(new_quantizer(item, "input_tensors"), args[0]), *args[1:])

    return before


def quantize_new(quantizer: Quantizer | None, x: torch.Tensor) -> torch.Tensor:
    """``x`` through a fresh quantizer whose ranges are those of ``x``."""
    if quantizer is None or not x.numel():
        return x
    calibrate_with(quantizer, x)
    for part in parts(quantizer):
        x = part.quantized(x)
    return x


def quantized_matrix(item: Match, weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] as the layer would quantize it."""
    stored = weight.T if item.layer.kind.transposed else weight
    stored = quantize_new(new_quantizer(item, "weight"), stored)
    return stored.T if item.layer.kind.transposed else stored
