"""The quantizer of an int32 bias: its scale is that of the products it is added to,  s_b = s_x s_w,  at any time."""

from __future__ import annotations

import torch

from quark.numerics.granularity import Channel, Tensor
from quark.torch.fake_quantize import FakeQuantize, zero_point_of
from quark.torch.plan_rows import on_axis


class BiasQuantizer(FakeQuantize):
    """Quantizes a bias with the product of two scales, which it does not keep: they may still be learned.

    Attributes:
        factors: the quantizers of the input and of the weight (no submodules).
    """

    def __init__(self, bias: FakeQuantize, source: FakeQuantize, weight: FakeQuantize) -> None:
        granularity = Tensor() if isinstance(weight.granularity, Tensor) else Channel(0)
        super().__init__(on_axis(bias.stage, granularity), bias.tensor_name)
        self.factors = (source, weight)
        self.enabled = bias.enabled
        self.zero_point = torch.zeros_like(zero_point_of(weight), dtype=torch.int32)

    def register_scale(self) -> None:
        """There is nothing to keep."""

    @property
    def scale(self) -> torch.Tensor | None:  # type: ignore[override]
        """s_x s_w."""
        source, weight = (part.scale for part in self.factors)
        return None if source is None or weight is None else source * weight
