"""Small models for the tests of the torch flow."""

from __future__ import annotations

import torch
from torch import nn


class TwoLayers(nn.Module):
    """fc1, ReLU, fc2 on vectors of 16."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 8)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        x = x if extra is None else x + extra
        return self.fc2(self.fc1(x).relu())


def data(count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(5, 16, generator=generator) for _ in range(count)]
