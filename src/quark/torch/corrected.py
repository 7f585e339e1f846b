"""``ErrorCorrected``: a quantized linear layer with a small float branch beside it.

x' = x / smooth;    y = layer(x') + l2(l1(x'))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quark.torch.first_input import first_input
from quark.torch.layers import own_parameter


class ErrorCorrected(nn.Module):
    """The branch and the layer.

    Attributes:
        layer: the linear layer (of the smoothed residual), which is quantized.
        correction: ``l1`` [rank, in] and ``l2`` [out, rank], float, without bias.
        smooth: what inputs are divided by, [in].
    """

    smooth: torch.Tensor

    def __init__(
        self,
        layer: nn.Module,
        down: torch.Tensor,
        up: torch.Tensor,
        smooth: torch.Tensor,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        weight = own_parameter(layer)
        device, dtype = weight.device, dtype or weight.dtype
        # on "meta" nothing is initialized: the caller's random state stays as it is
        l1, l2 = (nn.Linear(one.shape[1], one.shape[0], bias=False, device="meta") for one in (down, up))
        # contiguous, as files hold them: products of another layout add in another order
        factors = (value.to(device, dtype).contiguous() for value in (down, up))
        l1.weight, l2.weight = (nn.Parameter(value, requires_grad=False) for value in factors)
        self.layer = layer
        self.correction = nn.ModuleDict({"l1": l1, "l2": l2})
        self.register_buffer("smooth", smooth.to(device, dtype))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The answer of the layer to its input, corrected."""
        x = first_input(self.layer, args, kwargs) / self.smooth
        return self.layer(x) + self.correction["l2"](self.correction["l1"](x))

    @property
    def weight(self) -> torch.Tensor:
        """That of the layer: some models ask for its type or device."""
        layer: Any = self.layer
        return layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """That of the layer."""
        layer: Any = self.layer
        return layer.bias

    @property
    def in_features(self) -> int:
        """Length of its inputs."""
        return len(self.smooth)

    @property
    def out_features(self) -> int:
        """Length of its outputs."""
        return int(self.correction.get_parameter("l2.weight").shape[0])
