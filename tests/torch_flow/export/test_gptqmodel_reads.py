"""What transformers reads of AWQ and GPTQ files with gptqmodel 7.7, which is not here, and of FP8: each refusal was
seen there as logits that are 2 to 140 % apart, NaN, or an error while it loads; what is let through was right.
"""

from __future__ import annotations

import copy
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.consumers import tiny
from tests.torch_flow.export.networks import llama

from quark.cli import main
from quark.errors import ConfigError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.config.schemes import NAMES
from quark.torch.export.before_work import check_before_work
from quark.torch.export.gptqmodel_reads import told
from quark.torch.export.readers import readers
from quark.torch.export.write_as import config_for, export_as

transformers = pytest.importorskip("transformers")
WIDE = {"head_dim": 64}  # 128 outputs of keys
NARROW = {"hidden_size": 96, "num_key_value_heads": 1, "head_dim": 24}  # 24 outputs of keys


@pytest.mark.parametrize(
    ("kind", "scheme", "format", "why"),
    [
        ("mixtral", "int4_wo_32", "gptq", r"no place for the single experts of 'model.layers.0.mlp.experts'.*random"),
        ("mixtral", "int4_wo_32", "awq", r"no place for the single experts.*--exclude 'model.layers\.\*\.mlp.experts"),
        (
            "mixtral",
            "int4_wo_32",
            "gptq_v2",
            r"no place for the single experts of 'model.layers.0.mlp.experts'.*random",
        ),
        ("falcon", "int4_wo_32", "gptq", r"leaves '.*' float, a FalconLinear"),
        ("falcon", "int4_wo_32", "gptq_v2", r"leaves '.*' float, a FalconLinear"),
        ("falcon", "int4_wo_32", "awq", r"the gates of falcon"),
        ("gpt_neox", "int4_wo_32", "awq", r"the gates of gpt_neox.*--format quark has it"),
        ("gpt_neox", "int4_wo_32", "gptq", None),
        ("ctrl", "int4_wo_32", "gptq", r"leaves 'transformer.h.0.ffn.0' float, as all whose name is a number"),
        ("ctrl", "int4_wo_32", "awq", None),
        (
            "nllb-moe",
            "int4_wo_32",
            "awq",
            r"other code of the model asks for the weight of '.*fc2'.*--exclude '.*\*.*fc2'",
        ),
        ("pocket_tts", "int4_wo_32", "gptq", r"asks for the weight of 'audio_prompt_proj' \(gptqmodel"),
        ("nanochat", "int4_wo_32", "awq", r"NanoChatModel._init_weights"),
        (
            "siglip_vision_model",
            "int4_wo_32",
            "gptq",
            r"text models alone in GPTQ, and Siglip\w+ begins with 'pixel_values'",
        ),
        (
            "gpt_neox",
            "fp8_block",
            "fp8",
            r"the 192 outputs of 'gpt_neox.layers.0.attention.query_key_value' for blocks",
        ),
        ("dinov2", "fp8_block", "fp8", r"makes several tensors of one"),
        ("falcon", "fp8_block", "fp8", r"of nn.Linear itself, and '.*' is a FalconLinear"),
        ("t5", "fp8_block", "fp8", r"leaves '.*\.wo' float on a GPU.*_keep_in_fp32_modules.*--exclude"),
        ("t5", "int4_wo_32", "awq", r"leaves '.*\.wo' float, whatever a file says"),
        ("qwen3_moe", "fp8_block", "fp8", None),
        ("bart", "int4_wo_32", "gptq", None),  # optimum finds no encoder, where no file names it
        ("llama", "uint4_wo_per_channel", "gptq_v2", r"leaves the zero points of 4 bits per channel out"),
        ("llama", "uint4_wo_per_channel", "gptq", r"leaves the zero points of 4 bits per channel out"),
        ("llama", "int4_wo_per_channel", "gptq", None),
        ("llama", "uint4_wo_32", "awq", None),
        ("narrow", "int4_wo_32", "awq", r"no kernel for the 24 outputs of 'model.layers.0.self_attn.k_proj'"),
        ("head", "int4_wo_32", "awq", r"leaves 'lm_head' float, whatever a file says"),
        ("head", "int4_wo_32", "gptq", None),
    ],
)
def test_what_transformers_misreads_is_refused_for_it_alone(kind: str, scheme: str, format: str, why: str) -> None:
    own = kind in ("llama", "narrow", "head")
    model: Any = llama(**(NARROW if kind == "narrow" else {})) if own else None
    model = model or tiny.made(kind, dict(tiny.model_types())[kind], {})
    config = LLMTemplate.for_model(model).get_config(scheme)
    config = replace(config, exclude=[]) if kind == "head" else config
    with nullcontext() if why is None else pytest.raises(ConfigError, match=f"^transformers .*{why}"):
        check_before_work(model, config, format, "transformers", Path())
    check_before_work(model, config, format, None, Path())
    if kind in ("mixtral", "narrow"):  # and where somebody exports it all the same
        quantized = ModelQuantizer(config).quantize_model(copy.deepcopy(model))
        with pytest.raises(ConfigError, match=why):
            export_as(quantized, "/nowhere", format, "/nowhere", program="transformers")


@pytest.mark.parametrize(
    ("kind", "dtype", "scheme", "format", "refused"),
    [
        ("t5", torch.float16, "mxfp4", "quark", False),
        ("t5", torch.float16, "ptpc_fp8", "compressed-tensors", True),
        ("t5", torch.float16, "int8", "compressed-tensors", True),
        ("t5", torch.bfloat16, "fp8", "quark", False),
        ("t5", torch.float32, "fp8", "quark", False),
        ("mt5", torch.float16, "fp8_block", "fp8", True),
    ],
)
def test_codes_of_layers_that_transformers_holds_in_float32(
    kind: str, dtype: torch.dtype, scheme: str, format: str, refused: bool
) -> None:
    """transformers made float32 of the codes: T5 was 6 to 26 % off in float16, or its shapes did not fit."""
    model: Any = tiny.made(kind, dict(tiny.model_types())[kind], {}).to(dtype)
    config = config_for(LLMTemplate.for_model(model).get_config(scheme), format, "transformers", dtype)
    with pytest.raises(ConfigError, match=r"_keep_in_fp32_modules.*--exclude") if refused else nullcontext():
        check_before_work(model, config, format, "transformers", Path())
    check_before_work(model, config, "quark", None, Path())
    if refused and scheme != "int8":  # which needs samples
        with pytest.raises(ConfigError, match="_keep_in_fp32_modules"):
            export_as(
                ModelQuantizer(config).quantize_model(model), "/nowhere", format, "/nowhere", program="transformers"
            )


@pytest.mark.parametrize("format", ["awq", "gptq"])
def test_a_file_names_the_modules_that_transformers_quantizes(format: str, tmp_path: Path) -> None:
    """optimum takes all of the first blocks that it knows, and AWQ all but exceptions: names of modules in memory."""
    model = tiny.made("gemma3", dict(tiny.model_types())["gemma3"], {})  # whose files have other names
    config = replace(LLMTemplate.for_model(model).get_config("int4_wo_32"), exclude=["*vision*", "*k_proj", "lm_head"])
    config = config_for(config, format, "transformers", torch.float32)
    assert config.global_quant_config.weight.scale_type.name == "float16"
    quantized = ModelQuantizer(config).quantize_model(model)
    linear = {name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    for program in ("transformers", None):
        export_as(quantized, tmp_path / str(program), format, tmp_path, program=program)
    entries = [json.loads((tmp_path / f"{one}/config.json").read_text())["quantization_config"] for one in
               ("transformers", "None")]  # fmt: skip
    left = {name for name in linear if re.search("vision|k_proj$|^lm_head$", name)}
    if format == "gptq":
        assert entries[0].pop("modules_in_block_to_quantize") == [sorted(linear - left)]
        assert entries[0].pop("block_name_to_quantize") == ""
        assert entries[0] == entries[1]  # what vLLM reads has neither
    else:
        assert set(entries[0]["modules_to_not_convert"]) >= left
        assert not set(entries[0]["modules_to_not_convert"]) & (linear - left)


@pytest.mark.parametrize(
    ("kind", "scheme", "format", "wanted"),
    [
        ("gpt_oss", "int4_wo_32", "awq", {"vllm": "whose rows take turns", "transformers": "no place for the single"}),
        ("gpt_oss", "int4_wo_32", "quark", {"vllm": "whose rows take turns", "transformers": "$"}),
        ("gpt_oss", "fp8", "quark", {"vllm": "--for vllm writes gate and up", "transformers": "$"}),
        ("mixtral", "int4_wo_32", "gptq", {"vllm": "$", "transformers": "no place for the single experts"}),
        ("llama", "int4_wo_32", "gptq", {"vllm": "$", "transformers": "--for transformers names the modules"}),
        ("llama", "fp8_block", "fp8", {"vllm": "64 outputs, which 128 does not divide", "transformers": "$"}),
        ("wide", "fp8_block", "fp8", {"vllm": "$", "transformers": "$"}),
        ("llama", "int4_wo_32", "onnx", {"onnxruntime-genai": "$"}),
        ("llama", "a scheme of my own", "quark", {}),
    ],
)
def test_the_programs_that_read_a_model_are_told_where_none_is_named(
    kind: str, scheme: str, format: str, wanted: dict[str, str]
) -> None:
    own = {"llama": {}, "wide": WIDE}.get(kind)
    model: Any = tiny.made(kind, dict(tiny.model_types())[kind], {}) if own is None else llama(**own)
    config = LLMTemplate.for_model(model).get_config(scheme if scheme in NAMES else "int4_wo_32")
    found = readers(model, config, [[scheme]], None, format, Path())
    assert list(found) == list(wanted)
    for program, why in wanted.items():
        assert re.search(why, found[program]) if why != "$" else not found[program], found


@pytest.mark.parametrize(
    ("schemes", "cache", "changed", "read", "unread"),
    [
        (["int4_wo_32 int8_wo_per_channel"], None, {}, "vllm transformers", ""),  # one of the names is enough
        (["int4_wo_32", "int8_wo_per_channel"], None, {}, "transformers", ""),  # all kinds of layers have to be
        (["int4_wo_32"], "fp8", {}, "vllm transformers", ""),
        (["int4_wo_32"], "fp8_per_head", {}, "transformers", "vllm"),
        (["int4_wo_32", "own"], None, {}, "", ""),
        ([], None, {}, "", ""),
        (["int4_wo_32"], None, {"auto_map": {"AutoModel": "own.Model"}}, "", ""),
    ],
)
def test_a_program_reads_a_file_whose_layers_and_caches_it_has(
    schemes: list[str], cache: str | None, changed: dict[str, Any], read: str, unread: str
) -> None:
    model = llama(**changed)
    config = LLMTemplate.for_model(model).get_config("int4_wo_32")
    found = readers(model, config, [names.split() for names in schemes], cache, "quark", Path())
    assert [name for name, why in found.items() if not why] == read.split()
    assert [name for name, why in found.items() if why] == unread.split()
    assert not readers(torch.nn.Sequential(), config, [["int4_wo_32"]], None, "quark", Path())


@pytest.mark.parametrize(
    ("kind", "scheme", "format"),
    [("mixtral", "int4_wo_32", "awq"), ("wide", "fp8_block", "fp8"), ("llama", "int8", "compressed-tensors")],
)
def test_codes_that_are_moved_have_the_readers_of_their_scheme(
    kind: str, scheme: str, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"llama": {}, "wide": WIDE}.get(kind)
    model: Any = tiny.made(kind, dict(tiny.model_types())[kind], {}) if own is None else llama(**own)
    model.save_pretrained(tmp_path / "float")
    np.save(tmp_path / "ids.npy", np.arange(16)[None])
    given, found = ["--scheme", scheme, "--data", str(tmp_path / "ids.npy"), "--seq-len", "16"], []
    for command, source, target, words in (
        ("quantize", "float", "codes", [*given, "--for", "vllm", "--format", "quark"]),
        ("quantize", "float", "made", [*given, "--format", format]),
        ("convert", "codes", "moved", ["--format", format]),
    ):
        told = ["torch", command, str(tmp_path / source), "-o", str(tmp_path / target), *words, "--json"]
        assert main(told) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[2]["readers"] == found[1]["readers"] and found[2]["not_for"] == found[1]["not_for"]
    assert found[2]["readers"] and scheme in found[2]["schemes"]
    assert found[0]["readers"] == ["vllm"] and not found[0]["not_for"]  # those it is for
    assert found[2]["verdict"]["readers"] == found[1]["verdict"]["readers"]
    card = (tmp_path / "moved" / "README.md").read_text().partition("\n---\n\nThe card")[0]
    assert "vllm serve moved" in card and ("Not for transformers" in card) == ("transformers" in found[2]["not_for"])


def test_float_experts_are_named_in_fp8_files() -> None:
    """On a GPU transformers makes FP8 of every module that is called so, and scales that no file has."""
    model = tiny.made("qwen3_moe", dict(tiny.model_types())["qwen3_moe"], {})
    said = {"quant_method": "fp8", "ignored_layers": ["lm_head"]}
    found = told(said, model, ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.0.up_proj"])
    assert found == {**said, "ignored_layers": ["lm_head", "model.layers.0.mlp.experts"]}
