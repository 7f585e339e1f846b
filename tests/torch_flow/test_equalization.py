"""Equalization by data on torch modules: the function stays, per-tensor scales fit, the cost of the formula falls."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.torch_flow.export.networks import IDS, llama
from tests.torch_flow.test_cle_bias import FULL, INT4, INT8, Net, data, error, net, quantize
from torch import nn

from quark.errors import ConfigError, DataError
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import ChannelEqualizationConfig, QConfig


def floats(model: nn.Module, twin: nn.Module) -> nn.Module:
    """The float network with the weights and biases of a quantized one."""
    for name, module in model.named_modules():
        if hasattr(module, "float_class"):
            twin.get_submodule(name).weight = nn.Parameter(module.weight.detach())
            twin.get_submodule(name).bias = nn.Parameter(module.bias.detach())
    return twin


@pytest.mark.parametrize("layer", [FULL, INT8], ids=["weights and inputs", "weights"])
def test_the_function_stays_and_uneven_channels_are_repaired(layer: Any) -> None:
    plain, equal = quantize(layer), quantize(layer, ChannelEqualizationConfig(widest=2.0**12))
    assert error(equal) < 0.1 * error(plain)
    twin = floats(equal, net())
    for x in data():
        torch.testing.assert_close(twin(x), net()(x), rtol=1e-4, atol=1e-5)


def test_scales_differ_by_no_more_than_widest() -> None:
    twin = floats(quantize(FULL, ChannelEqualizationConfig(widest=16.0)), net())
    ratio = (twin.first.weight / net().first.weight).detach().flatten(1)
    sizes = ratio.nanmean(1)
    assert 1.5 < float(sizes.max() / sizes.min()) <= 16.0 * (1 + 1e-5)


class Two(nn.Module):
    """Two layers with a Relu between them, as the formula has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.one, self.other = nn.Linear(6, 8), nn.Linear(8, 5)
        with torch.no_grad():
            self.one.weight.mul_(2.0 ** torch.linspace(-4, 4, 8)[:, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.relu(self.one(x)))


def cost(model: Two, xs: list[torch.Tensor]) -> float:
    """Noise at the result: steps of the three tensors with one scale each, squared, by what reads them; 8 bits."""
    with torch.no_grad():
        v = torch.cat([torch.relu(model.one(x)) for x in xs]).double().numpy()
    w1, w2 = (layer.weight.detach().double().numpy() for layer in (model.one, model.other))
    reads = (w2**2).sum(0)  # of each channel
    signal = (reads * (v**2).mean(0)).sum()
    noise = np.abs(v).max() ** 2 * reads.sum()
    noise += np.abs(w1).max() ** 2 * (reads * (v**2).mean(0) / (w1**2).mean(1)).sum()
    noise += np.abs(w2).max() ** 2 * (reads * (v**2).mean(0) / (w2**2).mean(0)).sum()
    return float(noise / signal)


def test_the_cost_of_the_formula_falls_and_no_single_channel_would_lower_it() -> None:
    generator = torch.Generator().manual_seed(2)
    xs = [torch.randn(32, 6, generator=generator) for _ in range(8)]
    config = QConfig(FULL, algo_config=[ChannelEqualizationConfig(widest=2.0**20, steps=5)])
    made = floats(ModelQuantizer(config).quantize_model(Two().eval(), xs), Two())
    before, after = cost(Two(), xs), cost(made, xs)
    assert after < 0.2 * before
    for channel in range(8):
        for factor in (0.5, 2**-0.25, 2**0.25, 2.0):
            other = copy.deepcopy(made)
            with torch.no_grad():
                other.one.weight[channel] *= factor
                other.one.bias[channel] *= factor
                other.other.weight[:, channel] /= factor
            assert cost(other, xs) > after * (1 - 1e-3)


def test_what_does_not_help_is_left() -> None:
    even = net(uneven=False)
    plain, equal = (quantize(INT4, *algos, model=net(uneven=False)) for algos in ([], [ChannelEqualizationConfig()]))

    def lost(model: nn.Module) -> float:
        with torch.no_grad():
            return sum(float((model(x) - even(x)).square().sum()) for x in data())

    assert lost(equal) <= lost(plain)


def test_what_it_cannot_do_is_a_sentence() -> None:
    config = QConfig(FULL, algo_config=[ChannelEqualizationConfig()])
    with pytest.raises(DataError, match="there are no samples"):
        ModelQuantizer(QConfig(INT8, algo_config=[ChannelEqualizationConfig()])).quantize_model(Net().eval())
    with pytest.raises(
        ConfigError, match=r"has the decoder blocks 'model.layers'; allowed there: 'smooth', 'awq', 'cle'"
    ):
        ModelQuantizer(config).quantize_model(llama(), [IDS])
    with pytest.raises(ConfigError, match="steps=0 must be a positive integer"):
        ChannelEqualizationConfig(steps=0)
    with pytest.raises(ConfigError, match=r"widest=0.5 must be 1 or more"):
        ChannelEqualizationConfig(widest=0.5)
