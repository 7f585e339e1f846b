"""Configurations of language models from a scheme's name, and what they do to small random models."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from quark.errors import ConfigError, ModelError
from quark.numerics.ggml import GGML
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.direct_reads import read_directly
from quark.torch.export.write_as import config_for, export_as
from quark.torch.matching import match
from quark.torch.quantization.config.config import FP8E4M3PerTensorSpec, Int4PerGroupSpec, QConfig, QLayerConfig
from quark.torch.softmax import softmax_quantizers
from quark.torch.template_reading import routers

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 128}
GROUPED = {**WIDE, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
GPT = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
EXPERTS = {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": []}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": HEADS,
    "MistralForCausalLM": GROUPED,
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4},
    "Qwen3MoeForCausalLM": EXPERTS,
    "PhiForCausalLM": WIDE,
    "Phi3ForCausalLM": {**GROUPED, "pad_token_id": 0},
    "GemmaForCausalLM": HEADS,
    "Gemma2ForCausalLM": HEADS,
    "OPTForCausalLM": {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "GPT2LMHeadModel": GPT,
    "GPTNeoXForCausalLM": WIDE,
    "GPTJForCausalLM": {**GPT, "rotary_dim": 8},
    "BloomForCausalLM": {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "FalconForCausalLM": SIZES,
    "Olmo2ForCausalLM": WIDE,
}
# fmt: off
PEER_SCHEMES = {
    "int4_wo_32", "int4_wo_64", "int4_wo_128", "int4_wo_per_channel", "int4_wa_64", "uint4_wo_32", "uint4_wo_64",
    "uint4_wo_128", "uint4_wo_per_channel", "int8", "fp8", "ptpc_fp8", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3",
    "mxfp4_weight_only", "mxfp4_mxfp6_e2m3", "mxfp4_fp8", "amdfp4", "amdfp4_g32", "amdfp4_global16",
    "amdfp4_global32", "int4_fp8", "nvfp4", "fp4_block16_scale_e4m3", "mx6", "mx9", "bfp16",
}
# fmt: on
# fmt: off
PEER_TYPES = {
    "chatglm", "cohere", "dbrx", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4",
    "deepseek_vl_v2", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_unified", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "glm5_next", "gptj", "gpt_oss", "granitemoehybrid", "grok-1", "hunyuan_v1_dense", "instella",
    "kimi_k2", "kimi_k25", "kimi_k3", "lfm2", "llama", "llama4", "minimax_m2", "minimax_m3_vl", "mistral",
    "mixtral", "mllama", "muse_glimmer", "olmo", "opt", "phi", "phi3", "qwen", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "qwen4_exp_text",
}
# fmt: on
IDS = torch.randint(5, 120, (2, 12), generator=torch.Generator().manual_seed(1))


def build(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**{**ARCHITECTURES[name], **changes})).eval()


def quantized(model: Any, config: QConfig) -> Any:
    return ModelQuantizer(config).quantize_model(copy.deepcopy(model), [IDS])


@torch.no_grad()
def error(model: Any, twin: Any) -> float:
    reference = model(IDS).logits
    return float((twin(IDS).logits - reference).norm() / reference.norm())


def test_every_name_of_the_peer_is_there() -> None:
    assert set(LLMTemplate.get_supported_schemes()) >= PEER_SCHEMES
    assert set(LLMTemplate.list_available()) >= PEER_TYPES


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_by_name_and_by_its_modules(name: str) -> None:
    model = build(name)
    table, read = LLMTemplate.get(model.config.model_type), LLMTemplate.for_model(model)
    head = "embed_out" if hasattr(model, "embed_out") else "lm_head"
    for template in (table, read):
        twin = quantized(model, template.get_config("fp8", kv_cache_scheme="fp8"))
        assert head in twin.quant_config.exclude
        layers = [module for module in twin.modules() if type(module).__name__.startswith("Quant")]
        assert len(layers) >= 2 * 4  # attention and feed-forward of both blocks
        assert 0 < error(model, twin) < 0.12
        names = {layer for layer, _ in twin.named_modules() if "router" in layer or layer.endswith(".gate")}
        assert not any(type(twin.get_submodule(layer)).__name__.startswith("Quant") for layer in names)
    for scheme in ("fp8", "nvfp4"):  # nvfp4: scales that siblings share, where they are not one layer
        assert error(model, quantized(model, table.get_config(scheme))) == pytest.approx(
            error(model, quantized(model, read.get_config(scheme)))
        )


def test_without_attention_there_is_no_cache() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).eval()
    template = LLMTemplate.for_model(model)
    assert template.exclude_layers_name == ["lm_head", "*.conv1d"]
    twin = quantized(model, template.get_config("int8"))
    assert 0 < error(model, twin) < 0.05
    with pytest.raises(ConfigError, match="kv_layers_name"):
        template.get_config("int8", kv_cache_scheme="fp8")


def test_recurrent_layers_beside_attention_have_no_cache() -> None:
    torch.manual_seed(0)
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    types = {"layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 16}
    config = transformers.Qwen3NextConfig(**{**EXPERTS, **linear, **types, "shared_expert_intermediate_size": 32})
    model = transformers.Qwen3NextForCausalLM(config).eval()
    template = LLMTemplate.for_model(model)
    assert template.kv_layers_name == ["*k_proj", "*v_proj"] and "*.conv1d" in template.exclude_layers_name
    assert 0 < error(model, quantized(model, template.get_config("fp8", kv_cache_scheme="fp8"))) < 0.12


def test_a_layer_inside_a_router_stays_float() -> None:
    class Router(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 3)

    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = Router(), torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    assert routers(torch.nn.Sequential(Mixture())) == ["*.router.layer"]


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("LlamaForCausalLM", attn_implementation="eager")


LIMITS = {"int8": 0.05, "ptpc_int8": 0.03, "int8_wo_per_channel": 0.02, "bfp16": 0.03, "mx9": 0.03, "Q2_K": 0.6}


@pytest.mark.parametrize("scheme", LLMTemplate.get_supported_schemes())
def test_every_scheme_runs(scheme: str, llama: Any) -> None:
    if any(row.kind == scheme and row.size > 64 for row in GGML.values()):  # super-blocks: wider rows
        llama = build("LlamaForCausalLM", hidden_size=256, intermediate_size=256)
    small = {"*down_proj": "int4_wo_64", "*": "int4_wo_64"} if scheme.endswith("128") else None
    twin = quantized(llama, LLMTemplate.get("llama").get_config(scheme, layer_config=small))
    assert 0 < error(llama, twin) < LIMITS.get(scheme, 0.3)


def test_a_scheme_means_what_its_name_says() -> None:
    config = LLMTemplate.get("llama").get_config("int4_wo_128")
    assert config.global_quant_config == QLayerConfig(weight=Int4PerGroupSpec(-1, 128).to_quantization_spec())
    assert config.exclude == ["lm_head"]
    config = LLMTemplate.get("mixtral").get_config("nvfp4")
    assert config.sync_moe_expert_input_amax
    assert config.shared_scale_groups == [["*q_proj", "*k_proj", "*v_proj"], ["gate_proj", "up_proj"]]
    first, second = config.global_quant_config.input_tensors  # type: ignore[misc]
    assert (first.is_dynamic, second.is_dynamic, second.is_scale_quant) == (True, False, True)


def test_layers_of_their_own_and_exclusion(llama: Any) -> None:
    template = LLMTemplate.get("llama")
    twin = quantized(llama, template.get_config("fp8", layer_config={"*v_proj": "int4_wo_32"}, exclude_layers=[]))
    attention = twin.model.layers[0].self_attn
    assert attention.v_proj.weight_quantizer.stage.spec.format == "int4"
    assert attention.q_proj.weight_quantizer.stage.spec.format == "fp8_e4m3"
    assert type(twin.lm_head).__name__ == "QuantLinear"
    config = template.get_config("fp8", layer_type_config={torch.nn.Linear: "int8"})
    assert quantized(llama, config).model.layers[0].mlp.up_proj.weight_quantizer.stage.spec.format == "int8"


def test_with_llm_template_is_get_config() -> None:
    template = LLMTemplate.get("qwen3")
    assert QConfig.with_llm_template(template, "fp8", kv_cache_scheme="fp8") == template.get_config(
        "fp8", kv_cache_scheme="fp8"
    )


def test_siblings_share_the_scale_above_their_blocks(llama: Any) -> None:
    twin = quantized(llama, LLMTemplate.get("llama").get_config("nvfp4"))
    attention, plain = twin.model.layers[0].self_attn, llama.model.layers[0].self_attn
    q, k, v = (getattr(attention, name).weight_quantizer.scale for name in ("q_proj", "k_proj", "v_proj"))
    assert q == k == v
    largest = max(float(getattr(plain, name).weight.detach().abs().max()) for name in ("q_proj", "k_proj", "v_proj"))
    assert float(q) == pytest.approx(largest / (448 * 6), rel=1e-6)
    assert attention.o_proj.weight_quantizer.scale != q
    alone = quantized(llama, LLMTemplate.get("llama").get_config("nvfp4", shared_scale_groups=[]))
    assert (
        alone.model.layers[0].self_attn.q_proj.weight_quantizer.scale
        != alone.model.layers[0].self_attn.k_proj.weight_quantizer.scale
    )


def test_groups_without_siblings_are_an_error(llama: Any) -> None:
    with pytest.raises(ConfigError, match="shared_scale_groups"):
        quantized(llama, LLMTemplate.get("llama").get_config("fp8", shared_scale_groups=[["wq", "wk"]]))


class Experts(torch.nn.Module):
    """Two experts; tokens reach the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.ModuleDict({"up": torch.nn.Linear(8, 8)}) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0]["up"](x) + self.experts[2]["up"](2 * x)


def test_experts_share_their_input_range() -> None:
    spec = FP8E4M3PerTensorSpec().to_quantization_spec()
    config = QConfig(QLayerConfig(spec, None, spec), sync_moe_expert_input_amax=True)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    quantizer = ModelQuantizer(config)
    model = quantizer.quantize_model(Experts(), [x])
    scales = [expert["up"].input_quantizer.scale for expert in model.experts]
    assert quantizer.unreached == []
    assert all(float(scale) == pytest.approx(2 * float(x.abs().max()) / 448) for scale in scales)
    assert all(expert["up"].input_quantizer.enabled for expert in model.experts)
    alone = ModelQuantizer(QConfig(QLayerConfig(spec, None, spec)))
    alone.quantize_model(Experts(), [x])
    assert alone.unreached == ["input_tensors of 'experts.1.up'"]


def test_attention_probabilities(llama: Any) -> None:
    twin = quantized(llama, LLMTemplate.get("llama").get_config("fp8", attention_scheme="fp8"))
    found = list(softmax_quantizers(twin))
    assert len(found) == 2
    assert all(float(part.scale) == pytest.approx(1 / 448) for part in found)  # the first token attends to itself only
    assert twin.model.layers[0].self_attn.q_proj.output_quantizer is not None
    plain = quantized(llama, LLMTemplate.get("llama").get_config("fp8"))
    assert error(plain, twin) > 0


@torch.no_grad()
def test_only_probabilities_differ(llama: Any) -> None:
    spec = FP8E4M3PerTensorSpec(is_dynamic=True).to_quantization_spec()
    weights = QLayerConfig(weight=spec)
    twin = quantized(llama, QConfig(weights, softmax_quant_spec=spec))
    plain = quantized(llama, QConfig(weights))
    one, other = (model(IDS, output_attentions=True).attentions[0] for model in (plain, twin))
    scale = one.max() / 448
    torch.testing.assert_close(other, (one / scale).to(torch.float8_e4m3fn).float() * scale)
    outside = torch.randn(3, 5)
    assert torch.equal(outside.softmax(-1), torch.softmax(outside, -1))


def test_fused_attention_has_no_probabilities(llama: Any) -> None:
    model = build("LlamaForCausalLM", attn_implementation="sdpa")
    config = LLMTemplate.get("llama").get_config("fp8", attention_scheme="fp8")
    with pytest.raises(ModelError, match="eager"):
        quantized(model, config)
    twin = quantized(llama, config)
    twin.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="one kernel"):
        twin(IDS)


def test_an_unknown_architecture_needs_no_row() -> None:
    class Mine(transformers.LlamaForCausalLM):  # type: ignore[name-defined]
        pass

    torch.manual_seed(0)
    model = Mine(transformers.LlamaConfig(**GROUPED)).eval()
    model.config.model_type = "mine"
    with pytest.raises(ConfigError, match="for_model"):
        LLMTemplate.get("mine")
    template = LLMTemplate.for_model(model)
    assert (template.kv_layers_name, template.exclude_layers_name) == (["*.k_proj", "*.v_proj"], ["lm_head"])
    assert 0 < error(model, quantized(model, template.get_config("fp8", kv_cache_scheme="int8"))) < 0.1
    with pytest.raises(ModelError, match="neither attention"):
        LLMTemplate.for_model(torch.nn.Linear(3, 3))


def test_registered_templates_and_schemes() -> None:
    LLMTemplate.register_template(LLMTemplate("our_model", ["*.k", "*.v"], "*.q", exclude_layers_name=["head"]))
    LLMTemplate.register_scheme("ours", QLayerConfig(weight=Int4PerGroupSpec(-1, 16).to_quantization_spec()))
    try:
        assert "our_model" in LLMTemplate.list_available() and "ours" in LLMTemplate.get_supported_schemes()
        config = LLMTemplate.get("our_model").get_config("ours", kv_cache_scheme="int8_per_token")
        assert config.global_quant_config.weight.group_size == 16  # type: ignore[union-attr]
        assert list(config.kv_cache_quant_config) == ["*.k", "*.v"]
    finally:
        LLMTemplate.unregister_scheme("ours")
        del LLMTemplate.registry["our_model"]
    with pytest.raises(ConfigError, match="built-in"):
        LLMTemplate.register_scheme("fp8", QLayerConfig())
    with pytest.raises(ConfigError, match="built in"):
        LLMTemplate.unregister_scheme("fp8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scheme": "int4_wo_129"}, "int4_wo_128"),
        ({"scheme": "fp8", "kv_cache_scheme": "fp9"}, "fp8"),
        ({"scheme": "fp8", "attention_scheme": "int8"}, "fp8"),
        ({"scheme": "fp8", "algorithm": "gtpq"}, "gtpq"),
    ],
)
def test_unknown_names(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLMTemplate.get("llama").get_config(**arguments)
    with pytest.raises(ConfigError, match="qwen3"):
        LLMTemplate.get("qwen33")


def state_space_and_tower() -> Any:
    torch.manual_seed(0)
    text = {**GROUPED, "head_dim": 16, "model_type": "qwen2"}
    eyes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    eyes |= {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8}
    config = transformers.LlavaConfig(text_config=text, vision_config=eyes, image_token_index=99)
    return transformers.LlavaForConditionalGeneration(config).eval()


def test_towers_and_projectors_stay_float_unless_named() -> None:
    """With a row of the table or without: only the language model is quantized."""
    model = state_space_and_tower()
    config = LLMTemplate.for_model(model).get_config("int4_wo_32")
    ModelQuantizer(config).quantize_model(model)
    names = {name for name, module in model.named_modules() if type(module).__name__.startswith("Quant")}
    assert names and all(name.startswith("model.language_model.layers.") for name in names)
    everything = LLMTemplate.for_model(model := state_space_and_tower()).get_config("fp8", exclude_layers=["lm_head"])
    found = match(model, everything).quantized
    assert any("vision_tower" in item.layer.name for item in found)  # what is named as quantized is


@pytest.mark.parametrize("table", [False, True])
def test_towers_have_no_cache(table: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a row of the table or without: the encoder's keys have the same name, and no step comes back to them."""
    model = state_space_and_tower()
    if table:
        monkeypatch.setattr(model.config, "model_type", "gemma3")
    config = LLMTemplate.for_model(model).get_config("fp8", kv_cache_scheme="fp8")
    ids = torch.arange(8)[None]
    ModelQuantizer(config).quantize_model(model, [ids])
    made = [name for name, module in model.named_modules() if getattr(module, "output_quantizer", None) is not None]
    kinds = [f"model.language_model.layers.{k}.self_attn.{role}_proj" for k in range(2) for role in "kv"]
    assert sorted(made) == sorted(kinds)


@pytest.mark.parametrize("form", ["quark", "compressed-tensors"])
def test_a_float_tower_is_excluded_by_any_name_of_a_reader(form: str, tmp_path: Path) -> None:
    """A program that puts query, key and value together asks for a name that the file does not have."""
    model = state_space_and_tower()
    ModelQuantizer(LLMTemplate.for_model(model).get_config("int4_wo_32")).quantize_model(model)
    export_as(model, tmp_path / "m", form, tmp_path)
    said = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    rules = [one.removeprefix("re:") for one in said.get("exclude") or said["ignore"] if one.startswith("re:")]
    layer = "encoder.layers.0.self_attn.qkv_proj"
    for name in (f"vision_tower.{layer}", f"model.vision_tower.vision_model.{layer}", "vision_tower.x"):
        assert any(re.match(rule, name) for rule in rules)
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        scaled = [name for name in file.keys() if name.endswith("weight_scale")]  # noqa: SIM118
    inside = [name for name, module in model.named_modules() if type(module).__name__.startswith("Quant")]
    assert scaled and not any(re.match(rule, name) for rule in rules for name in (*scaled, *inside))


def test_experts_share_the_range_that_vllm_takes_the_largest_of() -> None:
    """An expert that no token reached would have float inputs, which its kernels do not have beside others."""
    config = QConfig(QLayerConfig(FP8E4M3PerTensorSpec().to_quantization_spec()))
    for form in ("quark", "compressed-tensors"):
        assert config_for(config, form, "vllm", torch.bfloat16).sync_moe_expert_input_amax
        assert not config_for(config, form, "transformers", torch.bfloat16).sync_moe_expert_input_amax


@pytest.mark.parametrize("global_only", [False, True])
def test_layers_whose_weight_other_code_reads_stay_float(global_only: bool) -> None:
    """Mamba hands ``conv1d.weight`` and ``dt_proj.weight`` to its kernels: codes there would be multiplied by."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, "state_size": 8}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).eval()
    config = LLMTemplate.for_model(model).get_config("int8_wo_per_channel")
    if global_only:
        config = QConfig(config.global_quant_config)
    ModelQuantizer(config).quantize_model(model)
    floats = {"backbone.layers.0.mixer.conv1d", "backbone.layers.0.mixer.dt_proj"}
    assert floats <= set(model.quant_config.exclude)
    named = QConfig(QLayerConfig(), layer_quant_config={"backbone.layers.0.mixer.conv1d": config.global_quant_config})
    with pytest.raises(ConfigError, match="read by other code"):
        match(transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)), named)


def test_reads_that_a_module_turns_off_and_reads_of_types_do_not_count() -> None:
    class Mine(torch.nn.Module):
        def __init__(self, slow: bool) -> None:
            super().__init__()
            self.slow, self.a, self.b = slow, torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training or (self.slow and x.numel()):
                return x @ self.a.weight
            return self.b(self.a(x).to(self.b.weight.dtype))

    assert read_directly(Mine(slow=True)) == ["a"] and not read_directly(Mine(slow=False))


def test_reads_that_forward_never_comes_to_do_not_count() -> None:
    """Diffusers' attention has a method that copies the weights of its projections; only a user calls it."""

    class Fusing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.kernel = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), self.slow_path

        def fuse(self) -> torch.Tensor:
            return torch.cat([self.a.weight, self.b.weight])

        def slow_path(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.b.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.slow_path(self.a(x))

    assert read_directly(Fusing()) == ["b"]


def test_a_module_need_not_call_itself_self() -> None:
    class Short(torch.nn.Module):
        def __init__(this) -> None:
            super().__init__()
            this.a, this.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(this, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(this.b(x), this.a.weight, this.a.bias)

    assert read_directly(Short()) == ["a"]


@pytest.mark.parametrize("size", [32, 64], ids=["of the width", "of the inner width"])
def test_layers_as_wide_as_there_are_places_are_no_heads(size: int) -> None:
    """An encoder has no layer whose output is one number a word; its places are as many as its layers are wide."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = BertModel(BertConfig(vocab_size=50, max_position_embeddings=size, type_vocab_size=32, **sizes))
    config = LLMTemplate.for_model(model).get_config(scheme="int8_wo_per_channel")
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linear and not linear & set(config.exclude)
