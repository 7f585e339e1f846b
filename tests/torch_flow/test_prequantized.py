"""Folders that somebody has quantized, decoded: the values are those that the codes stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.torch_flow.export.networks import llama, logits
from tests.torch_flow.export.test_reload import quantized

from quark.cli import main
from quark.errors import ConfigError
from quark.torch import LLMTemplate
from quark.torch.export.api import import_model_from_safetensors
from quark.torch.export.write_as import config_for, export_as
from quark.torch.files.prequantized import as_float, dequantize_checkpoint

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"hidden_size": 128, "intermediate_size": 256}
FORMATS = {
    "quark": ("int4_wo_32", "fp8", "mxfp4_weight_only", "nvfp4"),
    "awq": ("uint4_wo_32", "int4_wo_64"),
    "gptq": ("int4_wo_32", "int8_wo_per_channel"),
    "fp8": ("fp8", "fp8_block"),
    "compressed-tensors": ("int4_wo_32", "uint4_wo_64", "fp8_block", "ptpc_int8", "mxfp4_weight_only"),
}
CASES = [(format, scheme) for format, schemes in FORMATS.items() for scheme in schemes]


def source(scheme: str, format: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A quantized model, also written to a folder."""
    model = quantized(llama(dtype, **SIZES), LLMTemplate.get("llama").get_config(scheme))
    export_as(model, folder, format, folder, program="vllm")  # what transformers cannot load, too
    return model


@pytest.mark.parametrize(("format", "scheme"), CASES)
def test_values_are_those_of_the_quantized_model(format: str, scheme: str, tmp_path: Path) -> None:
    model = source(scheme, format, tmp_path / "q")
    dequantize_checkpoint(tmp_path / "q", tmp_path / "f")
    tensors = load_file(tmp_path / "f" / "model.safetensors")
    assert "quantization_config" not in json.loads((tmp_path / "f" / "config.json").read_text())
    assert set(tensors) == set(llama(**SIZES).state_dict())
    for name, value in tensors.items():
        module = model.get_submodule(name.rpartition(".")[0])
        quantizer = getattr(module, "weight_quantizer", None)
        with torch.no_grad():
            expected = quantizer(module.weight) if quantizer is not None else module.weight
        assert torch.equal(value, expected), name


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32, num_local_experts=2, num_experts_per_tok=1, vocab_size=64,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "q")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    generator, levels = torch.Generator().manual_seed(0), [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        codes = torch.randint(0, 16, (experts, rows, columns), generator=generator)
        scales = torch.randint(120, 130, (experts, rows, columns // 32), generator=generator)
        values = torch.tensor([*levels, *(-level for level in levels)])[codes]
        expected[name] = (values * (2.0 ** (scales - 127)).repeat_interleave(32, -1)).transpose(1, 2)
        packed = codes[..., 0::2] | codes[..., 1::2] << 4
        tensors[f"{name}_blocks"] = packed.to(torch.uint8).reshape(experts, rows, columns // 32, 16)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(tensors, tmp_path / "q" / "model.safetensors")
    described = json.loads((tmp_path / "q" / "config.json").read_text())
    (tmp_path / "q" / "config.json").write_text(
        json.dumps({**described, "quantization_config": {"quant_method": "mxfp4"}})
    )
    dequantize_checkpoint(tmp_path / "q", tmp_path / "f")
    found = load_file(tmp_path / "f" / "model.safetensors")
    assert len(expected) == 2
    for name, value in expected.items():
        assert torch.equal(found[name], value)


def test_a_float_folder_stays_where_it_is(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "m")
    with as_float(tmp_path / "m", tmp_path / "work") as folder:
        assert folder == tmp_path / "m"
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "gptg"}}))
    with pytest.raises(ConfigError, match="Did you mean 'gptq'"), as_float(tmp_path / "m", tmp_path / "work"):
        pass
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("format", "scheme"), [*((name, row[-1]) for name, row in FORMATS.items()), ("modelopt", "fp8")]
)
def test_both_commands_write_the_same_tensors(
    format: str, scheme: str, dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the type that the model computes in, also where the configuration does not name it."""
    model = source(scheme, format, tmp_path / "q", dtype)
    if dtype is torch.float16 and format != "quark":
        path = tmp_path / "q" / "config.json"
        path.write_text(json.dumps({key: v for key, v in json.loads(path.read_text()).items() if key != "dtype"}))
    np.save(tmp_path / "ids.npy", np.arange(32).reshape(2, 16))
    given = ["-s", "int8_wo_per_channel", "--layer", "*down_proj=fp8", "--data", str(tmp_path / "ids.npy")]
    made, told = [], []
    for command in ("quantize", "quantize-files"):
        assert main(["torch", command, str(tmp_path / "q"), "-o", str(tmp_path / command), *given, "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
        made.append(load_file(tmp_path / command / "model.safetensors"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "q", "quantize", "quantize-files"]
    assert [one["decoded_from"] for one in told] == [format, format]
    assert made[0].keys() == made[1].keys()
    for name, value in made[0].items():
        assert value.dtype is made[1][name].dtype and torch.equal(value, made[1][name]), name
    again = import_model_from_safetensors(None, tmp_path / "quantize-files")
    error = (logits(again).float() - logits(model).float()).norm() / logits(model).float().norm()
    assert 0.001 < error < 0.5  # inputs of the source may be quantized


def test_convert_carries_codes_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = source("int4_wo_32", "quark", tmp_path / "a")
    assert main(["torch", "convert", str(tmp_path / "a"), "-o", str(tmp_path / "b"), "--format", "gptq"]) == 0
    export_as(model, tmp_path / "c", "gptq", tmp_path)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("b", "c")]
    assert files[0] == files[1]
    capsys.readouterr()
    assert main(["torch", "convert", str(tmp_path / "b"), "-o", str(tmp_path / "d"), "--format", "quark"]) == 0
    assert "gptq codes, unchanged" in capsys.readouterr().out
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "d")), logits(model))
    llama(**SIZES).save_pretrained(tmp_path / "f")
    assert main(["torch", "convert", str(tmp_path / "f"), "-o", str(tmp_path / "x"), "--format", "quark"]) == 1
    assert "--requantize SCHEME" in capsys.readouterr().err and not (tmp_path / "x").exists()
    given = ["--format", "quark", "--requantize", "int8_wo_per_channel", "--json"]
    assert main(["torch", "convert", str(tmp_path / "b"), "-o", str(tmp_path / "e"), *given]) == 0
    error = logits(import_model_from_safetensors(None, tmp_path / "e")) - logits(model)
    assert error.norm() < 0.05 * logits(model).norm()


@pytest.mark.parametrize("scheme", ["fp8", "ptpc_fp8"])
def test_inputs_in_half_types_are_not_converted_into_formats_whose_programs_have_float32(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers rounds them in the model's type in compressed-tensors: 3 to 13 % of the logits of this model."""
    config = config_for(LLMTemplate.get("llama").get_config(scheme), "compressed-tensors", None, torch.bfloat16)
    export_as(quantized(llama(torch.bfloat16, **SIZES), config), tmp_path / "q", "compressed-tensors", tmp_path)
    for format in ("fp8", "modelopt") if scheme == "fp8" else ("modelopt",):
        assert main(["torch", "convert", str(tmp_path / "q"), "-o", str(tmp_path / "x"), "--format", format]) == 1
        assert "inputs are rounded in bfloat16" in capsys.readouterr().err
    if scheme == "ptpc_fp8":
        given = ["--format", "modelopt", "--requantize", scheme, "--json"]
        assert main(["torch", "convert", str(tmp_path / "q"), "-o", str(tmp_path / "y"), *given]) == 0
        assert json.loads(capsys.readouterr().out)["quantized_again"] == 0


@pytest.mark.parametrize("format", FORMATS)
def test_what_reads_float_folders_says_of_a_quantized_one_what_takes_it(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source(FORMATS[format][0], format, tmp_path / "q")
    np.save(tmp_path / "ids.npy", np.ones((2, 16), np.int64))
    data, folder = ["--data", str(tmp_path / "ids.npy"), "--seq-len", "8"], str(tmp_path / "q")
    for words in (
        ["plan", folder, "-s", "ptpc_int8"],
        ["explain", folder, "lm_head", "-s", "ptpc_int8"],
        ["sensitivity", folder, "-s", "ptpc_int8", *data],
        ["search", folder, "-s", "ptpc_int8", "-o", str(tmp_path / "p.yaml"), "--target", "perplexity<=9", *data],
    ):
        assert main(["torch", *words]) == 1
        told = capsys.readouterr().err
        assert f"{folder!r} is quantized already ({format})" in told and "quantize-files" in told, words
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptk"
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    assert main(["torch", "plan", folder, "-s", "ptpc_int8"]) == 1
    assert "unknown quant_method 'gptk'. Did you mean 'gptq'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("text", "is 'text', and must be an object"),
        ({"quant_method": 5}, "unknown quant_method"),
        ({"bits": 4}, "None"),
        ({}, "unknown quant_method"),
        *(
            ({"bits": 4, "group_size": 32, "quant_algo": "FP8", "quant_method": one}, "every tensor beside it is float")
            for one in ("fp8", "awq", "gptq", "mxfp4", "modelopt", "bitsandbytes")
        ),
    ],
)
def test_every_command_refuses_what_names_no_method(
    entry: Any, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(**SIZES).save_pretrained(tmp_path / "f")
    config = json.loads((tmp_path / "f" / "config.json").read_text())
    (tmp_path / "f" / "config.json").write_text(json.dumps({**config, "quantization_config": entry}))
    folder, output = str(tmp_path / "f"), ["-o", str(tmp_path / "out")]
    for words in (
        ["plan", folder, "-s", "ptpc_int8"],
        ["explain", folder, "lm_head", "-s", "ptpc_int8"],
        ["quantize", folder, "-s", "ptpc_int8", *output],
        ["quantize-files", folder, "-s", "ptpc_int8", *output],
        ["convert", folder, "--format", "quark", *output],
    ):
        assert main(["torch", *words]) == 1
        assert sentence in capsys.readouterr().err, words
    assert not (tmp_path / "out").exists()
