"""Every algorithm composes with export and reload: the same logits, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pairs import thinned
from torch import nn

from quark.errors import ModelError
from quark.torch import ModelQuantizer, import_model_from_safetensors
from quark.torch.algorithms.registry import ALGORITHMS
from quark.torch.config.algorithms import AlgoConfig
from quark.torch.export.huggingface import export_safetensors
from quark.torch.quantization.config.config import (
    GPTQConfig,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    QConfig,
    QLayerConfig,
    QronosConfig,
    RotationConfig,
    SmoothQuantConfig,
)
from quark.torch.rotated import online_rotations

transformers = pytest.importorskip("transformers")
INT4 = Int4PerGroupSpec(ch_axis=-1, group_size=16).to_quantization_spec()
TOKENS = Int8PerChannelSpec(symmetric=True, ch_axis=1, is_dynamic=True).to_quantization_spec()
W4A8 = QLayerConfig(weight=INT4, input_tensors=TOKENS)
SETTINGS: dict[str, dict[str, Any]] = {
    "autoround": {"iters": 4, "batch_size": 2},
    "adaround": {"num_iterations": 8},
    "adaquant": {"num_iterations": 8},
    "svdquant": {"min_layer_size": 16, "svd_rank": 2, "alpha_candidates": [0.5]},
    "rotation": {"r2": True, "r4": True, "only_if_better": False},
}
SINGLE = [
    [row.config(**SETTINGS.get(row.config.name, {}))] for row in ALGORITHMS if row.config.name != "channel_equalization"
]
TOGETHER = [
    [RotationConfig(r4=True, random_r1=True, only_if_better=False), QronosConfig()],
    [RotationConfig(online_r1_rotation=True, rotation_size=8, only_if_better=False), GPTQConfig()],
    [SmoothQuantConfig(alpha=0.5), GPTQConfig()],
]


def build() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 64, (2, 12), generator=generator)} for _ in range(3)]


def quantize(algorithms: list[AlgoConfig]) -> nn.Module:
    config = QConfig(W4A8, exclude=["lm_head"], algo_config=algorithms)
    return ModelQuantizer(config).quantize_model(build(), data())


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.parametrize(
    "algorithms", [*SINGLE, *thinned(TOGETHER, 3)], ids=lambda many: "+".join(one.name for one in many)
)
def test_files_hold_what_was_evaluated(algorithms: list[AlgoConfig], tmp_path: Path) -> None:
    model = quantize(algorithms)
    export_safetensors(model, tmp_path / "out")
    with torch.no_grad():
        wanted = [model(**sample).logits for sample in data()]
        for again in (
            import_model_from_safetensors(build(), tmp_path / "out"),
            import_model_from_safetensors(None, tmp_path / "out"),
        ):
            assert all(torch.equal(again(**x).logits, y) for x, y in zip(data(), wanted, strict=True))
            assert len(list(online_rotations(again))) == len(list(online_rotations(model)))


def test_rotations_of_a_file_are_constructions_again(tmp_path: Path) -> None:
    model = quantize([RotationConfig(r4=True, only_if_better=False)])
    export_safetensors(model, tmp_path / "out")
    again = import_model_from_safetensors(build(), tmp_path / "out")
    turns = [turn for _, _, turn in online_rotations(again)]
    assert turns == [turn for _, _, turn in online_rotations(model)] and len(turns) == 2


def test_a_format_that_would_lose_a_rotation_is_refused(tmp_path: Path) -> None:
    model = quantize([RotationConfig(r4=True, only_if_better=False)])
    with pytest.raises(ModelError, match="online rotations"):
        export_safetensors(model, tmp_path / "out", custom_mode="awq")
    assert not (tmp_path / "out").exists()
