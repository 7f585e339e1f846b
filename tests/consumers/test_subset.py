"""Consumers, the fast part: six kinds of architecture, four schemes, each loaded by the program that the format is for.

`make consumers` fills the whole table. The mutations show that the judge has eyes.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.errors import ConfigError
from quark.numerics.packing import unpack
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.export.before_work import check_before_work
from quark.torch.export.write_as import config_for, export_as
from quark.torch.files.foreign import convert, quantized_model
from quark.torch.files.quantize import quantize_checkpoint
from quark.torch.language import load_model

pytest.importorskip("transformers")


def module(name: str) -> ModuleType:
    """A file beside this one."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


tiny, cell = module("tiny"), module("cell")
KINDS = {
    "dense": "llama",
    "experts listed in files": "mixtral",
    "experts stacked in files": "gpt_oss",
    "state space and attention": "bamba",
    "vision and language": "qwen2_vl",
    "encoder": "bert",
}
SCHEMES = ("int4_wo_32", "fp8", "mxfp4", "int8_wo_per_channel")


@pytest.fixture(scope="module", params=KINDS.values())
def model(request: pytest.FixtureRequest) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
    found = tiny.tiny_model(request.param, dict(tiny.model_types())[request.param])
    yield found, tiny.inputs_of(found)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_computes_what_was_evaluated(model: Any, scheme: str) -> None:
    found = cell.check(model[0], scheme, "quark", model[1], tiny.answer)
    assert found["cell"] == "right", found
    assert found["cost"] > 0.01  # every layer moves the answer, so that a wrong one would show


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8"])
@pytest.mark.parametrize("name", ["llama", "qwen2_vl", "bert"])
def test_compressed_tensors(name: str, scheme: str) -> None:
    made = tiny.tiny_model(name, dict(tiny.model_types())[name])
    found = cell.check(made, scheme, "compressed-tensors", tiny.inputs_of(made), tiny.answer)
    assert found["cell"] == "right", found


@pytest.mark.filterwarnings("ignore")
def test_experts_of_gpt_oss_as_they_were_published(tmp_path: Path) -> None:
    """transformers' own loader has the values that were evaluated, and so has ours; a changed nibble is seen."""
    from quark.torch.experts import unfuse_experts

    model = tiny.tiny_model("gpt_oss", "GptOssForCausalLM").to(torch.bfloat16)
    inputs, config = tiny.inputs_of(model), LLMTemplate.for_model(model).get_config("mxfp4_weight_only")
    with pytest.raises(ConfigError, match=r"self_attn.q_proj' is quantized, and only experts can be"):
        check_before_work(model, config, "mxfp4", "vllm", tmp_path)
    config = replace(config, exclude=[*config.exclude, "*self_attn*"])
    check_before_work(model, config, "mxfp4", "vllm", tmp_path)
    model = ModelQuantizer(config).quantize_model(model, [inputs])
    export_as(model, tmp_path / "m", "mxfp4", tmp_path, program="vllm")
    loaded = type(model).from_pretrained(tmp_path / "m")
    unfuse_experts(loaded)
    wanted = dict(cell.effective(model))
    assert len(wanted) == 2 * 4 * 3 and all(".experts." in name for name in wanted)
    assert all(torch.equal(value, cell.weight_of(loaded, name)) for name, value in wanted.items())
    again = quantized_model(tmp_path / "m")
    model.model.rotary_emb = again.model.rotary_emb  # Module.to has rounded the frequencies, loading does not
    assert torch.equal(tiny.answer(again, inputs), tiny.answer(model, inputs))
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.gate_up_proj_blocks"][3, 5, 0, 0] ^= 0x30
    save_file(tensors, file, {"format": "pt"})
    changed = dict(cell.effective(quantized_model(tmp_path / "m")))
    assert [name for name in wanted if not torch.equal(wanted[name], changed[name])] == [
        "model.layers.1.mlp.experts.3.up_proj"
    ]


def test_stacks_of_blocks_are_experts_alone(tmp_path: Path) -> None:
    """Experts in another layout, or layers that are none, are refused by name."""
    for name, told in (("mixtral", "do not take turns"), ("llama", "only experts can be")):
        model = tiny.tiny_model(name, dict(tiny.model_types())[name])
        config = LLMTemplate.for_model(model).get_config("mxfp4_weight_only")
        with pytest.raises(ConfigError, match=told):
            check_before_work(model, config, "mxfp4", None, tmp_path)
        cell.quantize(model, "mxfp4_weight_only", tiny.inputs_of(model))
        with pytest.raises(ConfigError, match=told):
            export_as(model, tmp_path / name, "mxfp4", tmp_path)
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["qwen2_vl", "llama4", "voxtral"])
def test_models_of_more_than_text_are_loaded_whole(name: str, tmp_path: Path) -> None:
    """Pictures and sound: AutoModelForCausalLM has no such class, or the decoder of text alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    found = tiny.tiny_model(name, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[name])
    inputs = tiny.inputs_of(found)
    found.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert type(loaded) is type(found)
    assert torch.equal(tiny.answer(loaded, inputs), tiny.answer(found, inputs))


# ---- the eyes --------------------------------------------------------------------------------------------------------


def an_expert(tensors: dict[str, torch.Tensor]) -> None:
    one, other = (f"model.layers.0.block_sparse_moe.experts.{n}.w2.weight" for n in (0, 1))
    tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()


def a_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.o_proj.weight_scale"][0] *= 2


def a_nibble_order(tensors: dict[str, torch.Tensor]) -> None:
    words = tensors["model.layers.0.self_attn.q_proj.weight"]
    words.copy_((words & ~0xFF) | (words & 0xF) << 4 | (words >> 4) & 0xF)


def a_transposed_weight(tensors: dict[str, torch.Tensor]) -> None:
    codes = tensors["model.layers.0.self_attn.q_proj.weight"]
    values = torch.stack([codes >> 4 * k & 0xF for k in range(8)], -1).flatten(1)  # square: [in, out]
    turned = values.T.reshape(64, 8, 8)
    words = sum(turned[..., k] << 4 * k for k in range(8))
    tensors["model.layers.0.self_attn.q_proj.weight"] = words.to(torch.int32).contiguous()


@pytest.mark.parametrize("broken", [an_expert, a_scale, a_nibble_order, a_transposed_weight])
def test_every_fault_turns_the_cell_red(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.tiny_model("mixtral", "MixtralForCausalLM")
    load = cell.load

    def load_broken(wanted: Any, folder: Path) -> Any:
        tensors = load_file(folder / "model.safetensors")
        broken(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return load(wanted, folder)

    monkeypatch.setattr(cell, "load", load_broken)
    found = cell.check(model, "int4_wo_32", "quark", tiny.inputs_of(model), tiny.answer)
    assert found["cell"] == "silent" and found["worst"][0] > 1e-3, found
    assert found["error"] > cell.LOGITS


def test_files_have_the_names_of_the_original(tmp_path: Path) -> None:
    """Mixtral's own: ``block_sparse_moe.experts.0.w1``; and the router is named as a layer that stays float."""
    model = tiny.tiny_model("mixtral", "MixtralForCausalLM")
    cell.quantize(model, "int4_wo_32", tiny.inputs_of(model))
    cell.EXPORTS["quark"](model, tmp_path / "m")
    names = set(load_file(tmp_path / "m" / "model.safetensors"))
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight_scale" in names
    assert not any(".mlp." in name for name in names)
    told = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.block_sparse_moe.gate" in told["exclude"]


def test_a_tensor_that_is_missing_is_told(tmp_path: Path) -> None:
    """Not initialized at random: transformers only warns."""
    from quark.errors import ModelError

    model = tiny.tiny_model("mixtral", "MixtralForCausalLM")
    cell.quantize(model, "int4_wo_32", tiny.inputs_of(model))
    cell.EXPORTS["quark"](model, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    del tensors["model.layers.0.block_sparse_moe.experts.0.w1.weight_scale"]
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"experts\.0\.gate_proj"):
        cell.load(model, tmp_path / "m")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("hidden_size", 32, "model.embed_tokens.weight"),
        ("vocab_size", 96, "model.embed_tokens.weight"),
        ("num_hidden_layers", 3, "model.layers.2"),
        ("num_hidden_layers", 1, "model.layers.1"),
        ("intermediate_size", 96, "mlp.gate_proj.weight"),
    ],
)
def test_a_configuration_that_does_not_fit_the_tensors_is_refused(
    field: str, value: int, named: str, tmp_path: Path
) -> None:
    from quark.errors import ModelError
    from quark.torch.export.checkpoint import read_checkpoint
    from quark.torch.files.skeleton import read_skeleton
    from quark.torch.language import load_model

    tiny.tiny_model("llama", "LlamaForCausalLM").save_pretrained(tmp_path)
    assert load_model(tmp_path) is not None
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ModelError, match=re.escape(named)):
        load_model(tmp_path)
    if "layers" not in field:  # file by file, too
        with pytest.raises(ModelError, match=re.escape(named)):
            read_skeleton(read_checkpoint(tmp_path))


# ---- what the table over all types has found -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scheme", "why"),
    [
        ("mixtral", "fp8", "with float inputs"),
        ("aria_text", "int4_wo_32", "at random"),
        ("qwen3_vl_moe", "int4_wo_32", "at random"),  # stacked in the original, and turned
        ("dinov2", "fp8", "makes several tensors of one"),
        ("olmo_hybrid", "int4_wo_32", "of several tensors, which it can only where weights are FP8"),
        ("mt5", "int4_wo_32", "first values"),
        ("bert", "mxfp4", "this model computes in float32"),
        ("llama", "uint4_wo_32", "packed zero points"),
    ],
)
def test_what_transformers_misreads_is_refused_but_for_vllm(
    name: str, scheme: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refusal is a fault of the program: what is written for vLLM crashes there, or computes something else."""
    from quark.torch.export.api import export_compressed_tensors

    made = tiny.tiny_model(name, dict(tiny.model_types())[name])
    refused = cell.check(made, scheme, "compressed-tensors", tiny.inputs_of(made), tiny.answer)
    assert refused["cell"] == "import" and why in refused["why"] and "--format quark" in refused["why"], refused
    for_vllm = {"compressed-tensors": lambda model, folder: export_compressed_tensors(model, folder, program="vllm")}
    monkeypatch.setattr(cell, "EXPORTS", for_vllm)
    found = cell.check(made, scheme, "compressed-tensors", tiny.inputs_of(made), tiny.answer)
    assert found["cell"] in ("silent", "differs", "crash"), found


@pytest.mark.parametrize(
    ("name", "scheme", "form", "why"),
    [
        ("gpt_oss", "fp8", "quark", None),
        ("gpt_oss", "int4_wo_32", "quark", "whose rows take turns"),
        ("gpt_oss", "mxfp4", "compressed-tensors", "whose rows take turns"),
        ("mixtral", "int8", "compressed-tensors", "Unsupported FusedMoe scheme"),
        ("mixtral", "int4_wa_64", "compressed-tensors", "Unsupported FusedMoe scheme"),
        ("mixtral", "int8", "quark", "no kernel to run them"),
        ("mixtral", "ptpc_fp8", "modelopt", "a scale per row"),
        ("mixtral", "fp8", "modelopt", None),
        ("mixtral", "fp8", "compressed-tensors", None),
        ("granitemoehybrid", "nvfp4", "compressed-tensors", "w2_input_global_scale"),
        ("granitemoehybrid", "ptpc_int8", "quark", None),
        ("llama4_text", "int4_wo_32", "quark", r"q_proj' while it loads it .* packed along the outputs"),
        ("llama4_text", "int4_wo_32", "awq", "packed along the outputs"),
        ("llama4_text", "int4_wo_32", "compressed-tensors", None),
        ("llama4_text", "uint4_wo_32", "compressed-tensors", "have zero points"),
        ("llama4_text", "ptpc_fp8", "quark", None),
        ("llama4_text", "mxfp4", "quark", None),
    ],
)
def test_experts_that_vllm_does_not_load_are_refused(name: str, scheme: str, form: str, why: str | None) -> None:
    from quark.errors import ConfigError
    from quark.torch import LLMTemplate
    from quark.torch.export.before_work import check_before_work

    made = tiny.tiny_model(name, dict(tiny.model_types())[name])
    config = LLMTemplate.for_model(made).get_config(scheme)
    with nullcontext() if why is None else pytest.raises(ConfigError, match=why):
        check_before_work(made, config, form, "vllm", Path())


@pytest.mark.parametrize(
    "groups", [[], [["q_proj", "k_proj"]], [["*q_proj", "*k_proj", "*v_proj"], ["gate_proj", "up_proj"]]]
)
def test_groups_of_a_user_are_kept_and_what_they_lack_is_told(
    groups: list[list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For vLLM the siblings that it reads as one share a scale, whatever else does."""
    made = tiny.tiny_model("llama", dict(tiny.model_types())["llama"])
    config = LLMTemplate.for_model(made).get_config("fp8", shared_scale_groups=groups)
    quantized = ModelQuantizer(config).quantize_model(made, [tiny.inputs_of(made)])
    export_as(quantized, tmp_path / "m", "quark", tmp_path)
    assert ("rounds their FP8 weights again" in caplog.text) == (len(groups) < 2)
    caplog.clear()
    tiny.tiny_model("llama", "LlamaForCausalLM").save_pretrained(tmp_path / "s")
    quantize_checkpoint(tmp_path / "s", tmp_path / "f", config, samples=[tiny.inputs_of(made)])
    assert ("rounds their FP8 weights again" in caplog.text) == (len(groups) < 2)
    caplog.clear()
    convert(tmp_path / "f", tmp_path / "c", "compressed-tensors", "vllm")
    assert ("rounds their FP8 weights again" in caplog.text) == (len(groups) < 2)
    asked = config_for(config, "quark", "vllm", torch.float32).shared_scale_groups
    assert asked[: len(groups)] == groups and ["q_proj", "k_proj", "v_proj"] in asked


FUSED = {  # packed_modules_mapping of vLLM's models, and its stacked experts
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up",
    "w1": "w13", "w3": "w13", "q_a_proj": "qkv_a", "kv_a_proj_with_mqa": "qkv_a",
}  # fmt: skip


@pytest.mark.parametrize("program", ["vllm", None])
@pytest.mark.parametrize("form", ["quark", "compressed-tensors"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3"])
def test_weights_that_vllm_quantizes_again_stay_as_they_were(
    name: str, form: str, program: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its requantize_with_max_scale: layers read as one have the largest scale, and weights are rounded to it again."""
    made = tiny.tiny_model(name, dict(tiny.model_types())[name])
    config = config_for(LLMTemplate.for_model(made).get_config("fp8"), form, program, torch.float32)
    export_as(
        ModelQuantizer(config).quantize_model(made, [tiny.inputs_of(made)]),
        tmp_path / "m",
        form,
        tmp_path,
        program="vllm",
    )
    stored = {key: one for path in (tmp_path / "m").glob("*.safetensors") for key, one in load_file(path).items()}
    layers = [key.removesuffix(".weight_scale") for key in stored if key.endswith(".weight_scale")]
    together: dict[tuple[str, str], list[str]] = {}
    for layer in layers:
        parent, _, own = layer.rpartition(".")
        together.setdefault((parent, FUSED.get(own, own)), []).append(layer)
    assert sum(len(members) > 1 for members in together.values()) >= 3
    moved = 0
    for members in together.values():
        largest = max(stored[f"{layer}.weight_scale"].float() for layer in members)
        for layer in members:
            codes = stored[f"{layer}.weight"]
            plain = codes.half() * stored[f"{layer}.weight_scale"].half()
            again = (plain.float() / largest).clamp(-448, 448).to(torch.float8_e4m3fn)
            moved += int((again.float() != codes.float()).sum())
    assert moved == 0 if program else moved > 100
    assert ("rounds their FP8 weights again" in caplog.text) == (program is None)


@pytest.mark.parametrize("program", ["vllm", "transformers"])
def test_int4_on_fp8_has_the_scales_that_vllm_computes_with(program: str, tmp_path: Path) -> None:
    """Its convert_bf16_scales_to_fp8 leaves them as they are; from memory and file by file they are the same."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 128}
    LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=4)).to(torch.bfloat16).save_pretrained(tmp_path / "s")
    made = load_model(tmp_path / "s")
    config = LLMTemplate.for_model(made).get_config("int4_fp8_128", algorithm=["gptq"])
    config = config_for(config, "compressed-tensors", program, torch.bfloat16)
    samples = [torch.arange(128)[None]]
    model = ModelQuantizer(config).quantize_model(made, samples)
    export_as(model, tmp_path / "m", "compressed-tensors", tmp_path, program=program)
    quantize_checkpoint(tmp_path / "s", tmp_path / "q", config, samples=samples)
    convert(tmp_path / "q", tmp_path / "f", "compressed-tensors", program)
    stored, files = (load_file(tmp_path / name / "model.safetensors") for name in "mf")
    assert stored.keys() == files.keys() and all(torch.equal(stored[name], files[name]) for name in stored)
    scales = {name: value for name, value in stored.items() if name.endswith("weight_scale")}
    assert len(scales) == 7 and {one.dtype for one in scales.values()} == {torch.bfloat16}
    off = [(read_as_fp8(one) / one.float() - 1).abs().max() for one in scales.values()]
    assert max(off) == 0 if program == "vllm" else max(off) > 0.03


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("times", [1, 0.05])
def test_int4_on_fp8_is_evaluated_with_the_weights_that_vllm_makes(times: float, frozen: bool, tmp_path: Path) -> None:
    """Its kernel rounds products of codes and scales to FP8 (packed_scale_t); small factors are no bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 128}
    made = LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=4)).to(torch.bfloat16)
    with torch.no_grad():
        made.model.layers[0].mlp.down_proj.weight.mul_(times)
    config = config_for(LLMTemplate.for_model(made).get_config("int4_fp8_128"), "compressed-tensors", "vllm", None)
    quantizer = ModelQuantizer(config)
    model = quantizer.quantize_model(made, None)
    model = quantizer.freeze(model) if frozen else model
    export_as(model, tmp_path / "m", "compressed-tensors", tmp_path, program="vllm")
    stored = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    layer, scale = model.get_submodule(name), stored[f"{name}.weight_scale"].float()
    codes = unpack(stored[f"{name}.weight_packed"].view(torch.uint8), 4, 512, "low").float() - 8
    inside, factor = fp8_scales(scale)
    wanted = (inside.repeat_interleave(128, 1) * codes).to(torch.float8_e4m3fn).float() * factor
    own = (layer.weight if frozen else layer.weight_quantizer(layer.weight)).float()
    assert (own - wanted).norm() / wanted.norm() <= (0 if times == 1 else 0.002)


@pytest.mark.parametrize("program", ["vllm", None])
@pytest.mark.parametrize(
    ("scheme", "form"),
    [("ptpc_int8", "quark"), ("ptpc_int8", "compressed-tensors"), ("int4_int8_128", "compressed-tensors")],
)
def test_int8_tokens_are_rounded_as_vllm_rounds_them(scheme: str, form: str, program: str | None) -> None:
    """Its operators divide the largest of a token by 127, whatever a file says; others by 127.5."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64}
    made = LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=4))
    config = config_for(LLMTemplate.for_model(made).get_config(scheme), form, program, torch.float32)
    layer = ModelQuantizer(config).quantize_model(made).model.layers[0].mlp.up_proj
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    scale = x.abs().amax(-1, keepdim=True) / 127
    apart = (layer.input_quantizer(x) - (x / scale).round() * scale).abs().max()
    assert apart < 1e-5 if program else apart > 0.003


def read_as_fp8(scales: torch.Tensor) -> torch.Tensor:
    """What vLLM's kernel of int4 on FP8 makes of scales of groups."""
    inside, factor = fp8_scales(scales)
    return inside * factor


def fp8_scales(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 scales of groups, a row an output, and the factor of each: quantized as tokens, and by 8."""
    factor = (scales.float().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    codes = (scales.float() / factor).to(torch.float8_e4m3fn)
    return (codes.float() / 8).to(torch.float8_e4m3fn).float(), factor * 8


@pytest.mark.parametrize(("form", "why"), [("quark", "--exclude"), ("compressed-tensors", None)])
def test_float_experts_of_gpt_oss_are_for_vllm_in_one_format(form: str, why: str | None) -> None:
    from quark.errors import ConfigError
    from quark.torch import LLMTemplate
    from quark.torch.export.before_work import check_before_work

    made = tiny.tiny_model("gpt_oss", dict(tiny.model_types())["gpt_oss"])
    config = LLMTemplate.for_model(made).get_config("fp8", exclude_layers=["*experts*", "*router*", "lm_head"])
    with nullcontext() if why is None else pytest.raises(ConfigError, match=why):
        check_before_work(made, config, form, "vllm", Path())


@pytest.mark.parametrize(
    ("name", "form", "why"),
    [
        ("gemma3_text", "quark", None),
        ("phimoe", "quark", None),
        ("gemma3_text", "compressed-tensors", None),
        ("llama", "quark", None),
        ("deepseek_v3", "quark", "makes together"),
        ("deepseek_v3", "compressed-tensors", "makes together"),
    ],
)
def test_caches_that_vllm_does_not_load_are_refused(name: str, form: str, why: str | None) -> None:
    from quark.errors import ConfigError
    from quark.torch import LLMTemplate
    from quark.torch.export.before_work import check_before_work

    made = tiny.tiny_model(name, dict(tiny.model_types())[name])
    config = LLMTemplate.for_model(made).get_config("fp8", kv_cache_scheme="fp8")
    check_before_work(made, config, "quark", None, Path())
    with nullcontext() if why is None else pytest.raises(ConfigError, match=why):
        check_before_work(made, config, form, "vllm", Path())


@pytest.mark.parametrize("name", ["gemma3_text", "gptj", "phimoe"])
def test_scales_of_caches_for_vllm_come_back(name: str, tmp_path: Path) -> None:
    """Under the names that all classes of vLLM keep, through our own import and through transformers."""
    from quark.torch import LLMTemplate, ModelQuantizer, import_model_from_safetensors
    from quark.torch.export.checkpoint import read_checkpoint
    from quark.torch.export.write_as import export_as
    from quark.torch.kv_cache import exported_scales

    made = tiny.tiny_model(name, dict(tiny.model_types())[name])
    config = LLMTemplate.for_model(made).get_config("fp8", kv_cache_scheme="fp8")
    quantized = ModelQuantizer(config).quantize_model(made, [tiny.inputs_of(made)])
    export_as(quantized, tmp_path / "m", "quark", tmp_path, program="vllm")
    files, wanted = read_checkpoint(tmp_path / "m").names, exported_scales(quantized)
    assert wanted and sum(key.endswith((".k_scale", ".v_scale")) for key in files) == len(wanted)
    assert not any(key.endswith("_proj.output_scale") for key in files)
    for loaded in (import_model_from_safetensors(None, tmp_path / "m"), cell.load(quantized, tmp_path / "m")[0]):
        assert {key: float(value) for key, value in exported_scales(loaded).items()} == {
            key: float(value) for key, value in wanted.items()
        }


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("luke", "fp8"),  # a head that is tied to an embedding
        ("neomme", "fp8"),  # a quantized layer that is tied to a float one
        pytest.param("swin2sr", "int8_wo_per_channel", marks=pytest.mark.slow),  # asks a parameter for its type
        ("switch_transformers", "fp8"),  # casts a layer when it runs
        ("openai_privacy_filter", "fp8"),  # no head
    ],
)
def test_kinds_of_models_that_have_been_wrong(name: str, scheme: str) -> None:
    made = tiny.tiny_model(name, dict(tiny.model_types())[name])
    found = cell.check(made, scheme, "quark", tiny.inputs_of(made), tiny.answer)
    assert found["cell"] == "right", found


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("gte", "int4_wo_32"),
        ("nomic_bert", "int4_wo_32"),
        ("molmo2_text", "fp8"),  # one tensor into several, whose scales are converted beside them
        ("minimax_m3_vl", "int4_wo_32"),  # several into one, likewise
        ("llama4_text", "fp8"),  # experts that transformers has as a list where they are quantized
    ],
)
def test_conversions_that_survive_are_no_reason_to_refuse(name: str, scheme: str) -> None:
    """Heads and layers that transformers cuts out of one tensor are read where the file has them apart."""
    made = tiny.tiny_model(name, dict(tiny.model_types())[name])
    found = cell.check(made, scheme, "compressed-tensors", tiny.inputs_of(made), tiny.answer)
    assert found["cell"] == "right", found


@pytest.mark.parametrize("name", ["t5gemma2", "nomic_bert"])
def test_tied_tensors_that_are_made_with_zeros_are_imported(name: str) -> None:
    """A bias of a head, an embedding of one token: they are in the file once."""
    made = tiny.tiny_model(name, dict(tiny.model_types())[name])
    inputs = tiny.inputs_of(made)
    cell.quantize(made, "int4_wo_32", inputs)
    refused = {"cell": "refused", "stage": "export", "why": ""}
    found = cell.imported(made, inputs, tiny.answer, tiny.answer(made, inputs) * 0, refused)
    assert found["cell"] == "import", found


def test_codes_come_last() -> None:
    """Models ask the first parameter of a module for its type."""
    from quark.torch.config.model import QConfig
    from quark.torch.config.schemes import scheme
    from quark.torch.export.api import _map_to_quark

    layer = torch.nn.Sequential(torch.nn.Linear(8, 8))
    _map_to_quark(layer, QConfig(scheme("int8_wo_per_channel")))
    assert [value.dtype for value in layer.parameters()] == [torch.float32, torch.int8]


def test_codes_survive_a_cast(tmp_path: Path) -> None:
    """FP8 codes are numbers to torch: a cast of the model changed them in place."""
    model = tiny.tiny_model("llama", "LlamaForCausalLM")
    cell.quantize(model, "fp8", tiny.inputs_of(model))
    cell.EXPORTS["quark"](model, tmp_path / "m")
    loaded, _ = cell.load(model, tmp_path / "m")
    before = cell.weight_of(loaded, "model.layers.0.mlp.up_proj")
    loaded.get_submodule("model.layers.0.mlp").bfloat16().float()
    assert torch.equal(cell.weight_of(loaded, "model.layers.0.mlp.up_proj"), before)


@pytest.mark.parametrize("reader", ["load_model", "read_skeleton"])
def test_a_transposed_weight_and_a_missing_architecture_are_refused(reader: str, tmp_path: Path) -> None:
    from quark.errors import ModelError
    from quark.torch.export.checkpoint import read_checkpoint
    from quark.torch.files.skeleton import read_skeleton
    from quark.torch.language import load_model

    tiny.tiny_model("llama", "LlamaForCausalLM").save_pretrained(tmp_path)
    read = {"load_model": load_model, "read_skeleton": lambda folder: read_skeleton(read_checkpoint(folder))}[reader]
    config = json.loads((tmp_path / "config.json").read_text())
    if reader == "read_skeleton":
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": None}))
        with pytest.raises(ModelError, match="LlamaForCausalLM"):
            read(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T.contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        read(tmp_path)
