"""Checkpoints of compressed-tensors, loaded by transformers with that library."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.torch_flow.export.networks import IDS, Mixed, llama, logits
from tests.torch_flow.export.programs import loaded_by
from tests.torch_flow.export.test_reload import layer, nvfp4, quantized
from torch import nn

from quark.errors import ConfigError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.export.api import export_compressed_tensors, export_safetensors, import_model_from_safetensors
from quark.torch.export.write_as import config_for
from quark.torch.files.foreign import quantized_model
from quark.torch.quantization.config.config import (
    FP8E4M3PerBlockSpec,
    FP8E4M3PerChannelSpec,
    FP8E4M3PerGroupSpec,
    FP8E4M3PerTensorSpec,
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    MX6Spec,
    OCP_MXFP4Spec,
    OCP_MXFP6E2M3Spec,
    OCP_MXFP8E4M3Spec,
    QConfig,
    QLayerConfig,
)
from quark.torch.quantized_layer import quantized_layers

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # of the library
INT8 = Int8PerChannelSpec(0, symmetric=True)
EXACT = {
    "W4A16 groups": layer(Int4PerGroupSpec(-1, 32)),
    "W4A16 channels": layer(Int4PerChannelSpec(0)),
    "W8A16": layer(INT8),
    "W8A8 int8": layer(INT8, Int8PerChannelSpec(1, is_dynamic=True)),
    "W8A8 int8 static": layer(INT8, Int8PerTensorSpec()),
    "W8A8 int8 static, zero points": layer(INT8, Int8PerTensorSpec(symmetric=False)),
    "W8A8 FP8": layer(FP8E4M3PerChannelSpec(0), FP8E4M3PerChannelSpec(1, is_dynamic=True)),
    "W8A8 FP8 static": layer(FP8E4M3PerTensorSpec(), FP8E4M3PerTensorSpec()),
}
EXACT["W8A8 int8"].input_tensors.symmetric = True
EXACT["W4A8 int8 (packed)"] = layer(Int4PerGroupSpec(-1, 32), Int8PerChannelSpec(1, True, is_dynamic=True))
EXACT["W4A8 FP8 (packed)"] = layer(Int4PerGroupSpec(-1, 32), FP8E4M3PerChannelSpec(1, is_dynamic=True))
EXACT["W4A4 int4 (packed)"] = layer(Int4PerChannelSpec(0), Int4PerChannelSpec(1, True, is_dynamic=True))
EXACT["FP8 blocks"] = layer(FP8E4M3PerBlockSpec(32, 32), FP8E4M3PerGroupSpec(-1, 32))
EXACT["FP8 blocks, parts at the edges"] = layer(FP8E4M3PerBlockSpec(48, 48), FP8E4M3PerGroupSpec(-1, 32))
IN_BFLOAT16 = {  # the library decodes these to bfloat16
    "NVFP4 weights": layer(nvfp4(False)),
    "MXFP4 weights": layer(OCP_MXFP4Spec(-1, False)),
    "MXFP4": layer(OCP_MXFP4Spec(-1, False), OCP_MXFP4Spec(-1, True)),
    "MXFP8 weights": layer(OCP_MXFP8E4M3Spec(-1, False)),
    "MXFP6 E2M3": layer(OCP_MXFP6E2M3Spec(-1, False), OCP_MXFP6E2M3Spec(-1, True)),
    "W4A16 groups, scales in bfloat16": layer(Int4PerGroupSpec(-1, 32, scale_type="bfloat16")),
}
KV_SCALES = ("k_scale", "v_scale")
PACKED = {name: 4 for name in EXACT if "packed" in name} | {"W4A16 groups": 4, "W8A16": 8}


def load(folder: Path) -> nn.Module:
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(found.values())
    return model


@pytest.mark.parametrize("name", [*EXACT, *IN_BFLOAT16])
def test_logits_are_those_of_the_quantized_model(name: str, tmp_path: Path) -> None:
    dtype = torch.float32 if name in EXACT else torch.bfloat16
    model = quantized(llama(dtype), QConfig({**EXACT, **IN_BFLOAT16}[name], exclude=["lm_head"]))
    expected, float_logits = logits(model), logits(llama(dtype))
    export_compressed_tensors(model, tmp_path / "m")
    theirs = logits(load(tmp_path / "m"))
    assert torch.allclose(theirs, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    assert (theirs - float_logits).abs().max() > 0.01 * expected.abs().max()
    loaded_by("compressed-tensors", name, "transformers", "compressed-tensors")


@pytest.mark.parametrize(
    "spec",
    [
        Int4PerGroupSpec(-1, -1),
        Int4PerGroupSpec(-1, -1, is_dynamic=True),
        Int4PerGroupSpec(-1, 32, is_dynamic=True),
        Int4PerChannelSpec(0, is_dynamic=True),
        Int8PerChannelSpec(0, True, is_dynamic=True),
        FP8E4M3PerChannelSpec(0, is_dynamic=True),
    ],
    ids=str,
)
def test_weights_whose_range_is_found_late_or_over_a_row(spec: Any, tmp_path: Path) -> None:
    """Scales come from the weight, not from its codes, which ask for others; a group as long as a row is a channel."""
    model = quantized(llama(), QConfig(layer(spec), exclude=["lm_head"]))
    export_compressed_tensors(model, tmp_path / "m")
    assert torch.equal(logits(load(tmp_path / "m")), logits(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EXACT)
def test_half_types_are_read_as_they_were_evaluated(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Weights and codes of inputs: the reader divides, adds and multiplies in the type of the model."""
    config = config_for(QConfig(EXACT[name], exclude=["lm_head"]), "compressed-tensors", "transformers", dtype)
    model = quantized(llama(dtype), config)
    evaluated = {path: one.weight_quantizer(one.weight).detach().clone() for path, one in quantized_layers(model)}
    export_compressed_tensors(model, tmp_path / "m", program="transformers")
    theirs = load(tmp_path / "m")
    read = logits(theirs)  # the first run decodes
    assert len(evaluated) == 14 and torch.equal(read, logits(model))
    if "zero points" not in name:  # which no grid of ours has
        assert torch.equal(logits(quantized_model(tmp_path / "m")), read)  # and so does our own import
    for path, weight in evaluated.items():
        assert torch.equal(theirs.get_submodule(path).weight.float(), weight.float()), path
    inputs = {
        key: value for key, value in load_file(tmp_path / "m" / "model.safetensors").items() if "input_scale" in key
    }
    assert all(torch.equal(value.to(dtype).float(), value.float()) for value in inputs.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", ["fp8", "fp8_per_head"])
def test_scales_of_caches_in_half_types_are_those_that_were_evaluated(
    cache: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = LLMTemplate.get("llama").get_config("fp8", kv_cache_scheme=cache)
    config = config_for(config, "compressed-tensors", "transformers", dtype)
    export_compressed_tensors(quantized(llama(dtype), config), tmp_path / "m", program="transformers")
    stored = {key: one for key, one in load_file(tmp_path / "m" / "model.safetensors").items() if key[-7:] in KV_SCALES}
    theirs = load(tmp_path / "m").state_dict()
    assert len(stored) == 4 and {theirs[key].dtype for key in stored} == {dtype}
    for key, scale in stored.items():
        assert torch.equal(theirs[key].float().flatten(), scale.float().flatten()), key


@pytest.mark.parametrize("name", PACKED)
def test_integers_below_8_bits_are_packed(name: str, tmp_path: Path) -> None:
    export_compressed_tensors(quantized(llama(), QConfig(EXACT[name], exclude=["lm_head"])), tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert described["format"] == "pack-quantized"
    words = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.down_proj.weight_packed"]
    assert (words.dtype, tuple(words.shape)) == (torch.int32, (64, 128 * PACKED[name] // 32))


def test_scales_of_packed_integers_are_in_the_models_type(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, kept in (("bfloat16", torch.bfloat16), ("float", torch.float32)):
        config = QConfig(layer(Int4PerGroupSpec(-1, 32, scale_type=name)), exclude=["lm_head"])
        model = llama(torch.bfloat16)
        nn.init.constant_(model.model.layers[1].mlp.down_proj.weight, 7.5)  # the last layer's scales are 1 in any type
        export_compressed_tensors(quantized(model, config), tmp_path / name)
        tensors = load_file(tmp_path / name / "model.safetensors")
        scales = [value for key, value in tensors.items() if key.endswith("weight_scale")]
        assert tensors["model.layers.0.mlp.down_proj.weight_scale"].dtype is kept
        worst = max(float(((one.bfloat16().float() - one.float()) / one.float()).abs().max()) for one in scales)
        assert (f"cast them to bfloat16 move them by up to {worst:.2g};" in caplog.text) is (worst > 0)
        assert (worst > 0) is (name == "float")


NEAR = {
    "NVFP4": layer(nvfp4(False), nvfp4(True)),
    "MXFP8": layer(OCP_MXFP8E4M3Spec(-1, False), OCP_MXFP8E4M3Spec(-1, True)),
}


@pytest.mark.parametrize("name", NEAR)
def test_inputs_under_scales_that_transformers_rounds_otherwise_are_for_vllm_alone(name: str, tmp_path: Path) -> None:
    """The library computes local scales of NVFP4 in bfloat16, and rounds exponents of MXFP8 up elsewhere than we do:
    other answers, without a word."""
    model = quantized(llama(torch.bfloat16), QConfig(NEAR[name], exclude=["lm_head"]))
    with pytest.raises(ConfigError, match=r"rounds the scales of the blocks of the inputs of 'model\.layers\.0.*vllm"):
        export_compressed_tensors(model, tmp_path / "m")
    export_compressed_tensors(model, tmp_path / "m", program="vllm")
    theirs, ours = logits(load(tmp_path / "m")).float(), logits(model).float()
    assert float((theirs - ours).norm() / ours.norm()) > 0.02  # no longer so: the refusal is to go


@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp6_e2m3", "mxfp4_weight_only"])
def test_inputs_in_other_blocks_are_as_they_were_evaluated(scheme: str, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme)
    model = quantized(llama(torch.bfloat16), config_for(config, "compressed-tensors", "transformers", torch.bfloat16))
    export_compressed_tensors(model, tmp_path / "m", program="transformers")
    assert torch.equal(logits(load(tmp_path / "m")), logits(model))


@torch.no_grad()
def test_global_scales_of_nvfp4_are_those_of_the_library(tmp_path: Path) -> None:
    """What values are multiplied by: 448 x 6, the largest scale and the largest number, over the largest magnitude."""
    model = llama()
    seen = model.model.layers[0].input_layernorm(model.model.embed_tokens(IDS))
    weight = model.model.layers[0].self_attn.q_proj.weight.clone()
    made = quantized(model, QConfig(NEAR["NVFP4"], exclude=["lm_head"]))
    export_compressed_tensors(made, tmp_path / "m", program="vllm")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    for role, values in (("input", seen), ("weight", weight)):
        found = tensors[f"model.layers.0.self_attn.q_proj.{role}_global_scale"]
        assert float(found) == pytest.approx(448 * 6 / float(values.abs().max()), rel=1e-5)


def test_frozen_and_reloaded_models_give_the_same_files(tmp_path: Path) -> None:
    config = QConfig(EXACT["W4A16 groups"], exclude=["lm_head"])
    model = quantized(llama(), config)
    export_compressed_tensors(model, tmp_path / "a", max_shard_size=50_000)
    export_safetensors(model, tmp_path / "quark")
    again = import_model_from_safetensors(llama(), tmp_path / "quark")
    export_compressed_tensors(again, tmp_path / "b", max_shard_size=50_000)
    files = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_layers_of_their_own_get_groups_of_their_own(tmp_path: Path) -> None:
    special = {"*down_proj": EXACT["W8A16"]}
    model = quantized(llama(), QConfig(EXACT["W4A16 groups"], exclude=["lm_head"], layer_quant_config=special))
    export_compressed_tensors(model, tmp_path / "m")
    groups = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert sorted(len(group["targets"]) for group in groups.values()) == [2, 12]
    assert torch.equal(logits(load(tmp_path / "m")), logits(model))


@pytest.mark.parametrize(("scheme", "heads"), [("fp8", 1), ("fp8_per_head", 2)])
@torch.no_grad()
def test_scales_of_caches_are_in_the_places_of_the_library(scheme: str, heads: int, tmp_path: Path) -> None:
    """The library makes the places, transformers fills them; the values are amax / 448 of keys and values."""
    model = llama(dtype=torch.float32)
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(IDS))
    attention = model.model.layers[0].self_attn
    wanted = {role: getattr(attention, f"{role}_proj")(hidden).unflatten(-1, (heads, -1)) for role in "kv"}
    amax = {role: values.abs().amax((0, 1, 3)) for role, values in wanted.items()}
    if heads == 1:  # keys and values share it
        amax = dict.fromkeys("kv", torch.maximum(*amax.values()))
    floats = ["lm_head", "*.q_proj", "*.k_proj", "*.v_proj"]
    config = LLMTemplate.get("llama").get_config("ptpc_fp8", kv_cache_scheme=scheme, exclude_layers=floats)
    export_compressed_tensors(quantized(model, config), tmp_path / "m")
    loaded = load(tmp_path / "m").model.layers[0].self_attn
    assert loaded.quantization_scheme.input_activations.strategy == ("tensor" if heads == 1 else "attn_head")
    for role in "kv":
        found = getattr(loaded, f"{role}_scale")
        assert tuple(found.shape) == ((1,) if heads == 1 else (heads, 1, 1))
        torch.testing.assert_close(found.flatten(), amax[role] / 448, rtol=1e-5, atol=0)


def test_what_the_format_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    model = quantized(llama(), QConfig(layer(MX6Spec(-1))))
    with pytest.raises(ConfigError, match=r"cannot hold 'model\.layers\.0.*mx6 are not a format of it"):
        export_compressed_tensors(model, tmp_path / "m")
    int8 = Int8PerTensorSpec().to_quantization_spec()
    mixed = quantized(Mixed(), QConfig(QLayerConfig(weight=int8, output_tensors=int8)))
    with pytest.raises(ConfigError, match="'fc': output_tensors is quantized"):
        export_compressed_tensors(mixed, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    assert IDS.shape == (2, 12)


@pytest.mark.parametrize("scheme", ["ptpc_fp8", "ptpc_int8"])
def test_inputs_that_the_library_scales_otherwise_are_refused(scheme: str, tmp_path: Path) -> None:
    """Per token it keeps the first two axes: the pooled inputs of a classifier would share one scale."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=1, vocab_size=64
    )
    float_model, template = transformers.BertForSequenceClassification(config).eval(), LLMTemplate.get("llama")
    with torch.no_grad():
        for value in float_model.parameters():
            value.copy_(torch.randn(value.shape) / 8)
    pooled = ["bert.pooler.dense", "classifier"]
    for exclude, reason in (([], "classifier|pooler"), (pooled, None)):
        model = quantized(copy.deepcopy(float_model), template.get_config(scheme, exclude_layers=exclude))
        folder = tmp_path / f"{len(exclude)}"
        if reason:
            with pytest.raises(ConfigError, match=f"inputs of '.*({reason}).*2 axes.*--exclude"):
                export_compressed_tensors(model, folder)
            export_compressed_tensors(model, folder, program="vllm")
            continue
        export_compressed_tensors(model, folder)
        theirs = transformers.BertForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        assert torch.allclose(logits(theirs), logits(model), rtol=0, atol=1e-5)


def test_groups_that_do_not_divide_inputs_are_refused(tmp_path: Path) -> None:
    """transformers reads such a folder and fails when it runs."""
    model = quantized(llama(), LLMTemplate.get("llama").get_config("fp8_block"))
    with pytest.raises(ConfigError, match=r"cannot cut the 64 inputs of .* into groups of 128"):
        export_compressed_tensors(model, tmp_path / "m")


def test_a_model_that_is_not_of_transformers_is_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    spec = Int8PerChannelSpec(0, symmetric=True).to_quantization_spec()
    ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec))).quantize_model(model)
    export_compressed_tensors(model, tmp_path)
    assert "2.weight_scale" in load_file(tmp_path / "model.safetensors")
    alone = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec))).quantize_model(nn.Linear(8, 4))
    with pytest.raises(ConfigError, match="a model that is one layer has no name: put it in a module"):
        export_compressed_tensors(alone, tmp_path / "alone")
