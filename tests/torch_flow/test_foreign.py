"""Codes that another program wrote, carried over bit for bit into every format whose grid agrees."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.pairs import thinned
from tests.torch_flow.export.networks import llama, logits
from tests.torch_flow.export.test_reload import quantized

from quark.config.file_formats import FORMATS, table
from quark.errors import ConfigError, ModelError, QuarkError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.config.schemes import NAMES
from quark.torch.export.write_as import config_for, export_as
from quark.torch.files.foreign import convert, quantized_model
from quark.torch.files.prequantized import dequantize_checkpoint
from quark.torch.quantized_layer import quantized_layers

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"hidden_size": 64, "intermediate_size": 128}
SOURCES = {
    "int4_wo_32": ("quark", "awq", "gptq", "gptq_v2", "compressed-tensors"),
    "uint4_wo_32": ("quark", "awq", "gptq_v2"),
    "int8_wo_per_channel": ("quark", "gptq", "compressed-tensors"),
    "fp8": ("quark", "fp8", "compressed-tensors"),
    "ptpc_int8": ("quark", "compressed-tensors"),
    "ptpc_fp8": ("quark", "compressed-tensors", "modelopt"),
    "fp8_block": ("quark", "compressed-tensors", "fp8"),
    "nvfp4": ("quark", "compressed-tensors", "modelopt"),
    "mxfp8": ("quark", "compressed-tensors", "modelopt"),
    "mxfp4": ("quark", "compressed-tensors"),
    "mxfp4_weight_only": ("quark", "compressed-tensors"),
}


@pytest.fixture(scope="module", params=SOURCES)
def scheme(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, quantized(llama(**SIZES), LLMTemplate.get("llama").get_config(request.param))


def write(model: Any, folder: Path, format: str) -> None:
    """A model in a format."""
    export_as(model, folder, format, folder, program="vllm")


def values(model: Any) -> dict[str, torch.Tensor]:
    """The weights that a model multiplies by."""
    return {name: layer.fake_quantized()._parameters["weight"].detach() for name, layer in quantized_layers(model)}


def test_codes_go_from_every_format_into_every_other_one(scheme: tuple[str, Any], tmp_path: Path) -> None:
    """From each into each: the values are those of the first model, and so are the answers."""
    name, model = scheme
    wanted = values(model)
    for first in SOURCES[name]:
        write(model, tmp_path / first, first)
        again = quantized_model(tmp_path / first)
        assert {key: torch.equal(value, wanted[key]) for key, value in values(again).items()} == dict.fromkeys(
            wanted, True
        )
        assert torch.equal(logits(again), logits(model)), first
        for second in SOURCES[name]:
            goal = tmp_path / f"{first} to {second}"
            write(again, goal, second)
            found, expected = (load_file(folder / "model.safetensors") for folder in (goal, tmp_path / first))
            if first == second:
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[key], expected[key].to(found[key].dtype)) for key in found)


@pytest.mark.parametrize("name", ["mxfp6_e3m2", "mx9", "amdfp4", "int4_fp8_128", "int4_int8_128", *thinned(SOURCES, 3)])
def test_every_pair_is_equal_or_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    """From our own format, which holds all schemes, into every other one; nothing stays of what is refused."""
    wide = {"int4_fp8_128": 128, "int4_int8_128": 128, "fp8_block": 256}  # blocks end where vLLM's shards do
    sizes = {**SIZES, "hidden_size": wide.get(name, SIZES["hidden_size"])}
    model = quantized(llama(**sizes), LLMTemplate.get("llama").get_config(name))
    wanted, answers, done = values(model), logits(model), ["quark"]
    write(model, tmp_path / "quark", "quark")
    for format in (one for one in FORMATS if one not in ("quark", "onnx")):
        try:
            convert(tmp_path / "quark", tmp_path / format, format, "vllm")
        except QuarkError as error:
            assert "\n" not in str(error) and len(str(error)) > 20
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted(done), format
            continue
        done.append(format)
        again = quantized_model(tmp_path / format)
        assert all(torch.equal(value, wanted[key]) for key, value in values(again).items()), format
        assert torch.equal(logits(again), answers), format
    unread = {row.format for row in UNREAD if (row.scheme, row.program) == (name, "vllm")}
    assert set(SOURCES.get(name, ())) - unread <= set(done)  # what is equal is not refused


CELLS = [
    pytest.param(
        row.scheme, row.format, row.program, dtype,
        marks=[pytest.mark.slow] * (dtype is torch.float32 or (row.format != "compressed-tensors" and place % 5 > 0)),
    )
    for dtype in (torch.bfloat16, torch.float32)
    for place, row in enumerate(table())
    if row.works and row.program in ("vllm", "transformers") and row.format not in ("gguf", "onnx", "mxfp4")
    and row.scheme in NAMES
]  # fmt: skip


UNREAD = [row for row in table() if row.scheme in NAMES and row.program in ("vllm", "transformers") and not row.works]


@pytest.mark.parametrize("name", sorted({row.scheme for row in UNREAD if row.format in ("quark", "modelopt")}))
def test_what_a_program_does_not_read_is_not_written_for_it(name: str, tmp_path: Path) -> None:
    """As ``quantize`` does it: by the table of formats, whatever the scheme is called in the folder."""
    model = quantized(llama(hidden_size=128), LLMTemplate.get("llama").get_config(name))
    write(model, tmp_path / "q", "quark")
    for row in (one for one in UNREAD if one.scheme == name and one.format in ("quark", "modelopt")):
        with pytest.raises(ConfigError, match=re.escape(row.shown_by)):
            convert(tmp_path / "q", tmp_path / row.format, row.format, row.program)
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


@pytest.mark.parametrize(("name", "format", "program", "dtype"), CELLS)
def test_what_was_evaluated_for_a_program_comes_back(
    name: str, format: str, program: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Narrow codes, types that scales and codes of inputs are computed in, products that a kernel rounds again."""
    config = config_for(LLMTemplate.get("llama").get_config(name), format, program, dtype)
    model = quantized(llama(dtype, hidden_size=128, intermediate_size=256), config)
    try:
        export_as(model, tmp_path / "m", format, tmp_path, program=program)
    except ConfigError as error:  # blocks in float32
        assert dtype is torch.float32 and "decodes the blocks" in str(error)
        return
    assert torch.equal(logits(quantized_model(tmp_path / "m")), logits(model))


MIXES: dict[str, tuple[list[str], dict[str, str]]] = {  # what stays float, what has another scheme
    "experts of a layer": (["*layers.1*experts*"], {}),
    "an expert": (["*layers.1*experts.0.*"], {}),
    "a projection": (["*layers.1*down*"], {}),
    "another projection": ([], {"*down_proj": "int8_wo_per_channel"}),
    "another layer": ([], {"*layers.0*": "int8_wo_per_channel"}),
    "another attention": ([], {"*self_attn*": "int8_wo_per_channel"}),
}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("mix", MIXES)
def test_experts_of_several_schemes_are_for_vllm_alone(mix: str, kind: str, tmp_path: Path) -> None:
    """transformers stacks experts by one scheme: of others it made other numbers, without a word, or broke off."""
    from tests.consumers import tiny

    model, (floats, layers) = tiny.made(kind, dict(tiny.model_types())[kind], {}), MIXES[mix]
    config = LLMTemplate.for_model(model).get_config("int4_wo_32", layer_config=layers)
    ModelQuantizer(replace(config, exclude=[*config.exclude, *floats])).quantize_model(model)
    with pytest.raises(ConfigError, match=r"it stacks experts by one scheme, and 'model\.layers"):
        export_as(model, tmp_path / "a", "compressed-tensors", tmp_path)
    assert not (tmp_path / "a").exists()
    export_as(model, tmp_path / "b", "compressed-tensors", tmp_path, program="vllm")
    again, inputs = quantized_model(tmp_path / "b"), tiny.inputs_of(model)
    assert torch.equal(tiny.answer(again, inputs), tiny.answer(model, inputs))


@pytest.mark.parametrize("file", ["model.gguf", "quark_model.onnx"])
def test_files_that_are_not_read_back_are_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / file).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=f"{re.escape(str(tmp_path / 'a'))}.*{file}.* is not read"):
        convert(tmp_path / "a", tmp_path / "b", "quark")
    assert not (tmp_path / "b").exists()


def test_a_cache_goes_from_every_format_into_every_other_one(tmp_path: Path) -> None:
    """A folder of ours names the layers that make it: formats in which all layers are alike refused it."""
    formats = ("quark", "fp8", "modelopt", "compressed-tensors")
    config = LLMTemplate.get("llama").get_config("fp8", kv_cache_scheme="fp8")
    model = quantized(llama(**SIZES), replace(config, kv_cache_post_rope=True))
    wanted = logits(model)
    for first in formats:
        write(model, tmp_path / first, first)
        for second in formats:
            goal = tmp_path / f"{first} to {second}"
            convert(tmp_path / first, goal, second, "vllm")
            assert torch.equal(logits(quantized_model(goal)), wanted), goal.name
    assert not torch.equal(wanted, logits(quantized(llama(**SIZES), LLMTemplate.get("llama").get_config("fp8"))))


@pytest.mark.parametrize("format", ["quark", "compressed-tensors"])
@pytest.mark.parametrize("program", [None, "vllm"])
def test_a_cache_beside_layers_of_several_schemes(format: str, program: str | None, tmp_path: Path) -> None:
    mixed = {"*layers.0.*": "ptpc_fp8"}
    config = LLMTemplate.get("llama").get_config("int4_wo_32", kv_cache_scheme="fp8", layer_config=mixed)
    model = quantized(llama(**SIZES), config_for(config, format, program, torch.float32))
    export_as(model, tmp_path / "a", format, tmp_path, program=program)
    assert torch.equal(logits(quantized_model(tmp_path / "a")), logits(model))


def test_what_would_not_be_the_same_is_refused(tmp_path: Path) -> None:
    model = quantized(llama(**SIZES), LLMTemplate.get("llama").get_config("uint4_wo_32"))
    write(model, tmp_path / "a", "gptq_v2")
    with pytest.raises(ConfigError, match="'fp8' does not fit"):
        convert(tmp_path / "a", tmp_path / "b", "fp8")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.g_idx"] = tensors["model.layers.0.self_attn.q_proj.g_idx"].flip(0)
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"q_proj.*desc_act.*--requantize"):
        quantized_model(tmp_path / "a")


def gpt_oss(folder: Path) -> Any:
    """A folder as gpt_oss is published: stacked experts in blocks of MXFP4; its float model."""
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32, num_local_experts=2, num_experts_per_tok=1, vocab_size=64,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval()
    tensors, generator = dict(model.state_dict()), torch.Generator().manual_seed(0)
    levels = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors[name].shape
        codes = torch.randint(0, 16, (experts, rows, columns), generator=generator)
        scales = torch.randint(118, 124, (experts, rows, columns // 32), generator=generator)
        stack = torch.tensor([*levels, *(-level for level in levels)])[codes]
        stack = stack * (2.0 ** (scales - 127)).repeat_interleave(32, -1)
        tensors.pop(name)
        model.get_parameter(name).data.copy_(stack.transpose(1, 2))
        packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{name}_blocks"] = packed.reshape(experts, rows, columns // 32, 16)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
    model.save_pretrained(folder)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}))
    return model


def test_experts_of_gpt_oss_keep_their_values(tmp_path: Path) -> None:
    """Blocks of MXFP4, stacked, interleaved and with biases, become experts of the format quark."""
    model, ids = gpt_oss(tmp_path / "q"), torch.arange(3, 40)[None]
    convert(tmp_path / "q", tmp_path / "c", "quark")
    again = quantized_model(tmp_path / "c")
    assert sum(1 for _ in quantized_layers(again)) == 6
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("cache", [None, "fp8", "fp8_per_head"])
def test_caches_are_carried_over(cache: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    """To quark and back: the same tensors, and the answers of the model that was written."""
    config = LLMTemplate.get("llama").get_config("ptpc_fp8", kv_cache_scheme=cache)
    model = quantized(llama(dtype, **SIZES), replace(config, kv_cache_post_rope=cache is not None))
    write(model, tmp_path / "a", "compressed-tensors")
    assert torch.equal(logits(quantized_model(tmp_path / "a")), logits(model))
    convert(tmp_path / "a", tmp_path / "b", "quark")
    convert(tmp_path / "b", tmp_path / "c", "compressed-tensors", "vllm")
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in "ac")
    assert first.keys() == last.keys() and all(torch.equal(first[key], last[key]) for key in first)
    assert sum(key.endswith((".k_scale", ".v_scale")) for key in first) == (4 if cache else 0)
    first, last = (json.loads((tmp_path / name / "config.json").read_text())["quantization_config"] for name in "ac")
    assert first.get("kv_cache_scheme") == last.get("kv_cache_scheme")


def test_caches_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = quantized(llama(**SIZES), LLMTemplate.get("llama").get_config("ptpc_fp8", kv_cache_scheme="fp8_per_head"))
    write(model, tmp_path / "m", "compressed-tensors")
    path, name = tmp_path / "m" / "model.safetensors", "model.layers.1.self_attn.v_scale"
    tensors, config = load_file(path), json.loads((tmp_path / "m" / "config.json").read_text())
    save_file({**tensors, name: tensors[name][:1].clone()}, path)
    with pytest.raises(ModelError, match=f"'{name}' has 1 values, and the model has 2 for it"):
        quantized_model(tmp_path / "m")
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(ModelError, match=f"has a kv_cache_scheme and lacks '{name}'"):
        quantized_model(tmp_path / "m")
    config["quantization_config"]["kv_cache_scheme"]["num_bits"] = 4
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="kv_cache_scheme is float of 4 bits per attn_head"):
        quantized_model(tmp_path / "m")


def test_a_quantized_cache_does_not_keep_a_folder_from_being_decoded(tmp_path: Path) -> None:
    model = quantized(llama(**SIZES), LLMTemplate.get("llama").get_config("ptpc_fp8", kv_cache_scheme="fp8_per_head"))
    write(model, tmp_path / "m", "compressed-tensors")
    dequantize_checkpoint(tmp_path / "m", tmp_path / "float")
    found = load_file(tmp_path / "float" / "model.safetensors")
    assert found.keys() == llama(**SIZES).state_dict().keys()


@pytest.mark.parametrize("kind", ["qwen2_vl", "bert", "electra", "llava", "clip", "mixtral"])
def test_what_is_read_and_written_again_has_the_names_of_the_file(kind: str, tmp_path: Path) -> None:
    """transformers knows more renames than a file needs: of old names (gamma), and of prefixes that a file lacks."""
    from tests.consumers import tiny

    from quark.torch import ModelQuantizer

    model = tiny.made(kind, dict(tiny.model_types())[kind], {})
    model.save_pretrained(tmp_path / "float")
    model = type(model).from_pretrained(tmp_path / "float", dtype=torch.float32)
    config = LLMTemplate.for_model(model).get_config("int8_wo_per_channel")
    export_as(ModelQuantizer(config).quantize_model(model), tmp_path / "a", "quark", tmp_path / "float")
    convert(tmp_path / "a", tmp_path / "b", "quark")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert set(before) == set(after)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    written = set(load_file(tmp_path / "float" / "model.safetensors"))
    assert written <= set(before)


@pytest.mark.parametrize("format", ["compressed-tensors", "fp8"])
def test_a_head_of_its_own_is_read_whatever_the_configuration_says(format: str, tmp_path: Path) -> None:
    """transformers ties only what the files lack."""
    model = quantized(llama(**SIZES), LLMTemplate.get("llama").get_config("fp8"))
    wanted = logits(model)
    write(model, tmp_path / "a", format)
    path = tmp_path / "a" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    convert(tmp_path / "a", tmp_path / "b", "compressed-tensors", "vllm")
    for name in "ab":
        assert torch.allclose(logits(quantized_model(tmp_path / name)), wanted, atol=1e-5)


@pytest.mark.parametrize(
    "told",
    [
        *([], [1], 5, "float32", {"scale_rule": "float32"}, {"narrow": True}),
        *({"scale_rule": rule, "narrow": True} for rule in ("no such", None, 5, ["float32"], {})),
        *({"scale_rule": "float32", "narrow": narrow} for narrow in ("yes", 1.5, [True])),
        {"scale_rule": "float32", "narrow": True, "more": 1},
    ],
    ids=str,
)
def test_what_a_folder_tells_beside_its_arguments_is_checked(told: Any, tmp_path: Path) -> None:
    """The field is free in compressed-tensors: a stranger may have written it."""
    model = llama(torch.float32)
    config = LLMTemplate.for_model(model).get_config("int8_wo_per_channel")
    write(quantized(model, config), tmp_path / "a", "compressed-tensors")
    path = tmp_path / "a/config.json"
    words = json.loads(path.read_text())
    for group in words["quantization_config"]["config_groups"].values():
        group["weights"]["observer_kwargs"] = {"quark": told}
    path.write_text(json.dumps(words))
    with pytest.raises(ModelError, match="observer_kwargs"):
        quantized_model(tmp_path / "a")
    with pytest.raises(ModelError, match="observer_kwargs"):
        dequantize_checkpoint(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()
