"""Rotated models compute what they computed; what cannot be rotated is refused and left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import ConfigError, ModelError
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    Float16Spec,
    Int4PerGroupSpec,
    QConfig,
    QLayerConfig,
    RotationConfig,
)
from quark.torch.rotated import online_rotations

SIZES = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 76, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": WIDE, "Mistral": {**WIDE, "sliding_window": 4}, "Qwen2": WIDE, "Qwen3": {**WIDE, "head_dim": 12},
    "Gemma": {**WIDE, "head_dim": 12}, "Phi3": {**WIDE, "pad_token_id": 0, "eos_token_id": 1},
    "OPT": {**SIZES, "ffn_dim": 76, "word_embed_proj_dim": 48}, "Gemma2": {**WIDE, "head_dim": 12},
}  # fmt: skip
FINE = QLayerConfig(weight=Float16Spec().to_quantization_spec())  # loses next to nothing
IDS = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))


def build(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    cls = getattr(transformers, f"{name}ForCausalLM")
    model = cls(cls.config_class(**MODELS[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter))
    return model


def rotate(model: nn.Module, layer: QLayerConfig = FINE, **settings: Any) -> nn.Module:
    config = QConfig(layer, exclude=["lm_head"], algo_config=[RotationConfig(**{"only_if_better": False, **settings})])
    return ModelQuantizer(config).quantize_model(model, [{"input_ids": IDS}])


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


KINDS = {
    "r1": {"r1": True},
    "r2": {"r1": False, "r2": True},
    "r4": {"r1": False, "r4": True},
    "all": {"r1": True, "r2": True, "r4": True, "random_r1": True, "random_r2": True},
    "blocks": {"r1": True, "rotation_size": 4, "r4": True},
}


def test_a_model_that_only_gets_worse_is_left_as_it_was() -> None:
    """Whatever a rotation does to float16 weights is chance; the quantized answers never get worse by it."""
    for name in ("Llama", "Qwen3"):
        float_answer = logits(build(name))
        plain = ModelQuantizer(QConfig(FINE, exclude=["lm_head"])).quantize_model(build(name))
        found = rotate(build(name), only_if_better=True)
        lost, left = ((logits(model) - float_answer).square().mean() for model in (plain, found))
        assert left <= lost
    assert "only_if_better" not in RotationConfig().to_dict()
    assert RotationConfig.from_dict(RotationConfig(only_if_better=False).to_dict()).only_if_better is False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Phi3"])
def test_a_rotated_model_computes_the_same(name: str, kind: str) -> None:
    model = build(name)
    before, weights = logits(model), copy.deepcopy(model.state_dict())
    after = logits(rotate(model, **KINDS[kind]))
    assert torch.allclose(after, before, atol=3e-3 * float(before.abs().max()))
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, weights[key])]
    assert changed, "nothing was rotated"


def test_a_norm_of_another_width_inside_a_block_is_not_in_the_stream() -> None:
    """Mamba 2: the layer behind the norm inside its mixer writes into the residual stream."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "expand": 2, "num_heads": 8}
    config = transformers.Mamba2Config(**sizes, head_dim=8, n_groups=1, chunk_size=8)
    model = transformers.Mamba2ForCausalLM(config).eval()
    ids = [{"input_ids": torch.randint(0, 64, (2, 16))} for _ in range(2)]
    settings = QConfig(FINE, exclude=["lm_head", "*conv1d*"], algo_config=[RotationConfig(only_if_better=False)])
    turned = ModelQuantizer(settings).quantize_model(copy.deepcopy(model), ids)
    before, after = (one.backbone.layers[0].mixer.out_proj.weight for one in (model, turned))
    torch.testing.assert_close(before.norm(dim=0), after.norm(dim=0))  # rows were mixed, and no column
    assert not torch.allclose(before.norm(dim=1), after.norm(dim=1))


def test_what_is_turned_online() -> None:
    model = rotate(build("Llama"), r1=False, r4=True)
    assert [name for name, _, _ in online_rotations(model)] == [f"model.layers.{k}.mlp.down_proj" for k in range(2)]
    model = rotate(build("Llama"), online_r1_rotation=True)
    names = {name.rsplit(".", 1)[1] for name, _, _ in online_rotations(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model))


@pytest.mark.parametrize("name", MODELS)
def test_online_r1_works_for_every_model(name: str) -> None:
    model = build(name)
    before = logits(model)
    assert torch.allclose(logits(rotate(model, online_r1_rotation=True)), before, atol=3e-3 * float(before.abs().max()))
    assert list(online_rotations(model))


@pytest.mark.parametrize(("name", "message"), [("OPT", "LayerNorm"), ("Gemma2", "residual stream")])
def test_what_cannot_be_rotated_is_refused_and_left_as_it_was(name: str, message: str) -> None:
    model = build(name)
    before, weights = logits(model), copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match=message):
        rotate(model, r4=True)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits(model), before) and not list(online_rotations(model))
    assert model.config.tie_word_embeddings == build(name).config.tie_word_embeddings


def test_a_tied_head_is_untied() -> None:
    model = build("Gemma")
    assert model.config.tie_word_embeddings
    rotate(model)
    assert not model.config.tie_word_embeddings
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_outliers_are_spread() -> None:
    """Channels of the residual stream fifty times as large as others: int4 rounding suffers, and recovers rotated."""
    model = build("Llama")
    with torch.no_grad():
        for block in model.model.layers:
            for norm, layers in (
                (block.input_layernorm, (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)),
                (block.post_attention_layernorm, (block.mlp.gate_proj, block.mlp.up_proj)),
            ):
                norm.weight[7] *= 50
                for layer in layers:
                    layer.weight[:, 7] /= 50
    before = logits(model)
    a4 = QLayerConfig(
        weight=Int4PerGroupSpec(ch_axis=-1, group_size=-1).to_quantization_spec(),
        input_tensors=Int4PerGroupSpec(ch_axis=-1, group_size=-1, is_dynamic=True).to_quantization_spec(),
    )
    plain = copy.deepcopy(model)
    ModelQuantizer(QConfig(a4, exclude=["lm_head"])).quantize_model(plain)
    errors = [float((logits(m) - before).square().mean()) for m in (plain, rotate(model, a4, r2=True))]
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize(
    "settings",
    [{"trainable": True}, {"rotation_size": 0}, {"r1": False}, {"train_smooth": True}],
    ids=str,
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        RotationConfig(**settings)


def test_a_size_that_does_not_divide_is_refused() -> None:
    model = build("Llama")
    with pytest.raises(ConfigError, match="20 does not divide 48"):
        rotate(model, rotation_size=20)
