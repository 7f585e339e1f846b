"""Layers and blocks that are called with keywords, ``linear(input=x)`` and ``block(x=x)``, as diffusers does in places:
every algorithm and every measurement finds what it finds where they are called by position."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torch_flow.test_registry_contract import CONFIGS
from torch import nn

from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.algorithms.registry import ALGORITHMS
from quark.torch.calibration import to_device
from quark.torch.quantization.config.config import (
    ChannelEqualizationConfig,
    Int4PerGroupSpec,
    Int8PerTensorSpec,
    QConfig,
    QLayerConfig,
    RotationConfig,
    SVDQuantConfig,
)
from quark.torch.sensitivity import sensitivity

STATIC = Int8PerTensorSpec("min_max", symmetric=True, is_dynamic=False).to_quantization_spec()
WEIGHT = Int4PerGroupSpec(ch_axis=-1, group_size=8).to_quantization_spec()
INPUT = Int4PerGroupSpec(ch_axis=-1, group_size=8, is_dynamic=True).to_quantization_spec()


class Caller(nn.Module):
    """Calls its parts by position, or by the name of their first argument."""

    def __init__(self, words: bool) -> None:
        super().__init__()
        self.words = words

    def call(self, part: nn.Module, x: torch.Tensor) -> Any:
        return part(**{"x" if isinstance(part, Block) else "input": x}) if self.words else part(x)


class Block(Caller):
    def __init__(self, words: bool) -> None:
        super().__init__(words)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.call(self.down, self.call(self.up, self.call(self.norm, x)).relu())


class Network(Caller):
    def __init__(self, words: bool) -> None:
        super().__init__(words)
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.layers = nn.ModuleList(Block(words) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.call(self.embed, ids)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.call(self.head, x)


class Pictures(Caller):
    def __init__(self, words: bool) -> None:
        super().__init__(words)
        self.wide, self.back, self.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 1), nn.Linear(8, 24)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.call(self.head, self.call(self.back, self.call(self.wide, images).relu()).mean((2, 3)))


def build(kind: type[Caller], words: bool) -> nn.Module:
    torch.manual_seed(0)
    return kind(words).eval()


def samples(kind: type[Caller]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind is Pictures:
        return [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(4)]
    return [torch.randint(0, 24, (4, 12), generator=generator) for _ in range(4)]


def answers(model: nn.Module, kind: type[Caller]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(x) for x in samples(kind)])


def quantized(kind: type[Caller], words: bool, config: QConfig) -> nn.Module:
    return ModelQuantizer(config).quantize_model(build(kind, words), samples(kind))


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.parametrize("row", ALGORITHMS, ids=lambda row: row.config.name)
def test_every_algorithm(row: Any) -> None:
    given: dict[type, Any] = {
        SVDQuantConfig: SVDQuantConfig(svd_rank=2, min_layer_size=16),
        RotationConfig: RotationConfig(online_r1_rotation=True, only_if_better=False),
    }
    algorithm = given.get(row.config, CONFIGS[row.config])
    kind, layer = Network, QLayerConfig(INPUT, None, WEIGHT)
    if row.config is ChannelEqualizationConfig:
        kind, layer = Pictures, QLayerConfig(STATIC, None, STATIC)
    config = QConfig(layer, exclude=["head"], algo_config=[algorithm])
    by_word = answers(quantized(kind, True, config), kind)
    assert torch.equal(by_word, answers(quantized(kind, False, config), kind))
    assert not torch.equal(by_word, answers(build(kind, True), kind))


@pytest.mark.parametrize("kind", [Network, Pictures])
def test_measurements_and_files(kind: type[Caller], tmp_path: Path) -> None:
    config = QConfig(QLayerConfig(STATIC, STATIC, STATIC))
    both = [quantized(kind, words, config) for words in (False, True)]
    assert torch.equal(*(answers(model, kind) for model in both))
    losses = [
        sensitivity(build(kind, words), samples(kind), ["int8", "int4_wo_per_channel"], {"exclude": []}, "sqnr").trials
        for words in (False, True)
    ]
    assert len(losses[0]) >= 6 and losses[0] == losses[1]
    export_safetensors(both[1], tmp_path, weight_format="real_quantized")
    again = import_model_from_safetensors(build(kind, True), tmp_path)
    assert torch.equal(answers(again, kind), answers(both[1], kind))


def test_samples_keep_their_lists_and_tuples() -> None:
    """Qwen-Image takes a list of shapes, each a tuple, and tells them apart by their types."""
    Shape = namedtuple("Shape", "height width")
    given = {"shapes": [(1, 4, 4)], "pair": (Shape(2, 3), [4])}
    moved = to_device(given, torch.device("cpu"))
    assert moved == given and type(moved["pair"][0]) is Shape
