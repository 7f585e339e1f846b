"""Contract of the registry: on the data of the calibration no algorithm leaves a real model worse than rounding to
nearest, and those that tune weights leave it better; tests run over the table, so a new row needs a line here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import pytest
import torch

from quark.errors import ConfigError
from quark.torch import ModelQuantizer
from quark.torch.algorithms.registry import ALGORITHMS
from quark.torch.quantization.config.config import (
    AdaQuantConfig,
    AdaRoundConfig,
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    BiasCorrectionConfig,
    ChannelEqualizationConfig,
    CLEConfig,
    GPTAQConfig,
    GPTQConfig,
    HQQConfig,
    Int4PerGroupSpec,
    QConfig,
    QLayerConfig,
    QronosConfig,
    RotationConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
)

WEIGHT = {group: Int4PerGroupSpec(ch_axis=-1, group_size=group).to_quantization_spec() for group in (32, 43)}
INPUTS = {
    group: Int4PerGroupSpec(ch_axis=-1, group_size=group, is_dynamic=True).to_quantization_spec() for group in (32, 43)
}
LAYERS = {
    "int4": {group: QLayerConfig(weight=WEIGHT[group]) for group in (32, 43)},
    "w4a4": {group: QLayerConfig(INPUTS[group], None, WEIGHT[group]) for group in (32, 43)},
}
CONFIGS: dict[type, Any] = {
    RotationConfig: RotationConfig(r1=True, r2=True, r4=True),
    CLEConfig: CLEConfig(),
    ChannelEqualizationConfig: ChannelEqualizationConfig(),
    SmoothQuantConfig: SmoothQuantConfig(alpha=0.5),
    AutoSmoothQuantConfig: AutoSmoothQuantConfig(),
    AWQConfig: AWQConfig(),
    SVDQuantConfig: SVDQuantConfig(svd_rank=4, min_layer_size=32),
    GPTAQConfig: GPTAQConfig(),
    GPTQConfig: GPTQConfig(),
    QronosConfig: QronosConfig(),
    AutoRoundConfig: AutoRoundConfig(iters=10, lr=0.05, minmax_lr=0.05, batch_size=4),
    AdaRoundConfig: AdaRoundConfig(num_iterations=150),
    AdaQuantConfig: AdaQuantConfig(num_iterations=60),
    HQQConfig: HQQConfig(),
    BiasCorrectionConfig: BiasCorrectionConfig(),
}
TUNING = ("adaround", "adaquant", "gptq", "gptaq", "qronos", "autoround", "awq")
GAIN = dict.fromkeys(TUNING, 0.9)  # part of rounding's loss, at most
#: What stays float, by the part of the model that is quantized: the time of searches goes with the blocks.
FLOAT = {"two blocks": ["output", "layers.[2-9].*"], "whole": ["output"]}
SLOW = pytest.mark.slow


def test_every_algorithm_has_a_line() -> None:
    assert set(CONFIGS) == {row.config for row in ALGORITHMS}


def samples(examples: ModuleType) -> list[torch.Tensor]:
    return list(torch.from_numpy(examples.token_ids())[:8, None, :64])


def model(examples: ModuleType) -> Any:
    found = examples.torch_stories()
    found.head_dim = 8
    return found


@torch.no_grad()
def loss(examples: ModuleType, algorithms: list[Any] | None, scheme: str, part: str) -> float:
    """Mean KL divergence to the float model's predictions."""
    layers = {"layer_quant_config": {"*.w2": LAYERS[scheme][43]}, "exclude": FLOAT[part]}
    config = QConfig(LAYERS[scheme][32], **layers, algo_config=algorithms)
    found = ModelQuantizer(config).quantize_model(model(examples), samples(examples))
    total = 0.0
    for ids in samples(examples):
        p, q = (net(ids).double().log_softmax(-1) for net in (model(examples), found))
        total += float((p.exp() * (p - q)).sum(-1).mean())
    return total


@pytest.fixture(scope="module")
def nearest(examples: ModuleType) -> Callable[[str, str], float]:
    """What rounding to nearest loses, by scheme and part of the model."""
    return cache(partial(loss, examples, None))


@pytest.mark.parametrize(
    ("scheme", "part"),
    [
        ("int4", "two blocks"),
        pytest.param("int4", "whole", marks=SLOW),
        pytest.param("w4a4", "whole", marks=SLOW),
    ],
)
@pytest.mark.parametrize("row", ALGORITHMS, ids=lambda row: row.config.name)
def test_never_worse_than_rounding_on_a_real_model(
    row: Any, scheme: str, part: str, examples: ModuleType, nearest: Callable[[str, str], float]
) -> None:
    if row.config is ChannelEqualizationConfig:  # for models without decoder blocks
        with pytest.raises(ConfigError, match="has the decoder blocks"):
            loss(examples, [CONFIGS[row.config]], scheme, part)
        return
    gain = GAIN.get(row.config.name, 1.0) if scheme == "int4" else 1.0
    assert loss(examples, [CONFIGS[row.config]], scheme, part) <= gain * nearest(scheme, part)
