"""Stacked experts of mixture models, taken apart, quantized one by one, and put back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import ConfigError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.experts import UnfusedExperts, unfuse_experts
from quark.torch.export.api import export_safetensors, import_model_from_safetensors
from quark.torch.quantization.config.config import Int8PerChannelSpec, Int8PerTensorSpec, QConfig, QLayerConfig

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {**HEADS, "num_local_experts": 4},
    "Qwen3MoeForCausalLM": {**HEADS, **FEW, "mlp_only_layers": []},
    "GptOssForCausalLM": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "OlmoeForCausalLM": {**SIZES, "num_attention_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
    "Llama4ForCausalLM": {**HEADS, "num_local_experts": 4, "intermediate_size_mlp": 96},
}
CHANNEL = QLayerConfig(weight=Int8PerChannelSpec(0, True).to_quantization_spec())
IDS = torch.randint(5, 120, (2, 24), generator=torch.Generator().manual_seed(1))


def build(name: str) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**MODELS[name])).eval()
    for key, value in model.named_parameters():
        if key.endswith("_bias") or ("Llama4" in name and value.dim() == 3):  # which start as zeros, or not at all
            nn.init.normal_(value, std=0.1)
    return model


def experts(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, UnfusedExperts)]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_experts_apart_compute_what_they_did_together(name: str) -> None:
    model = build(name)
    before, names = model(IDS).logits, [key for key, _ in model.named_parameters()]
    size = sum(value.untyped_storage().nbytes() for value in model.parameters())
    undo = unfuse_experts(model)
    assert len(undo) == len(experts(model)) == 2
    layers = [layer for module in experts(model) for layer in module.modules() if isinstance(layer, nn.Linear)]
    assert len(layers) == 2 * 4 * 3
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-4, atol=1e-5)
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in model.parameters()}
    assert sum(storages.values()) == size  # views, no copies
    for put_back in undo.values():
        put_back()
    assert [key for key, _ in model.named_parameters()] == names
    assert torch.equal(model(IDS).logits, before) and not experts(model)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_expert_is_quantized_by_itself(name: str) -> None:
    model = build(name)
    before = model(IDS).logits
    config = LLMTemplate.for_model(model).get_config("ptpc_int8")
    twin = ModelQuantizer(config).quantize_model(copy.deepcopy(model))
    errors = (twin(IDS).logits - before).norm(dim=-1) / before.norm(dim=-1)
    assert 0 < errors.median() < 0.03  # a token whose routing changes differs more
    module = experts(twin)[0]
    down = module.get_submodule("3.down_proj")
    plain = next(part for part in model.modules() if type(part).__name__.endswith("Experts")).down_proj[3]
    plain = plain.T if name.startswith(("GptOss", "Llama4")) else plain
    scale = plain.abs().amax(1) / 127.5
    torch.testing.assert_close(down.weight_quantizer.scale, scale)
    frozen = ModelQuantizer.freeze(twin).get_submodule(f"{name_of(twin, module)}.3.down_proj").weight
    torch.testing.assert_close(frozen, (plain / scale[:, None]).round().clamp(-128, 127) * scale[:, None])


def name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


@pytest.mark.parametrize(("name", "idle"), [("MixtralForCausalLM", 2), ("Llama4ForCausalLM", 3)])
def test_static_experts_without_tokens_are_named(name: str, idle: int) -> None:
    model = build(name)
    spec = Int8PerTensorSpec().to_quantization_spec()
    quantizer = ModelQuantizer(QConfig(QLayerConfig(spec, None, spec), exclude=["lm_head"]))
    quantizer.quantize_model(model, [IDS[:1, :1]])  # one token, two (Llama 4: one) of four experts in each layer
    numbers = {name.split("experts.")[1].split(".")[0] for name in quantizer.unreached if "layers.0" in name}
    assert len(quantizer.unreached) == 2 * idle * 3 and len(numbers) == idle


@torch.no_grad()
def test_excluded_experts_stay_together_and_errors_put_them_back() -> None:
    model = build("MixtralForCausalLM")
    before, names = model(IDS).logits, [key for key, _ in model.named_parameters()]
    with pytest.raises(ConfigError):
        ModelQuantizer(QConfig(CHANNEL, exclude=["*nothing*"])).quantize_model(model)
    assert not experts(model) and [key for key, _ in model.named_parameters()] == names
    assert torch.equal(model(IDS).logits, before)
    ModelQuantizer(QConfig(CHANNEL, exclude=["*experts*", "lm_head"])).quantize_model(model)
    assert not experts(model)
    assert 0 < (model(IDS).logits - before).norm() < 0.02 * before.norm()


def test_experts_can_be_named_one_by_one() -> None:
    model = build("MixtralForCausalLM")
    config = QConfig(QLayerConfig(), layer_quant_config={"*.experts.2.up_proj": CHANNEL})
    ModelQuantizer(config).quantize_model(model)
    quantized = [name for name, module in model.named_modules() if type(module).__name__ == "QuantLinear"]
    assert quantized == [f"model.layers.{layer}.mlp.experts.2.up_proj" for layer in (0, 1)]


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GptOssForCausalLM"])
@pytest.mark.parametrize("excluded", [False, True])
@torch.no_grad()
def test_files_of_experts_come_back(name: str, excluded: bool, tmp_path: Path) -> None:
    model = build(name)
    exclude = ["lm_head", "*experts*"] if excluded else ["lm_head"]
    ModelQuantizer(QConfig(CHANNEL, exclude=exclude)).quantize_model(model)
    export_safetensors(model, tmp_path / "out")
    loaded = import_model_from_safetensors(None, tmp_path / "out")
    assert len(experts(loaded)) == (0 if excluded else 2)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)
