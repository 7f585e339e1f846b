"""What models return: containers of every kind are read by every algorithm, and none of several outputs is changed."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.torch_flow.test_registry_contract import CONFIGS
from tests.torch_flow.test_unusual import whole
from torch import nn

from quark.errors import DataError
from quark.torch import ModelQuantizer
from quark.torch.algorithms.registry import ALGORITHMS
from quark.torch.outputs import answer, tensors_of
from quark.torch.quantization.config.config import (
    AdaQuantConfig,
    AdaRoundConfig,
    AutoRoundConfig,
    ChannelEqualizationConfig,
    Float16Spec,
    Int4PerGroupSpec,
    Int8PerTensorSpec,
    QConfig,
    QLayerConfig,
    RotationConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
)
from quark.torch.sensitivity import sensitivity
from quark.torch.structure import find_structure
from quark.torch.structure_channels import find_spreads

STATIC = Int8PerTensorSpec("min_max", symmetric=True, is_dynamic=False).to_quantization_spec()
WEIGHT = Int4PerGroupSpec(ch_axis=-1, group_size=8).to_quantization_spec()
INPUT = Int4PerGroupSpec(ch_axis=-1, group_size=8, is_dynamic=True).to_quantization_spec()
Pair = namedtuple("Pair", "loss scores")


@dataclass
class Detection:
    loss: Any
    scores: torch.Tensor


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tuple that begins with None": lambda x: (None, x),
    "a mapping that begins with None": lambda x: {"loss": None, "scores": x},
    "lists in lists": lambda x: [[x]],
    "lists in a mapping": lambda x: {"levels": [x]},
    "a named tuple": lambda x: Pair(None, x),
    "a dataclass": lambda x: Detection(None, x),
    "an object with logits": lambda x: SimpleNamespace(logits=x),
    "classes before scores": lambda x: (x.argmax(-1), x),
}


class Network(nn.Module):
    def __init__(self, pack: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.pack = pack
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(self.last(self.norm(self.first(x).relu())))


def build(pack: Callable[[torch.Tensor], Any]) -> nn.Module:
    torch.manual_seed(0)
    return Network(pack).eval()


def samples(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator) for _ in range(4)]


def quantized(pack: Callable[[torch.Tensor], Any], row: Any) -> torch.Tensor:
    """What the quantized network answers, as one tensor."""
    given: dict[type, Any] = {
        SVDQuantConfig: SVDQuantConfig(svd_rank=2, min_layer_size=16, alpha_candidates=[0.5]),
        AutoRoundConfig: AutoRoundConfig(iters=3, lr=0.05, minmax_lr=0.05, batch_size=4),
        AdaRoundConfig: AdaRoundConfig(num_iterations=10),
        AdaQuantConfig: AdaQuantConfig(num_iterations=10),
        RotationConfig: RotationConfig(online_r1_rotation=True, only_if_better=False),
    }
    conv = row.config is ChannelEqualizationConfig
    layer = QLayerConfig(STATIC, None, STATIC) if conv else QLayerConfig(INPUT, None, WEIGHT)
    config = QConfig(layer, algo_config=[given.get(row.config, CONFIGS[row.config])])
    data = samples(4, 16)
    model = ModelQuantizer(config).quantize_model(build(pack), data)
    with torch.no_grad():
        return torch.cat([answer(model(x)) for x in data])


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.parametrize("row", ALGORITHMS, ids=lambda row: row.config.name)
def test_every_algorithm_reads_every_container(row: Any) -> None:
    plain = quantized(lambda x: x, row)
    assert not torch.equal(plain, torch.cat([build(lambda x: x)(x) for x in samples(4, 16)]))
    for kind, pack in KINDS.items():
        assert torch.equal(quantized(pack, row), plain), kind


def test_sensitivity_reads_every_container() -> None:
    plain = sensitivity(build(lambda x: x), samples(4, 16), ["int8"], {"exclude": []}, "sqnr").trials
    for kind, pack in KINDS.items():
        assert sensitivity(build(pack), samples(4, 16), ["int8"], {"exclude": []}, "sqnr").trials == plain, kind


def test_an_output_without_numbers_is_refused() -> None:
    for output in (None, (), {"classes": torch.tensor([1])}, [None, ["text"]]):
        assert tensors_of(output) == []
        with pytest.raises(DataError, match="without a tensor of floating-point numbers"):
            answer(output)


def test_complex_numbers_are_compared() -> None:
    assert tensors_of(torch.tensor([1 + 2j]))[0].tolist() == [[1.0, 2.0]]


class Block(nn.Module):
    """Writes what it is told to beside its hidden state."""

    def __init__(self, tap: str) -> None:
        super().__init__()
        self.tap = tap
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        n = self.norm(x)
        y = self.up(n)
        return x + self.down(y.relu()), {"norm": n, "up": y, "": None}[self.tap]


class Tapped(nn.Module):
    """Blocks in a list, or one after the other under names of their own."""

    def __init__(self, tap: str, listed: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = (Block(tap) for _ in range(3))
        if listed:
            self.layers = nn.ModuleList([self.first, self.second, self.third])
            del self.first, self.second, self.third
        self.listed = listed

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        taps = []
        for block in self.layers if self.listed else (self.first, self.second, self.third):
            x, tap = block(x)
            taps += [] if tap is None else [tap]
        return x, *taps


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("tap", ["norm", "up", ""])
def test_nothing_that_an_output_reads_is_scaled(tap: str, listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each output stays: what feeds one beside the layers is in no group and no pair, whichever output comes first."""
    monkeypatch.setattr("quark.measure.guard.best_of", lambda *errors: 0)
    monkeypatch.setattr("quark.torch.algorithms.smooth.best_of_families", whole)
    torch.manual_seed(0)
    model = Tapped(tap, listed).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.copy_(torch.logspace(-1, 1, 16))
    data = samples(8, 16)
    with torch.no_grad():
        wanted = [model(x) for x in data]
    structure = find_structure(model, data[0])
    assert len(structure.groups) == (0 if tap == "norm" else 3)
    assert len(structure.pairs) == (0 if tap == "up" else 3)
    config = QConfig(
        QLayerConfig(weight=Float16Spec().to_quantization_spec()), algo_config=[SmoothQuantConfig(alpha=0.5)]
    )
    model = ModelQuantizer(config).quantize_model(model, data)
    with torch.no_grad():
        for x, outputs in zip(data, wanted, strict=True):
            for found, value in zip(model(x), outputs, strict=True):
                assert torch.allclose(found, value, atol=3e-3 * float(value.abs().max()))


@pytest.mark.parametrize("tap", [True, False])
def test_channels_that_an_output_reads_are_not_scaled(tap: bool) -> None:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
    model = nn.ModuleDict({"first": first, "second": second})

    def forward() -> list[torch.Tensor]:
        y = first(x)
        return [second(y.relu()), *([y] if tap else [])]

    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert [spread.source for spread in find_spreads(model, forward)] == ([] if tap else ["first"])
