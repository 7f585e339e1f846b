"""Float layers that answer as if they were quantized, for as long as it takes to see what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from quark.torch.algorithms.context import matrix, new_quantizer
from quark.torch.algorithms.rows import by_scale, finds_infinity, group_of_row
from quark.torch.fake_quantize import FakeQuantize, Quantizer, calibrate_with, parts
from quark.torch.first_input import Arguments, attached, first_input, with_input
from quark.torch.layers import own_parameter
from quark.torch.matching import Match


@contextmanager
def quantizing(items: list[Match]) -> Iterator[None]:
    """Float layers that answer as if they were quantized; static input ranges are those of each input."""
    saved = [(item.layer.module, item.layer.module._parameters["weight"]) for item in items]
    hooks = list[RemovableHandle]()
    for item in items:
        module, kind = item.layer.module, item.layer.kind
        value = quantized_matrix(item, matrix(module, kind))
        stored = value.T if kind.transposed else value
        module._parameters["weight"] = nn.Parameter(stored.to(own_parameter(module).dtype), requires_grad=False)
        if item.stages["input_tensors"]:
            hooks.append(module.register_forward_pre_hook(input_hook(item), with_kwargs=True))
    try:
        with attached(hooks):
            yield
    finally:
        for module, weight in saved:
            module._parameters["weight"] = weight


def input_hook(item: Match) -> Callable[..., Arguments]:
    """Quantizes the first input of a layer."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        x = quantize_new(new_quantizer(item, "input_tensors"), first_input(module, args, kwargs))
        return with_input(module, args, kwargs, x)

    return before


@torch.no_grad()
def quantize_new(quantizer: Quantizer | None, x: torch.Tensor) -> torch.Tensor:
    """``x`` through a quantizer whose ranges are those of ``x``; what it knew before does not matter."""
    if quantizer is None or not x.numel():
        return x
    if isinstance(quantizer, FakeQuantize) and finds_infinity(quantizer.stage):
        return quantizer.quantized_under(x, quantizer.parameters_from(x))  # as below, at half of the cost
    calibrate_with(quantizer, x)
    for part in parts(quantizer):
        x = part.quantized(x)
    return x


def quantized_matrix(item: Match, weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] as the layer would quantize it."""
    return rounding_of(item)(weight)


def rounding_of(item: Match) -> Callable[[Any], torch.Tensor]:
    """A function: a weight [out, in] as the layer would quantize it."""
    quantizer, transposed = new_quantizer(item, "weight"), item.layer.kind.transposed
    rows, size = by_scale(item), group_of_row(item)

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        if rows is not None and size is not None and weight.shape[1] % size == 0:
            made = rows.matrix(weight.reshape(-1, size))
            if made is not None:
                return made.reshape(weight.shape)
        stored = quantize_new(quantizer, weight.T if transposed else weight)
        return stored.T if transposed else stored

    return rounded


def error_of(item: Match) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function of a weight [out, in] and scales [in]: what rounding adds to the weight, Q(w s) / s - w."""
    rounded, rows, size = rounding_of(item), by_scale(item), group_of_row(item)

    def error(weight: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        if rows is not None and size is not None and weight.shape[1] % size == 0:
            made = rows.error(weight, s, size)
            if made is not None:
                return made
        return rounded(weight * s).div_(s).sub_(weight)

    return error
