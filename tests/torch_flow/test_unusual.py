"""Algorithms on small random models of architectures that are in no table: experts, encoder-decoders, images."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.algorithms.scaling import effective
from quark.torch.export.api import export_safetensors, import_model_from_safetensors
from quark.torch.quantization.config.config import (
    AutoRoundConfig,
    AWQConfig,
    BiasCorrectionConfig,
    Float16Spec,
    GPTQConfig,
    HQQConfig,
    Int4PerGroupSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    RotationConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
)

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "num_experts": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": (
        "Qwen2MoeForCausalLM",
        {**SIZES, **EXPERTS, "intermediate_size": 32, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    ),
    "encoder-decoder": (
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    ),
    "images": (
        "ViTForImageClassification",
        {
            **{key: SIZES[key] for key in SIZES if key != "vocab_size"},
            "intermediate_size": 64,
            "image_size": 16,
            "patch_size": 8,
        },
    ),
}
HEADS = ["lm_head", "classifier", "vit.embeddings.patch_embeddings.projection"]
INT4 = QLayerConfig(weight=Int4PerGroupSpec(ch_axis=-1, group_size=8).to_quantization_spec())
ALGORITHMS = {
    "rotation": RotationConfig(online_r1_rotation=True, only_if_better=False),
    "smooth": SmoothQuantConfig(alpha=0.5),
    "awq": AWQConfig(),
    "gptq": GPTQConfig(),
    "autoround": AutoRoundConfig(iters=8, lr=0.05, minmax_lr=0.05, batch_size=2),
    "svdquant": SVDQuantConfig(svd_rank=2, min_layer_size=32, alpha_candidates=[0.5]),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    model, sizes = MODELS[name]
    cls = getattr(transformers, model)
    found = cls(
        cls.config_class(**{key: value for key, value in sizes.items() if name != "images" or key[:5] != "vocab"})
    )
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.rand_like(parameter))
    return found.eval()


def samples(name: str, count: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if name == "images":
        return [{"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)} for _ in range(count)]
    ids = [torch.randint(2, 60, (2, 10), generator=generator) for _ in range(count)]
    return [{"input_ids": x, **({"decoder_input_ids": x.flip(1)} if name[:3] == "enc" else {})} for x in ids]


def quantize(name: str, layer: QLayerConfig, algorithms: list[Any], data: Any = None) -> Any:
    heads = [pattern for pattern in HEADS if pattern in dict(build(name).named_modules())]
    config = QConfig(layer, exclude=heads, algo_config=algorithms)
    return ModelQuantizer(config).quantize_model(build(name), samples(name) if data is None else data)


@torch.no_grad()
def error(name: str, model: nn.Module) -> float:
    """Mean squares; of images before the classifier: two logits are too few to tell a rotation from chance."""
    made, plain = (one.vit if name == "images" else one for one in (model, build(name)))
    return sum(float((made(**x)[0] - plain(**x)[0]).square().mean()) for x in samples(name))


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.parametrize(
    "algorithm", ["awq", "autoround", *(pytest.param(a, marks=pytest.mark.slow) for a in ALGORITHMS)]
)
@pytest.mark.parametrize("name", MODELS)
def test_no_worse_than_rounding_and_the_same_from_a_file(name: str, algorithm: str, tmp_path: Path) -> None:
    model = quantize(name, INT4, [ALGORITHMS[algorithm]])
    nearest = error(name, quantize(name, INT4, []))
    assert error(name, model) <= nearest * (1.3 if algorithm in ("rotation", "svdquant") else 1)
    export_safetensors(model, tmp_path)
    again = import_model_from_safetensors(build(name), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**samples(name)[0])[0], model(**samples(name)[0])[0])


@pytest.mark.parametrize("algorithm", ["rotation", "svdquant"])
def test_what_stands_beside_layers_comes_back_where_files_name_them_otherwise(algorithm: str, tmp_path: Path) -> None:
    """transformers calls the blocks of a ViT otherwise in memory than its files do."""
    model = quantize("images", INT4, [ALGORITHMS[algorithm]])
    export_safetensors(model, tmp_path)
    again = import_model_from_safetensors(build("images"), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**samples("images")[0])[0], model(**samples("images")[0])[0])


@pytest.mark.parametrize("algorithm", [SmoothQuantConfig(alpha=1.0), RotationConfig(only_if_better=False)], ids=str)
def test_experts_that_no_token_reached_are_changed_with_the_others(algorithm: Any, monkeypatch: Any) -> None:
    """One token reaches two experts of four; other inputs reach them all, and must get the float model's answers."""
    monkeypatch.setattr("quark.measure.guard.best_of", lambda *errors: 0)
    monkeypatch.setattr("quark.torch.algorithms.smooth.best_of_families", whole)
    fine = QLayerConfig(weight=Float16Spec().to_quantization_spec())
    model = quantize("experts", fine, [algorithm], [{"input_ids": torch.tensor([[7]])}])
    plain = build("experts")
    assert not torch.equal(model.model.layers[0].mlp.gate.weight, plain.model.layers[0].mlp.gate.weight)
    for sample in samples("experts"):
        with torch.no_grad():
            wanted, found = plain(**sample).logits, model(**sample).logits
        assert torch.allclose(found, wanted, atol=3e-3 * float(wanted.abs().max()))


def whole(family: Any, context: Any, asked: Any) -> list[torch.Tensor]:
    """The scales that the configuration asks for, whatever they do."""
    return [effective(context, one.place, family(one).others[-1]) for one in asked]


def test_an_algorithm_that_finds_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    mxfp4 = QLayerConfig(weight=OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec())
    cases = {
        "hqq leaves 32 of 32 weights": lambda: quantize("encoder-decoder", mxfp4, [HQQConfig()]),
        "0 of 0 layers with a bias": lambda: quantize("encoder-decoder", INT4, [BiasCorrectionConfig()]),
    }
    for words, job in cases.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, "quark"):
            job()
        assert words in caplog.text
