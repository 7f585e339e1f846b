"""AdaRound and AdaQuant on torch modules: every kind of layer with features, on samples that decided nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.layers import KINDS
from quark.torch.quantization.config.config import (
    AdaQuantConfig,
    AdaRoundConfig,
    Int4PerChannelSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
)

INPUTS = Int8PerTensorSpec().to_quantization_spec()
W4A8 = QLayerConfig(input_tensors=INPUTS, weight=Int4PerChannelSpec(ch_axis=0).to_quantization_spec())
MXFP4 = QLayerConfig(weight=OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec())


class Net(nn.Module):
    """A convolution of every kind, grouped and transposed ones too, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.depthwise = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.volume, self.up = nn.Conv3d(16, 12, (1, 2, 2)), nn.ConvTranspose2d(12, 8, 2, stride=2)
        self.line, self.head = nn.Conv1d(8, 12, 3), nn.Linear(12, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.depthwise(torch.relu(self.first(x))))
        y = self.up(torch.relu(self.volume(y[:, :, None])[:, :, 0])).mean(3)
        return self.head(torch.tanh(self.line(y)).mean(2))


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def samples(seed: int) -> list[torch.Tensor]:
    """Pictures that hang together, as those of a camera do."""
    shared, own = torch.Generator().manual_seed(9), torch.Generator().manual_seed(seed)
    base = torch.randn(6, 3 * 8 * 8, generator=shared)
    return [
        (torch.randn(4, 6, generator=own) @ base).reshape(4, 3, 8, 8) + 0.2 * torch.randn(4, 3, 8, 8, generator=own)
        for _ in range(8)
    ]


@torch.no_grad()
def noise(algorithm: Any, layer: QLayerConfig = W4A8) -> float:
    """The squared error on samples that decided nothing, over the squared answer."""
    config = QConfig(layer, algo_config=None if algorithm is None else [algorithm])
    found = ModelQuantizer(config).quantize_model(net(), samples(1))
    wanted = torch.cat([net()(x) for x in samples(2)])
    return float((torch.cat([found(x) for x in samples(2)]) - wanted).square().sum() / wanted.square().sum())


def test_the_network_has_every_kind_of_layer_with_features() -> None:
    kinds = {kind.type for kind in KINDS if kind.features is not None}
    assert kinds <= {type(module) for module in net().modules()}


@pytest.mark.parametrize(
    ("algorithm", "part"), [(AdaRoundConfig(num_iterations=120), 0.5), (AdaQuantConfig(num_iterations=120), 0.7)]
)
def test_four_bits_lose_less(algorithm: Any, part: float) -> None:
    assert noise(algorithm) < part * noise(None)


def test_adaround_only_rounds_up_or_down() -> None:
    """Every weight is one of the two codes around the float one, and some are not the nearest."""
    layers = ("first", "depthwise", "volume", "up", "line", "head")
    found: Any = ModelQuantizer(QConfig(W4A8, algo_config=[AdaRoundConfig(num_iterations=60)])).quantize_model(
        net(), samples(1)
    )
    moved = 0
    for name in layers:
        layer, weight = found.get_submodule(name), net().get_submodule(name).weight.detach()
        scale = layer.weight_quantizer.granularity.expand(layer.weight_quantizer.scale, tuple(weight.shape))
        steps, codes = weight / scale, layer.weight.detach() / scale
        torch.testing.assert_close(codes, codes.round(), atol=1e-4, rtol=0)
        inside = (steps > -8) & (steps < 7)
        assert ((codes - steps).abs()[inside] < 1 + 1e-4).all()
        moved += int(((codes - steps).abs() > 0.5 + 1e-3)[inside].sum())
    assert moved > 0


def test_block_formats_are_trained_by_adaquant_and_named_by_adaround(caplog: pytest.LogCaptureFixture) -> None:
    class Rows(nn.Sequential):
        pass

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Rows(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).eval()

    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(8, 32, generator=generator)
    data = [torch.randn(16, 8, generator=generator) @ mixed for _ in range(8)]

    @torch.no_grad()
    def loss(algorithm: Any) -> float:
        config = QConfig(MXFP4, algo_config=None if algorithm is None else [algorithm])
        found = ModelQuantizer(config).quantize_model(copy.deepcopy(model()), data)
        return sum(float((found(x) - model()(x)).square().sum()) for x in data)

    assert loss(AdaQuantConfig(num_iterations=100)) < 0.8 * loss(None)
    assert loss(AdaRoundConfig(num_iterations=5)) == loss(None)
    assert "adaround trains integers under static scales; rounded to nearest stay: 0, 2 (adaquant: any)" in caplog.text
