"""Cross-layer equalization and bias correction on networks whose structure is in no table."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from quark.errors import ConfigError, DataError
from quark.torch import ModelQuantizer
from quark.torch.algorithms.gain import last_layers
from quark.torch.quantization.config.config import (
    BiasCorrectionConfig,
    CLEConfig,
    GPTQConfig,
    Int4PerChannelSpec,
    Int8PerTensorSpec,
    QConfig,
    QLayerConfig,
    QTensorConfig,
    Uint4PerTensorSpec,
)
from quark.torch.quantization.config.type import QSchemeType
from quark.torch.quantization.observer.observer import PerTensorPercentileObserver
from quark.torch.structure_channels import find_spreads

INT8 = QLayerConfig(weight=Int8PerTensorSpec().to_quantization_spec())
INT4 = QLayerConfig(weight=Int4PerChannelSpec(ch_axis=0).to_quantization_spec())
UINT4 = Uint4PerTensorSpec().to_quantization_spec()
FULL = QLayerConfig(Int8PerTensorSpec().to_quantization_spec(), weight=INT8.weight)


class Net(nn.Module):
    """Depthwise, grouped and transposed convolutions, two readers, a concatenation, a flattening, a SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.left, self.right = nn.Conv2d(8, 6, 1), nn.Conv2d(8, 6, 3, padding=1)
        self.grouped = nn.Conv2d(12, 8, 1, groups=2)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head, self.last = nn.Linear(4 * 16, 10), nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(self.deep(nn.functional.relu(self.first(x))))
        x = torch.cat([nn.functional.relu(self.left(x)), nn.functional.leaky_relu(self.right(x))], 1)
        x = nn.functional.avg_pool2d(nn.functional.relu(self.grouped(x)), 4)
        x = nn.functional.relu(self.up(x)).flatten(1)
        return self.last(nn.functional.silu(self.head(x)))


def net(uneven: bool = True) -> Net:
    """With ``uneven``, channels of the first layers differ by up to 2^10 in size, which their readers take back."""
    torch.manual_seed(0)
    model = Net().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
        if uneven:
            r = 2.0 ** torch.linspace(-5, 5, 8)
            for layer in (model.first.weight, model.first.bias, model.deep.bias):
                layer.mul_(r.reshape(-1, *[1] * (layer.dim() - 1)))
            for reader in (model.left, model.right):
                reader.weight.div_(r.reshape(1, -1, 1, 1))
    return model


def data(count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, 8, 8, generator=generator) for _ in range(count)]


def quantize(layer: QLayerConfig, *algorithms: object, model: nn.Module | None = None) -> nn.Module:
    config = QConfig(layer, algo_config=list(algorithms))
    return ModelQuantizer(config).quantize_model(net() if model is None else model, data())


@torch.no_grad()
def error(model: nn.Module) -> float:
    return sum(float((model(x) - net()(x)).square().sum()) for x in data())


def test_readers_are_found_from_the_model() -> None:
    model = net()
    found = {
        spread.source: {reader.name: reader.channels.tolist() for reader in spread.readers}
        for spread in find_spreads(model, lambda: model(data()[0]).detach())
    }
    assert set(found) == {"first", "deep", "left", "right", "grouped", "up"}  # not head: SiLU bends
    assert set(found["deep"]) == {"left", "right"}
    assert found["right"] == {"grouped": [-1] * 6 + list(range(6))}
    assert found["up"] == {"head": [channel for channel in range(4) for _ in range(16)]}


def test_cle_keeps_the_function_and_repairs_uneven_channels() -> None:
    plain, equal = quantize(INT8), quantize(INT8, CLEConfig())
    assert error(equal) < 0.02 * error(plain)
    weights = {name: module.weight for name, module in equal.named_modules() if name and hasattr(module, "float_class")}
    twin = net()
    for name, weight in weights.items():
        twin.get_submodule(name).weight = nn.Parameter(weight.detach())
        twin.get_submodule(name).bias = nn.Parameter(equal.get_submodule(name).bias.detach())
    changed = [name for name, module in net().named_modules() if name and not torch.equal(module.weight, weights[name])]
    assert {"first", "deep", "left", "right"} <= set(changed)
    for x in data():
        torch.testing.assert_close(twin(x), net()(x), rtol=1e-4, atol=1e-5)


def test_a_channel_that_somebody_else_reads_is_left() -> None:
    class Leaky(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.first(x).mean()

    model = Leaky().eval()
    assert "first" not in {spread.source for spread in find_spreads(model, lambda: model(data()[0]).detach())}


def test_bias_correction_moves_the_means_back() -> None:
    def means(model: nn.Module) -> dict[str, torch.Tensor]:
        found: dict[str, list[torch.Tensor]] = {}
        hooks = [
            module.register_forward_hook(lambda m, a, y, name=name: found.setdefault(name, []).append(y.detach()))
            for name, module in model.named_modules()
            if name
        ]
        for x in data():
            model(x)
        for hook in hooks:
            hook.remove()
        return {name: torch.cat(ys).transpose(0, 1).flatten(1).mean(1) for name, ys in found.items() if "_" not in name}

    known = means(net())
    plain, corrected = quantize(INT4), quantize(INT4, BiasCorrectionConfig())
    before, after = means(plain), means(corrected)
    shift = {name: float((before[name] - known[name]).abs().max()) for name in known}
    left = {name: float((after[name] - known[name]).abs().max()) for name in known}
    assert left["last"] < 1e-4 * shift["last"]
    assert sum(left.values()) < 0.8 * sum(shift.values())
    assert error(corrected) < 0.8 * error(plain)
    for name, module in net().named_modules():
        if name:
            assert torch.equal(corrected.get_submodule(name).weight, module.weight)


class Heads(nn.Module):
    """Two last layers; the input of one is a normalization of what the other reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8)
        self.boxes, self.scores = nn.Conv2d(8, 4, 1), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = nn.functional.relu(self.first(x))
        return [self.boxes(x), self.scores(self.norm(x.movedim(1, -1))).movedim(-1, 1)]


class Clips(PerTensorPercentileObserver):
    """Cuts the largest tenth of the values off."""

    percentile = 90.0


@pytest.mark.parametrize("weight", [INT8.weight, UINT4, INT4.weight], ids=["per tensor", "asymmetric", "per channel"])
def test_gain_gives_the_last_layers_their_deviations_back(weight: QTensorConfig) -> None:
    layer = QLayerConfig(replace(INT8.weight, observer_cls=Clips), weight=weight)

    def heads() -> nn.Module:
        torch.manual_seed(2)
        return Heads().eval()

    def slopes(model: nn.Module) -> torch.Tensor:
        pairs = []
        for k in range(2):
            y, z = (
                torch.cat([one(x)[k] for x in data()]).transpose(0, 1).flatten(1).detach() for one in (heads(), model)
            )
            y, z = y - y.mean(1, keepdim=True), z - z.mean(1, keepdim=True)
            pairs.append((y * z).sum(1) / y.square().sum(1))
        return torch.cat(pairs)

    plain, gained = (quantize(layer, BiasCorrectionConfig(gain=gain), model=heads()) for gain in (False, True))
    before, after = ((slopes(model) - 1).abs() for model in (plain, gained))
    shared = weight.qscheme is QSchemeType.per_tensor  # then channels grow no further than the codes reach
    assert after.mean() < (0.8 if shared else 0.05) * before.mean() and bool((after < before + 1e-6).all())
    assert torch.equal(plain.first.weight, gained.first.weight)  # others read what it writes
    for layer in (gained.boxes, gained.scores):
        rounded = layer.weight_quantizer(layer.weight)
        assert bool(((rounded - layer.weight).abs().flatten(1).amax(1) <= 0.501 * layer.weight_quantizer.scale).all())


def test_a_layer_that_decides_whether_another_runs_is_not_last() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.more = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = self.gate(x)
            return self.more(x) if chosen.sum() == 3 * chosen[0, 0] else chosen

    model = Gate().eval()
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.bias.fill_(1.0)
    assert last_layers(model, lambda: [model(torch.ones(1, 3))]) == {model.more}


def test_gain_is_refused_for_decoder_blocks() -> None:
    model = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(2)])
    model.forward = lambda x: model[1](model[0](x))
    config = BiasCorrectionConfig(gain=True, model_decoder_layers="blocks")
    holder = nn.Module()
    holder.blocks, holder.forward = model, model.forward
    with pytest.raises(ConfigError, match=r"gain=True .* the decoder blocks 'blocks'"):
        ModelQuantizer(QConfig(INT8, algo_config=[config])).quantize_model(holder.eval(), [torch.randn(2, 8)])


@pytest.mark.parametrize("layer", [INT8, INT4, FULL], ids=["int8", "int4", "w8a8"])
@pytest.mark.parametrize(
    "algorithms",
    [(CLEConfig(),), (BiasCorrectionConfig(),), (CLEConfig(cle_steps=1), GPTQConfig(), BiasCorrectionConfig())],
    ids=["cle", "bias", "all"],
)
def test_never_worse_and_frozen_alike(layer: QLayerConfig, algorithms: tuple[object, ...]) -> None:
    model = quantize(layer, *algorithms)
    assert error(model) <= 1.02 * error(quantize(layer))
    x = data()[0]
    before = model(x)
    assert torch.equal(ModelQuantizer.freeze(copy.deepcopy(model))(x), before)


def test_what_cannot_work_is_refused_and_leaves_the_model() -> None:
    for fields in ({"cle_steps": 0}, {"cle_weight_threshold": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(fields))):
            CLEConfig(**fields)  # type: ignore[arg-type]
    for config in (CLEConfig(), BiasCorrectionConfig()):
        model = net()
        with pytest.raises(DataError, match=config.name):
            ModelQuantizer(QConfig(INT8, algo_config=[config])).quantize_model(model)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), net().parameters(), strict=True))
