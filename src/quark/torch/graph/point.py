"""The quantizer of one activation of a graph, as the module that the graph calls."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quark.torch.fake_quantize import Quantizer


class QuantizationPoint(nn.Module):
    """Quantizes an activation; the graph may call it for several tensors, which then share its scale."""

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self.quantizer = quantizer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` quantized."""
        return self.quantizer(x)


def points(model: nn.Module) -> Iterator[tuple[str, QuantizationPoint]]:
    """(name, module) of the quantizers of activations in a graph."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizationPoint))
