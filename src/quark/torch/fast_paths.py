"""Encoder layers of torch, whose fused kernel reads the weights of their layers and does not call them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def leave_fast_paths(model: nn.Module) -> None:
    """Let all encoder layers call their layers, which are quantized."""
    found = fast_paths(model)
    set_fast_paths(found, dict.fromkeys(found, 0))


def fast_paths(model: nn.Module) -> dict[nn.Module, int]:
    """The encoder layers of torch whose fused kernel would read float weights past their quantized layers."""
    layers = (module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer))
    return {layer: layer.activation_relu_or_gelu for layer in layers}


def set_fast_paths(layers: Iterable[nn.Module], activations: dict[nn.Module, int]) -> None:
    """Let the fused kernel know an activation (1, 2), or none (0): then it is not used."""
    for layer in layers:
        layer.__dict__["activation_relu_or_gelu"] = activations[layer]
