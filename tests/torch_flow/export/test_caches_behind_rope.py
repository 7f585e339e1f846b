"""Quantized caches where their readers quantize them: behind the rotary embedding, on their way into the cache."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.consumers import tiny
from tests.consumers.cell import difference

from quark.errors import ConfigError, ModelError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.export.write_as import config_for, export_as
from quark.torch.files.foreign import convert, quantized_model
from quark.torch.files.quantize import quantize_checkpoint
from quark.torch.quantization import QConfig

KINDS = {  # what of attention each has
    "llama": ("fp8", "fp8_per_head", "int8"),  # grouped queries
    "qwen3": ("fp8", "fp8_per_head"),  # normalized keys
    "phi": ("fp8",),  # a part of each head is rotated
    "phi3": ("fp8", "fp8_per_head", "int8"),  # one layer makes queries, keys and values
    "cohere2": ("fp8_per_head",),  # layers without rotation
    "deepseek_v3": ("fp8",),  # keys of two parts, one of them rotated
    "jamba": ("fp8", "fp8_per_head"),  # no rotation
}
CASES = [(kind, cache) for kind, caches in KINDS.items() for cache in caches]


def made(kind: str) -> Any:
    return tiny.tiny_model(kind, dict(tiny.model_types())[kind])


def config_of(model: Any, cache: str, format: str, program: str | None) -> QConfig:
    config = LLMTemplate.for_model(model).get_config("int8_wo_per_channel", kv_cache_scheme=cache)
    return config_for(config, format, program, model.dtype)


def quantized(model: Any, config: QConfig) -> Any:
    return ModelQuantizer(config).quantize_model(copy.deepcopy(model), [tiny.inputs_of(model)])


@pytest.mark.parametrize(("kind", "cache"), CASES)
def test_transformers_answers_as_the_model_that_was_evaluated(kind: str, cache: str, tmp_path: Path) -> None:
    model = made(kind)
    ours = quantized(model, config_of(model, cache, "compressed-tensors", "transformers"))
    export_as(ours, tmp_path / "m", "compressed-tensors", tmp_path, program="transformers")
    inputs = tiny.inputs_of(model)
    wanted = tiny.answer(ours, inputs)
    theirs = type(model).from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert difference(tiny.answer(theirs, inputs), wanted) < 1e-5
    assert difference(tiny.answer(quantized_model(tmp_path / "m"), inputs), wanted) < 1e-5
    for module in theirs.modules():  # without its scales it answers otherwise
        for name in ("k_scale", "v_scale"):
            if hasattr(module, name):
                getattr(module, name).data.mul_(1.3)
    assert difference(tiny.answer(theirs, inputs), wanted) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", ["fp8", "fp8_per_head", "int8"])
def test_caches_of_models_in_half_types_too(cache: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path / "float")
    model = type(made("llama")).from_pretrained(tmp_path / "float", dtype=dtype)
    ours = quantized(model, config_of(model, cache, "compressed-tensors", "transformers"))
    export_as(ours, tmp_path / "m", "compressed-tensors", tmp_path, program="transformers")
    inputs = tiny.inputs_of(model)
    wanted = tiny.answer(ours, inputs)
    theirs = type(model).from_pretrained(tmp_path / "m", dtype=dtype)
    assert torch.equal(tiny.answer(theirs, inputs), wanted)
    assert torch.equal(tiny.answer(quantized_model(tmp_path / "m"), inputs), wanted)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi", "phi3"])
@pytest.mark.parametrize(("format", "program"), [("compressed-tensors", None), ("quark", "vllm"), ("modelopt", None)])
def test_the_scale_of_keys_covers_them_behind_rope(kind: str, format: str, program: str | None) -> None:
    """amax / 448 of the keys in the cache of the float model, in the layer that reads float inputs."""
    model = made(kind)
    config = replace(config_of(model, "fp8", format, program), kv_cache_group=[])
    floats = QConfig(global_quant_config=type(config.global_quant_config)())
    floats = replace(floats, kv_cache_quant_config=config.kv_cache_quant_config, kv_cache_post_rope=True)
    assert config.kv_cache_post_rope
    ours = quantized(model, floats)
    with torch.no_grad():
        cached = model(**tiny.inputs_of(model), use_cache=True).past_key_values.layers[0]
    (first, *_) = (one for one in ours.modules() if type(one).__name__ == "CacheQuantizer")
    for role, values in (("k", cached.keys), ("v", cached.values)):
        torch.testing.assert_close(getattr(first, role).scale, values.abs().amax() / 448)


@pytest.mark.parametrize(("kind", "why"), [
    ("gptj", r"has no place for 'transformer\.h\.0\.attn\.k_scale', and leaves that cache float"),
    ("gpt_neox", r"has no place for 'gpt_neox\.layers\.0\.attention\.k_scale', and leaves that cache float"),
    ("mimo_v2_flash", r"puts a scale in the place of the model's own 'model\.layers\.0\.self_attn\.v_scale'"),
    ("opt", r"cannot count the heads \(Cannot determine num_key_value_heads"),
    ("deepseek_v32", r"lets go of the cache .* before 'model\.layers\.0\.self_attn\.indexer' reads it too"),
    ("glm_moe_dsa", r"lets go of the cache .* before 'model\.layers\.0\.self_attn\.indexer' reads it too"),
])  # fmt: skip
def test_caches_that_transformers_has_no_place_for_are_refused(kind: str, why: str, tmp_path: Path) -> None:
    """It left the caches of the first two in float, without a word, and broke off at the last three."""
    model = made(kind)
    ours = quantized(model, config_of(model, "fp8", "compressed-tensors", "transformers"))
    with pytest.raises(ConfigError, match=f"transformers does not read this cache in compressed-tensors: it {why}"):
        export_as(ours, tmp_path / "m", "compressed-tensors", tmp_path, program="transformers")
    assert not (tmp_path / "m").exists()


def test_a_cache_that_is_quantized_in_part_is_refused(tmp_path: Path) -> None:
    """transformers would make up the scale of the values."""
    model = made("llama")
    config = config_of(model, "fp8", "compressed-tensors", "transformers")
    keys = {name: one for name, one in config.kv_cache_quant_config.items() if "k_proj" in name}
    ours = quantized(model, replace(config, kv_cache_quant_config=keys, kv_cache_group=[]))
    with pytest.raises(ConfigError, match=r"has no scale for 'model\.layers\.0\.self_attn\.v_scale'"):
        export_as(ours, tmp_path / "m", "compressed-tensors", tmp_path)


def test_an_encoder_decoder_is_refused_before_work() -> None:
    model = made("t5")
    config = config_of(model, "fp8", "compressed-tensors", "vllm")
    with pytest.raises(ModelError, match="is an encoder-decoder, whose cache cannot be quantized"):
        ModelQuantizer(config).check(model)


@pytest.mark.parametrize(("format", "program"), [
    ("compressed-tensors", None), ("modelopt", None), ("fp8", None), ("quark", "vllm"), ("quark", None),
])  # fmt: skip
def test_keys_before_rope_are_told(
    format: str, program: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = made("llama")
    ours = quantized(model, LLMTemplate.for_model(model).get_config("fp8", kv_cache_scheme="fp8"))
    export_as(ours, tmp_path / "m", format, tmp_path, program=program)
    told = any("kv_cache_post_rope=True" in record.getMessage() for record in caplog.records)
    assert told is ((format, program) != ("quark", None))
    if format == "quark" and program is None:
        for goal, reader in (("compressed-tensors", None), ("modelopt", None), ("fp8", None), ("quark", "vllm")):
            with pytest.raises(ConfigError, match="before the rotary embedding"):
                convert(tmp_path / "m", tmp_path / "x", goal, reader)
        convert(tmp_path / "m", tmp_path / "x", "quark")


@pytest.mark.parametrize("cache", ["fp8", "fp8_per_head"])
def test_file_to_file_writes_what_memory_does(cache: str, tmp_path: Path) -> None:
    model = made("llama")
    model.save_pretrained(tmp_path / "float")
    model = type(model).from_pretrained(tmp_path / "float")
    config = config_of(model, cache, "compressed-tensors", "vllm")
    inputs = tiny.inputs_of(model)
    quantize_checkpoint(tmp_path / "float", tmp_path / "quark", config, samples=[inputs])
    convert(tmp_path / "quark", tmp_path / "a", "compressed-tensors", "vllm")
    export_as(quantized(model, config), tmp_path / "b", "compressed-tensors", tmp_path, program="vllm")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert sum(name.endswith((".k_scale", ".v_scale")) for name in a) == 4


def test_the_quark_format_tells_vllm_which_layers_are_cached(tmp_path: Path) -> None:
    """vLLM knows the outputs of layers; our own import quantizes behind RoPE what they say."""
    model = made("llama")
    ours = quantized(model, config_of(model, "fp8", "quark", "vllm"))
    export_as(ours, tmp_path / "m", "quark", tmp_path, program="vllm")
    said = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert said["export"]["kv_cache_group"] == ["*k_proj", "*v_proj"]
    assert all(said["layer_quant_config"][name]["output_tensors"] for name in said["export"]["kv_cache_group"])
    names = load_file(tmp_path / "m" / "model.safetensors")
    assert sum(name.endswith(("k_scale", "v_scale")) for name in names) == 4
    inputs = tiny.inputs_of(model)
    assert torch.equal(tiny.answer(quantized_model(tmp_path / "m"), inputs), tiny.answer(ours, inputs))


def test_attention_that_keeps_no_cache_has_none_in_the_file(tmp_path: Path) -> None:
    """The linear attention of MiniMax makes keys and values, and they enter no cache: no sample reaches that one."""
    model = made("minimax")
    model.save_pretrained(tmp_path / "float")
    config = LLMTemplate.for_model(model).get_config("int8_wo_per_channel", kv_cache_scheme="fp8")
    inputs = [tiny.inputs_of(model)]
    assert "*.qkv_proj" in config.kv_cache_quant_config
    ours = quantized(model, config)
    export_as(ours, tmp_path / "memory", "quark", tmp_path)
    quantize_checkpoint(tmp_path / "float", tmp_path / "files", config, samples=inputs)
    for name in ("memory", "files"):
        again = quantized_model(tmp_path / name)
        assert list(again.quant_config.kv_cache_quant_config) == ["*.k_proj", "*.v_proj"], name
        assert difference(tiny.answer(again, inputs[0]), tiny.answer(ours, inputs[0])) < 1e-6
