"""Every architecture that a GGUF file is written for: names, stacked experts, what is refused, scales that are lost."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.consumers import tiny
from tests.consumers.llama_table import AS_PUBLISHED
from tests.torch_flow.export.test_gguf import WORDS, bpe, model_of, read  # noqa: F401
from tests.torch_flow.export.test_reload import layer, quantized
from torch import nn

from quark.errors import ConfigError, ModelError
from quark.torch import LLMTemplate, export_safetensors, import_model_from_safetensors
from quark.torch.export.api import export_gguf
from quark.torch.export.before_work import check_before_work
from quark.torch.export.gguf_architectures import architecture_of
from quark.torch.export.gguf_model import network_name
from quark.torch.export.gguf_rope import add_rope, rope_factors
from quark.torch.export.gguf_table import ARCHITECTURES, DECODERS
from quark.torch.export.write_as import config_for
from quark.torch.layers import own_parameter
from quark.torch.quantization.config.config import Int4PerGroupSpec, Int8PerGroupSpec, OCP_MXFP4Spec, QConfig

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
    "num_hidden_layers": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
NARROW = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 32}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 128, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "num_key_value_heads": 4,
}  # fmt: skip
TURNED = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 128, "head_dim": 64, "norm_topk_prob": True}),
    "gemma": ("Gemma", {"head_dim": 64}),
    "gemma2": ("Gemma2", NARROW),
    "gemma3_text": ("Gemma3", {**NARROW, "num_hidden_layers": 6}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64, "intermediate_size": 256}),
    "granite": ("Granite", {"embedding_multiplier": 2.0, "attention_multiplier": 0.125, "logits_scaling": 3.0}),
    "olmo2": ("Olmo2", {}),
    "olmoe": ("Olmoe", {**EXPERTS, "num_key_value_heads": 4, "intermediate_size": 128}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "arcee": ("Arcee", {}),
    "cohere": ("Cohere", {}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 4, "sliding_window": 32}),
    "ernie4_5": ("Ernie4_5", {}),
    "dots1": ("Dots1", {**ROUTED, "num_key_value_heads": 4, "head_dim": 64}),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "glm4": ("Glm4", {"head_dim": 64}),
    "glm4_moe": ("Glm4Moe", {**ROUTED, "head_dim": 64}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0}),
    "helium": ("Helium", {"head_dim": 64}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 64}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 64}),
    "jais2": ("Jais2", {"head_dim": 64}),
    "ministral": ("Ministral", {"head_dim": 64, "sliding_window": 128}),
    "ministral3": ("Ministral3", {"head_dim": 64, "rope_parameters": TURNED, "sliding_window": None}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}),
    "nemotron": ("Nemotron", {"head_dim": 64}),
    "olmo": ("Olmo", {}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 32}),
    "phi": ("Phi", {}),
    "seed_oss": ("SeedOss", {"head_dim": 64}),
    "deepseek_v3": ("DeepseekV3", {**ROUTED, **LATENT}),
}
INT4 = layer(Int4PerGroupSpec(-1, 32, scale_type="float16"))


def network(family: str, **changes: Any) -> Any:
    """A model whose every parameter matters; those without sizes here have those of ``tiny``."""
    if family not in FAMILIES:
        return small(family)
    name, extra = FAMILIES[family]
    made = f"{name}{'TextConfig' if family == 'gemma3_text' else 'Config'}"
    config = getattr(transformers, made)(**{**SIZES, **extra, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_((noise / 12 if value.dim() > 1 or "bias" in key else value + noise / 8).half())
    return model


def small(family: str) -> Any:
    """The model that ``llama_table`` asks llama.cpp about, but smaller."""
    more, plain = {"vocab_size": 300, **AS_PUBLISHED.get(family, {})}, tiny.tiny_config
    more |= {key: 32 for key in ("linear_key_head_dim", "linear_value_head_dim") if family.startswith("qwen3_")}
    more |= {"vocab_size_per_layer_input": 300} if family == "gemma3n_text" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "tiny_config", lambda name, cls, given: plain(name, cls, {**more, **given}))
        model = tiny.tiny_model(family, dict(tiny.model_types())[family])
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(value.half())
    return model


def biases(model: nn.Module) -> list[str]:
    """Biases of routers and factors of layers, which some models have as buffers."""
    return [key for key in model.state_dict() if key.endswith(("e_score_correction_bias", "expert_bias", "_scalar"))]


TURNED_KEYS = ("kimi_linear", "glm_moe_dsa")


def floats(model: nn.Module) -> list[str]:
    """What stays float: heads and routers."""
    ends = ("lm_head", "mlp.gate", "router", "shared_expert_gate")
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    whole = "altup|laurel|per_layer_model" + "|kv_b_proj" * (model.config.model_type in TURNED_KEYS)
    return [name for name in linear if name.endswith(ends) or re.search(whole, name)]


WITHIN = re.compile(r"_vl_(moe_)?text$|4v_(moe_)?text$")  # language models of larger ones: test_language_part.py
ALONE = [name for name in DECODERS if not WITHIN.search(name)]


@pytest.mark.parametrize("family", ALONE)
def test_values_of_the_file_are_those_of_the_model(family: str, bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    model = network(family)
    model = quantized(model, QConfig(INT4, exclude=floats(model)))
    loss = export_gguf(model, tmp_path, family, bpe, float_type="F32")
    assert (loss.relative, loss.rescued) == (0.0, [])
    fields, tensors = read(tmp_path / f"{family}.gguf")
    assert fields["general.architecture"] == ARCHITECTURES[family].name
    kinds = {tensor.tensor_type.name for name, tensor in tensors.items() if name.startswith("blk.0.")}
    assert "Q4_0" in kinds
    written = sum(int(np.prod(tensor.shape)) for name, tensor in tensors.items() if name != "rope_freqs.weight")
    tied = model.config.get_text_config().tie_word_embeddings
    kept = {**dict(model.named_parameters()), **{key: model.state_dict()[key] for key in biases(model)}}
    kept = {key: value for key, value in kept.items() if not key.endswith(tuple(ARCHITECTURES[family].told))}
    count = sum(value.numel() for key, value in kept.items() if not (tied and key == "lm_head.weight"))
    assert written == count


@pytest.mark.parametrize("family", ["mistral", "phi3", "qwen2"])
def test_a_window_that_llama_cpp_lacks_is_the_longest_text(family: str, bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    window = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0}
    export_gguf(network(family, **window), tmp_path, family, bpe, weight_type="F32")
    fields = read(tmp_path / f"{family}.gguf")[0]
    assert fields[f"{ARCHITECTURES[family].name}.context_length"] == 32
    assert f"{ARCHITECTURES[family].name}.attention.sliding_window" not in fields


@pytest.mark.parametrize("missing", ["", "<unk>"])
def test_the_name_asks_for_tokens_of_phi3_only_where_they_are(missing: str) -> None:
    """llama.cpp ends its process where a file with "phi3" in its name lacks one of them."""
    config = transformers.Phi3Config(architectures=["Phi3ForCausalLM"])
    tokens = {"<s>", "</s>", "<unk>", "<|endoftext|>"} - {missing}
    assert ("phi3" in network_name(config, tokens).lower()) is not bool(missing)


@pytest.mark.parametrize("scheme", ["int8_wo_per_channel", "uint4_wo_32", "mxfp4_weight_only"])
def test_weights_of_inputs_by_outputs_are_written_as_linear_ones(scheme: str, bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    config = config_for(LLMTemplate.for_model(network("gpt2")).get_config(scheme), "gguf", "llama.cpp", torch.float32)
    model = quantized(network("gpt2"), config)
    layer = model.get_submodule("transformer.h.1.mlp.c_fc")
    wanted = layer.weight_quantizer(own_parameter(layer).detach()).T.numpy()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert export_gguf(model, tmp_path, "gpt2", bpe).relative < (1e-3 if "uint4" in scheme else 1e-6)  # minima round
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    found = read(tmp_path / "gpt2.gguf")[1]["blk.1.ffn_up.weight"]
    np.testing.assert_allclose(gguf.quants.dequantize(found.data, found.tensor_type), wanted, rtol=2e-3, atol=2e-4)
    export_safetensors(model, tmp_path / "codes")
    export_gguf(import_model_from_safetensors(None, tmp_path / "codes"), tmp_path / "again", "gpt2", bpe)
    again = read(tmp_path / "again" / "gpt2.gguf")[1]["blk.1.ffn_up.weight"]
    np.testing.assert_array_equal(again.data, found.data)


@pytest.mark.parametrize("scheme", ["int8_wo_per_channel", "uint4_wo_32", "Q5_1", "mxfp4_weight_only"])
def test_multipliers_that_llama_cpp_does_not_read_go_into_scales(scheme: str, bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    from transformers.models.falcon_h1 import modeling_falcon_h1

    model = network("falcon_h1")
    model.config.mlp_multipliers, model.config.ssm_multipliers = [0.88, 0.29], [0.35, 0.25, 0.18, 0.5, 0.31]
    config = config_for(LLMTemplate.for_model(model).get_config(scheme), "gguf", "llama.cpp", torch.float32)
    if scheme == "mxfp4_weight_only":
        with pytest.raises(ConfigError, match="scales of MXFP4 are powers of two"):
            check_before_work(model, config, "gguf", "llama.cpp", bpe)
        return
    model = quantized(model, config)
    assert export_gguf(model, tmp_path, "falcon_h1", bpe, float_type="F32").relative < 2.0**-10
    tensors = read(tmp_path / "falcon_h1.gguf")[1]
    for name, target in {
        "feed_forward.gate_proj": "ffn_gate",
        "feed_forward.down_proj": "ffn_down",
        "mamba.in_proj": "ssm_in",
    }.items():
        layer, found = model.get_submodule(f"model.layers.1.{name}"), tensors[f"blk.1.{target}.weight"]
        factor: Any = {"feed_forward.gate_proj": 0.88, "feed_forward.down_proj": 0.29}.get(name)
        if factor is None:  # what transformers multiplies rows with, and all inputs
            factor = modeling_falcon_h1.compute_mup_vector(model.config).numpy().reshape(-1, 1) * 2.0
        wanted = layer.weight_quantizer(own_parameter(layer).detach()).numpy() * factor
        decoded = gguf.quants.dequantize(found.data, found.tensor_type)
        assert np.linalg.norm(decoded - wanted) < 2.0**-10 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    "family",
    ["mamba2", "nemotron_h", "bamba", "falcon_h1", "kimi_linear", "granitemoehybrid", "qwen3_next", "jamba", "lfm2"],
)
def test_what_states_are_multiplied_by_is_float32(family: str, bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    export_gguf(network(family), tmp_path, family, bpe)  # llama.cpp ended its process (llama_halves.py)
    found = read(tmp_path / f"{family}.gguf")[1]
    ends = re.compile(r"ssm_(a|d|norm\.weight|conv1d(_[qkv])?\.weight)$|shortconv\.conv\.weight$")
    kinds = {name: tensor.tensor_type.name for name, tensor in found.items() if ends.search(name)}
    assert kinds and {*kinds.values()} == {"F32"}, kinds


@pytest.mark.parametrize("scheme", ["int8_wo_per_channel", "uint4_wo_32"])
def test_biases_beside_codes_of_a_file_are_written(scheme: str, bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    model = network("qwen2")
    config = config_for(LLMTemplate.for_model(model).get_config(scheme), "gguf", "llama.cpp", torch.float32)
    export_safetensors(quantized(model, config), tmp_path / "codes")
    export_gguf(import_model_from_safetensors(None, tmp_path / "codes"), tmp_path, "qwen2", bpe)
    found = read(tmp_path / "qwen2.gguf")[1]["blk.1.attn_q.bias"]
    np.testing.assert_array_equal(found.data, model.get_submodule("model.layers.1.self_attn.q_proj").bias.detach())


def test_experts_are_stacked_in_order(bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    model = network("qwen3_moe")
    stacked = model.model.layers[1].mlp.experts.gate_up_proj.detach().clone()
    export_gguf(model, tmp_path, "qwen3_moe", bpe, weight_type="F32")
    tensors = read(tmp_path / "qwen3_moe.gguf")[1]
    for name, rows in (("gate", slice(0, 128)), ("up", slice(128, None))):
        found = tensors[f"blk.1.ffn_{name}_exps.weight"]
        assert np.array_equal(np.asarray(found.data).reshape(4, 128, 256), stacked[:, rows].numpy())
    assert model.model.layers[1].mlp.experts.gate_up_proj.shape == stacked.shape  # the model is as it was


def test_mxfp4_experts_with_biases_and_mixed_layers(bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    model = network("gpt_oss", num_hidden_layers=2)
    config = QConfig(INT4, exclude=floats(model), layer_quant_config={"*experts*": layer(OCP_MXFP4Spec(-1, False))})
    loss = export_gguf(quantized(model, config), tmp_path, "gpt_oss", bpe, float_type="F32")
    tensors = read(tmp_path / "gpt_oss.gguf")[1]
    kinds = {name: tensors[f"blk.0.{name}.weight"].tensor_type.name for name in ("ffn_up_exps", "attn_q", "attn_sinks")}
    assert kinds == {"ffn_up_exps": "MXFP4", "attn_q": "Q4_0", "attn_sinks": "F32"}
    assert tuple(tensors["blk.0.ffn_gate_exps.bias"].shape) == (256, 4)
    assert loss.relative == 0.0


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
def test_types_of_single_layers(kind: str, bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    layers = {"*down_proj": kind, "*.1.*": "Q5_0"}
    loss = export_gguf(model_of(), tmp_path, "llama", bpe, weight_type="Q4_0", layer_types=layers)
    tensors = read(tmp_path / "llama.gguf")[1]
    names = ("blk.0.ffn_down", "blk.1.ffn_down", "blk.0.ffn_up", "blk.1.ffn_up")
    assert [tensors[f"{name}.weight"].tensor_type.name for name in names] == [kind, kind, "Q4_0", "Q5_0"]
    assert 0.001 < loss.relative < 0.2


@pytest.mark.parametrize("amax", [1e-2, 1e-5, 1e-7])
@pytest.mark.parametrize("way", ["codes", "rounded", "K"])
def test_scales_that_float16_does_not_hold_lose_nothing(
    amax: float, way: str, bpe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture  # noqa: F811
) -> None:  # fmt: skip
    model, name = model_of(), "model.layers.1.mlp.up_proj"
    with torch.no_grad():
        weight = model.get_submodule(name).weight
        weight[7] *= amax / float(weight[7].abs().max())
    kind = {"codes": None, "rounded": "Q8_0", "K": "Q6_K"}[way]
    if way == "codes":
        model = quantized(model, QConfig(layer(Int8PerGroupSpec(-1, 32)), exclude=["lm_head"]))
    with caplog.at_level(logging.WARNING):
        loss = export_gguf(model, tmp_path, "llama", bpe, weight_type=kind)
    module = model.get_submodule(name)
    with torch.no_grad():
        wanted = (module.weight_quantizer(module.weight) if way == "codes" else module.weight)[7].numpy()
    found = read(tmp_path / "llama.gguf")[1]["blk.1.ffn_up.weight"]
    values = gguf.quants.dequantize(found.data, found.tensor_type)[7]
    limit = {"codes": 1e-3, "rounded": 0.02, "K": 0.05}[way]
    assert np.linalg.norm(values - wanted) <= limit * np.linalg.norm(wanted)
    assert loss.rescued == ([f"{name}.weight"] if found.tensor_type.name == "F32" else [])
    assert bool(loss.rescued) is ("float16 does not hold" in caplog.text)
    assert bool(loss.rescued) or amax > 1e-5
    assert not (loss.rescued and amax > 1e-3 and way != "codes")


@pytest.mark.parametrize("scheme", ["int8_wo_per_channel", "int4_wo_32", "uint4_wo_32"])
@pytest.mark.parametrize("amax", [1e-2, 1e-5, 3e-7, 1e-7, 1e-9])
def test_scales_that_the_command_rounds_to_float16_waste_no_codes(
    scheme: str, amax: float, bpe: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    """The command evaluates with float16 scales: whatever they do to small weights, the file stays near the source."""
    model, name = model_of(), "model.layers.1.mlp.up_proj"
    with torch.no_grad():
        model.get_submodule(name).weight *= amax / float(model.get_submodule(name).weight.abs().max())
        source = model.get_submodule(name).weight.detach().clone().numpy()
    config = LLMTemplate.for_model(model).get_config(scheme)
    model = quantized(model, config_for(config, "gguf", "llama.cpp", torch.float32))
    loss = export_gguf(model, tmp_path, "llama", bpe)
    found = read(tmp_path / "llama.gguf")[1]["blk.1.ffn_up.weight"]
    values = gguf.quants.dequantize(found.data, found.tensor_type)
    limit = 0.02 if "int8" in scheme else 0.3
    assert np.linalg.norm(values - source) <= limit * np.linalg.norm(source)
    assert loss.rescued == ([f"{name}.weight"] if found.tensor_type.name == "F32" else [])
    assert bool(loss.rescued) or amax > 1e-6 or scheme != "int8_wo_per_channel"
    assert not loss.rescued or amax < 1e-3
    if loss.rescued and amax > 1e-8:  # codes that are all 0 cannot be told from a row of zeros once the source is gone
        export_safetensors(model, tmp_path / "codes")
        with pytest.raises(ModelError, match="most of its codes are unused"):
            export_gguf(import_model_from_safetensors(None, tmp_path / "codes"), tmp_path / "again", "llama", bpe)


@pytest.mark.parametrize(("family", "heads"), [("mimo_v2_flash", [2, 4, 4, 2]), ("kimi_linear", [0, 0, 1])])
def test_heads_of_keys_are_told_layer_by_layer(family: str, heads: list[int], bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    export_gguf(network(family), tmp_path, family, bpe, weight_type="F16")
    fields = read(tmp_path / f"{family}.gguf")[0]
    assert fields[f"{ARCHITECTURES[family].name}.attention.head_count_kv"] == heads


@pytest.mark.parametrize("family", TURNED_KEYS)
def test_keys_of_what_is_latent_are_turned_and_take_no_codes(family: str, bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    model = network(family)
    config, name = model.config, f"model.layers.{model.config.num_hidden_layers - 1}.self_attn.kv_b_proj"
    layer, sizes = model.get_submodule(name), (config.qk_nope_head_dim, config.v_head_dim)
    keys, values = layer.weight.detach().unflatten(0, (config.num_attention_heads, -1)).split(sizes, 1)
    export_gguf(model, tmp_path, family, bpe, weight_type="F32", float_type="F32")
    found = read(tmp_path / f"{family}.gguf")[1]
    for part, wanted in (("attn_k_b", keys.mT), ("attn_v_b", values)):
        np.testing.assert_array_equal(found[f"blk.{config.num_hidden_layers - 1}.{part}.weight"].data, wanted)
    wanted = QConfig(INT4, exclude=[one for one in floats(model) if one != name])
    with pytest.raises(ConfigError, match=f"{name}.weight' has codes of Q4_0 along its inputs"):
        check_before_work(model, wanted, "gguf", "llama.cpp", bpe)
    with pytest.raises(ConfigError, match=f"{name}.weight' has codes of Q4_0 along its inputs"):
        export_gguf(quantized(model, wanted), tmp_path / "m", family, bpe)


def test_gemma3n_has_rows_of_all_words_stacked_matrices_and_unread_keys(bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    sizes = {**SIZES, "num_hidden_layers": 21, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    config = transformers.Gemma3nTextConfig(**sizes, num_kv_shared_layers=1, vocab_size_per_layer_input=250)
    model = transformers.Gemma3nForCausalLM(config)
    model.model.embed_tokens_per_layer.weight.data[0] = 0.5
    export_gguf(model, tmp_path, "gemma3n_text", bpe, weight_type="F32", float_type="F32")
    tensors = read(tmp_path / "gemma3n_text.gguf")[1].items()
    found = {name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for name, tensor in tensors}
    with torch.no_grad():  # words without a row are answered with the first one's
        wanted = (
            model.model.get_per_layer_inputs(torch.arange(300)).flatten(1)
            / model.model.embed_tokens_per_layer.embed_scale
        )
    np.testing.assert_allclose(found["per_layer_token_embd.weight"], wanted, rtol=1e-5)
    stacked = torch.stack([layer.weight.detach() for layer in model.model.altup_projections])
    np.testing.assert_array_equal(found["altup_proj.weight"], stacked)
    assert not any(found[f"blk.20.attn_{name}.weight"].any() for name in ("k", "v", "k_norm"))
    assert all(found[f"blk.19.attn_{name}.weight"].any() for name in ("k", "v", "k_norm"))


WRONG = [  # each was answered otherwise by llama.cpp, or not loaded (tests/consumers/llama_entries.py)
    ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob is True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("gemma3_text", {"layer_types": ["full_attention"] * 6}, "layer_types"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "what Gemma3TextModel does, a hidden state"),
    ("gemma2", {"query_pre_attn_scalar": 100}, "query_pre_attn_scalar is 100"),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}, "no_rope_layers"),
    ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False"),
    ("deepseek_v3", {"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001"),
    ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts is 0"),
    ("deepseek_v3", {"topk_group": 2}, "topk_group is 2"),
    ("deepseek_v3", {"qk_nope_head_dim": 63}, "qk_nope_head_dim is 63"),
    ("gpt_oss", {"swiglu_alpha": 2.0}, "swiglu_alpha is 2.0"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("seed_oss", {"attention_out_bias": True}, "attention_out_bias is True"),
    ("smollm3", {"mlp_bias": True}, "mlp_bias is True"),
    ("starcoder2", {"use_bias": False}, "use_bias is False"),
    ("cohere2", {"head_dim": 128}, "head_dim is 128"),
    ("lfm2", {"layer_types": ["conv", "conv"]}, "all layers are of one kind"),
    ("exaone_moe", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "mlp_layer_types"),
    ("ernie4_5_moe", {"moe_layer_end_index": 0}, "moe_layer_end_index is 0"),
    ("mamba2", {"time_step_limit": (0.001, 0.1)}, "time_step_limit is"),
    ("mamba", {"intermediate_size": 64}, "intermediate_size is 64"),
    ("qwen3_next", {"linear_key_head_dim": 64, "linear_value_head_dim": 32}, "linear_key_head_dim"),
    ("llama4_text", {"use_qk_norm": False}, "use_qk_norm is False"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ("nemotron_h", {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}, "'mlp' or 'moe'"),
    ("nemotron_h", {"time_step_min": 0.01}, "time_step_min is 0.01"),
    ("gemma3n_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers is 1"),
    ("gemma3n_text", {"activation_sparsity_pattern": [0.0] * 5}, "activation_sparsity_pattern is"),
    ("gemma3n_text", {"intermediate_size": [128, 128, 128, 128, 64]}, "intermediate_size is"),
    ("gemma3n_text", {"final_logit_softcapping": 20.0}, "final_logit_softcapping is 20.0"),
    (
        "gemma3n_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}, "full_attention": {}}},
        "rotary embedding of sliding layers",
    ),
    (
        "mimo_v2_flash",
        {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.25}, "full_attention": {}}},
        "rotary embedding of sliding layers is {'partial_rotary_factor': 0.25}",
    ),
    *(
        ("olmo3", {"rope_parameters": {"sliding_attention": local, "full_attention": {"rope_theta": 1e4}}}, sentence)
        for local, sentence in (
            ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, "no file for llama.cpp says it"),
            ({"rope_theta": 5e5}, "llama.cpp has rope_theta 10000 in 'olmo2'"),
        )
    ),
    ("kimi_linear", {"linear_num_heads": 2}, "linear_num_heads is 2"),
    ("glm_moe_dsa", {"indexer_types": ["full", "shared"]}, "indexer_types is"),
    ("glm_moe_dsa", {"max_position_embeddings": 1 << 20}, "max_position_embeddings is 1048576"),
    ("glm_moe_dsa", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "which llama.cpp does otherwise"),
    ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate is True"),
    ("falcon_h1", {"tie_word_embeddings": True}, "multiplied by 4 and by 0.25"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    (
        "gemma4_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}, "full_attention": {}}},
        "rotary embedding of sliding layers",
    ),
    ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
    ("gemma4_text", {"layer_types": ["full_attention"] * 6}, "windows in some layers"),
    ("llama4_text", {"moe_layers": [0]}, "moe_layers"),
    ("llama4_text", {"no_rope_layers": [1, 1, 1, 1]}, "no_rope_layers"),
]


@pytest.mark.parametrize(("family", "changes", "sentence"), WRONG)
def test_what_llama_cpp_takes_for_granted_is_checked(
    family: str, changes: dict[str, Any], sentence: str, bpe: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    model = network(family)
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(ModelError, match=sentence):
        export_gguf(model, tmp_path / "m", family, bpe, weight_type="F16")
    with pytest.raises(ConfigError, match="model_type 'electra'"):
        export_gguf(model_of(), tmp_path / "m", "electra", bpe)
    assert not (tmp_path / "m").exists()


def test_heads_of_columns_that_move_take_no_blocks_across_them(bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    """llama.cpp has the heads of Qwen 3.5's values in another order: a block that crosses them would be torn apart."""
    model = network("qwen3_5_text")
    config = LLMTemplate.for_model(model).get_config("int4_wo_32")
    check_before_work(model, config, "gguf", "llama.cpp", bpe)
    model.config.linear_value_head_dim = model.config.linear_key_head_dim = 16
    sentence = r"out_proj.weight' has heads of 16 columns \(linear_value_head_dim\).* has blocks of 32"
    with pytest.raises(ConfigError, match=sentence):
        check_before_work(model, config, "gguf", "llama.cpp", bpe)
    with pytest.raises(ConfigError, match=sentence):
        export_gguf(model, tmp_path, "qwen3_5_text", bpe, weight_type="Q8_0")


@pytest.mark.parametrize(("method", "told"), [("greedy", (1, 1)), ("group_limited_greedy", (2, 1))])
def test_groups_that_deepseek_v2_does_not_ask_are_not_told(
    method: str, told: tuple[int, int], bpe: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    """llama.cpp chose experts of one group where transformers chose of all."""
    model = network("deepseek_v2")
    model.config.n_group, model.config.topk_group, model.config.topk_method = 2, 1, method
    export_gguf(model, tmp_path, "deepseek_v2", bpe, weight_type="F16")
    fields = read(tmp_path / "deepseek_v2.gguf")[0]
    assert (fields["deepseek2.expert_group_count"], fields["deepseek2.expert_group_used_count"]) == told


def test_every_other_model_type_is_told_where_it_can_go() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    others = [name for name in CONFIG_MAPPING_NAMES if name not in ARCHITECTURES]
    assert {"electra", "bart", "gptj"} < set(others)
    for name in others:
        with pytest.raises(ConfigError, match=f"model_type '{name}'.*--format onnx.*llama, mistral"):
            architecture_of(name)


def test_every_kind_of_rotary_embedding_is_written_or_told_what_to_do() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    writer = gguf.GGUFWriter(None, "llama")
    for kind in ("default", *ROPE_INIT_FUNCTIONS):
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
        rope |= {"long_factor": [2.0], "short_factor": [1.0]}
        config = SimpleNamespace(rope_parameters=rope, max_position_embeddings=128)
        if kind in ("default", "linear", "yarn", "llama3", "proportional", "longrope"):
            add_rope(writer, config, ARCHITECTURES["llama"])
            continue
        with pytest.raises(ModelError, match=f"'{kind}'.*--format onnx"):
            add_rope(writer, config, ARCHITECTURES["llama"])


@pytest.mark.parametrize("kind", ["default", "linear", "proportional"])
def test_gemma4_is_told_by_what_frequencies_are_divided_of_every_kind(kind: str) -> None:
    rope = {"rope_type": kind, "partial_rotary_factor": 0.25, "factor": 2.0}
    config = network("gemma4_text").config
    config.rope_parameters = {"full_attention": rope}
    found = rope_factors(config, ARCHITECTURES["gemma4_text"])  # llama.cpp does not load a file without them
    assert found is not None and (found == 1).all() == (kind != "proportional")


def test_a_dynamic_rotary_embedding_is_the_plain_one_as_far_as_the_refusal_says() -> None:
    ids = torch.arange(2, 2 + 140)[None] % 250
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    plain, scaled = network("llama"), network("llama", rope_parameters=rope)
    with torch.no_grad():
        assert torch.equal(plain(ids[:, :128]).logits, scaled(ids[:, :128]).logits)
        assert not torch.allclose(plain(ids).logits, scaled(ids).logits, rtol=1e-3)
