"""The table of formats, the checks made of it, and the command line's ``--format`` and ``--for``."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from tests.torch_flow.export.networks import llama

from quark.cli import main
from quark.config.file_formats import (
    ANY,
    CACHE,
    EXPORT,
    FORMATS,
    PROGRAMS,
    check_caches,
    check_formats,
    row_of,
    table,
    works,
)
from quark.errors import ConfigError, QuarkError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.config.schemes import GGUF, KV_SCHEMES, NAMES, ROWS
from quark.torch.export.before_work import check_before_work
from quark.torch.export.write_as import config_for, export_as

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore")
IDS = torch.arange(24).reshape(2, 12)
SAFETENSORS = [name for name in FORMATS if name not in ("gguf", "onnx")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float model."""
    path = tmp_path_factory.mktemp("model")
    llama(torch.bfloat16, hidden_size=128, intermediate_size=256).save_pretrained(path)
    return path


def test_the_table_knows_every_name_once() -> None:
    keys = [(row.scheme, row.format, row.program) for row in table()]
    assert len(set(keys)) == len(keys)
    assert {row.scheme for row in table() if not row.scheme.startswith(CACHE)} == {*NAMES, ANY}
    assert {row.scheme.removeprefix(CACHE) for row in table() if row.scheme.startswith(CACHE)} <= set(KV_SCHEMES)
    assert {row.format for row in table()} == set(FORMATS)
    assert {row.program for row in table()} == {EXPORT, *PROGRAMS}
    assert all(row.shown_by.strip() for row in table())
    assert all(row_of(scheme, format, EXPORT) is not None for format in FORMATS for scheme in NAMES)
    assert all(works(scheme, "quark", None) for scheme in ROWS)
    assert {format for format in FORMATS for scheme in GGUF if works(scheme, format, None)} == {"gguf"}


@pytest.mark.parametrize("format", SAFETENSORS)
@pytest.mark.parametrize("scheme", ["int4_wo_32", "uint4_wo_64", "int8_wo_per_channel", "fp8", "mxfp8", "nvfp4", "mx6"])
def test_the_export_does_what_the_table_says(scheme: str, format: str, tmp_path: Path) -> None:
    model = llama(torch.bfloat16, hidden_size=128, intermediate_size=256)
    config = config_for(LLMTemplate.get("llama").get_config(scheme), format, None, torch.bfloat16)
    ModelQuantizer(config).quantize_model(model, [{"input_ids": IDS}])
    row = row_of(scheme, format, EXPORT)
    assert row is not None
    if row.works:
        export_as(model, tmp_path / "m", format, tmp_path, program="vllm")  # uint4 in compressed-tensors is for it
        assert (tmp_path / "m" / "config.json").exists()
    else:
        with pytest.raises(QuarkError):
            export_as(model, tmp_path / "m", format, tmp_path)


def test_sentences_name_what_has_it() -> None:
    with pytest.raises(
        ConfigError, match=r"vLLM has no int8_wo_per_channel layer in the quark format \(.*--format compressed-tensors"
    ):
        check_formats(["int8_wo_per_channel"], "quark", "vllm")
    with pytest.raises(ConfigError, match=r"the GGUF format has no fp8 layer .*--format"):
        check_formats(["int4_wo_32", "fp8"], "gguf", None)
    with pytest.raises(
        ConfigError, match=r"llama\.cpp does not read the quark format \(GGUF files only\); --format gguf has"
    ):
        check_formats(["int4_wo_32"], "quark", "llama.cpp")
    with pytest.raises(ConfigError, match=r"no format that quark writes has it for llama\.cpp"):
        check_formats(["mx6"], "gguf", "llama.cpp")
    with pytest.raises(ConfigError, match=r"vLLM has no int8 cache in the quark format \(.*--kv-cache fp8 is read"):
        check_caches("int8", "quark", "vllm")
    check_caches("fp8", "compressed-tensors", "vllm")
    check_caches("int8", "quark", "transformers")
    check_caches("fp8_per_head", "compressed-tensors", "vllm")
    with pytest.raises(ConfigError, match=r"--kv-cache fp8 is read, --format compressed-tensors has it"):
        check_caches("fp8_per_head", "quark", "vllm")
    check_formats(["int4_wo_32"], "compressed-tensors", "vllm")
    check_formats(["a scheme of my own"], "gptq", "vllm")
    check_formats(["a scheme of my own"], "quark", "llama.cpp")  # nobody has tried it


WRONG = [
    (["--scheme", "fp8", "--format", "ggfu"], "Did you mean 'gguf'"),
    (["--scheme", "fp8", "--for", "vlm"], "Did you mean 'vllm'"),
    (["--scheme", "Q4_K", "--for", "vllm"], "the quark format has no Q4_K layer"),
    (["--scheme", "Q4_K", "--format", "onnx"], "the ONNX format has no Q4_K layer"),
    (["--scheme", "Q4K"], "Did you mean 'Q4_K'"),
    (["--scheme", "fp8", "--for", "llama.cpp"], "the GGUF format has no fp8 layer"),
    (["--scheme", "int4_wo_32", "--layer", "*up_proj=mx6", "--format", "gptq"], "the GPTQ format has no mx6 layer"),
]


@pytest.mark.parametrize("command", ["quantize", "quantize-files"])
@pytest.mark.parametrize(("arguments", "sentence"), WRONG)
def test_mistakes_are_told_before_the_model_is_loaded(
    command: str, arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()  # no model in it
    code = main(["torch", command, str(tmp_path / "model"), "-o", str(tmp_path / "out"), *arguments])
    assert code != 0
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


METHODS = {"compressed-tensors": "compressed-tensors", "gptq": "gptq", "awq": "awq", "quark": "quark"}


@pytest.mark.parametrize("format", METHODS)
@pytest.mark.parametrize("command", ["quantize", "quantize-files"])
def test_both_commands_write_the_format(
    command: str, format: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--scheme", "int4_wo_32", "--format", format, "--for", "vllm", "--json"]
    assert main(["torch", command, str(folder), "-o", str(tmp_path / "out"), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == format
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == METHODS[format]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("command", ["quantize", "quantize-files"])
def test_blocks_of_a_bfloat16_model_are_read_by_transformers(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It decodes them to bfloat16: what has no values yet computes in the type of the folder, too."""
    arguments = ["--scheme", "mxfp4", "--format", "compressed-tensors", "--json"]
    assert main(["torch", command, str(folder), "-o", str(tmp_path / "out"), *arguments]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["readers"], facts["not_for"]) == (["vllm", "transformers"], {})


def test_the_two_commands_write_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    for command in ("quantize", "quantize-files"):
        arguments = ["--scheme", "int4_wo_32", "--format", "compressed-tensors", "--json"]
        assert main(["torch", command, str(folder), "-o", str(tmp_path / command), *arguments]) == 0
    files = [(tmp_path / command / "model.safetensors").read_bytes() for command in ("quantize", "quantize-files")]
    assert files[0] == files[1]


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["torch", "formats", "--scheme", "int4_wo_32", "--for", "vllm", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["formats"]
    assert {row["program"] for row in rows} == {"vllm"}
    assert main(["torch", "formats", "--scheme", "int4_wo_32"]) == 0
    assert "reads it" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "scheme", "words"), [
    ("MixtralForCausalLM", "fp8", "leaves the inputs of experts in float"),
    ("MixtralForCausalLM", "int4_wo_32", ""),
    ("GptOssForCausalLM", "int4_wo_32", "at random"),
])  # fmt: skip
def test_experts_that_transformers_misreads_are_refused_for_it(
    kind: str, scheme: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers stacks experts in float while it loads compressed-tensors; vLLM keeps them as they are."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    sizes |= {"num_hidden_layers": 1, "num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2}
    model_type = getattr(transformers, kind)
    model = model_type(model_type.config_class(**sizes))
    model.save_pretrained(tmp_path)
    config = LLMTemplate.for_model(model).get_config(scheme)
    vllm = [] if kind == "GptOssForCausalLM" else [("compressed-tensors", "vllm")]  # refused by a reason of its own
    for format, program in (*vllm, ("quark", "transformers"), ("quark", None)):
        check_before_work(model, config, format, program, tmp_path)
    for program in ("transformers", None):  # who says nothing may mean transformers
        if not words:
            check_before_work(model, config, "compressed-tensors", program, tmp_path)
            continue
        with pytest.raises(ConfigError, match=f"{words}.*--format quark"):
            check_before_work(model, config, "compressed-tensors", program, tmp_path)
    if not words:
        return
    if scheme == "fp8":  # whose command needs data, and a tokenizer first
        return
    flags = ["--scheme", scheme, "--format", "compressed-tensors", "--for", "transformers"]
    assert main(["torch", "quantize-files", str(tmp_path), "-o", str(tmp_path / "q"), *flags]) == 1
    assert words in capsys.readouterr().err and not (tmp_path / "q").exists()


GPTQMODEL = ("awq", "gptq", "gptq_v2")  # what transformers reads with it
#: (format, program) -> the type in which that reader holds the scales of a bfloat16 model; others keep float.
CAST_TO = {
    **dict.fromkeys(itertools.product(["compressed-tensors", *GPTQMODEL], [None, *PROGRAMS]), "bfloat16"),
    **dict.fromkeys(itertools.product(["gguf"], [None, *PROGRAMS]), "float16"),
    **dict.fromkeys(itertools.product(GPTQMODEL, ["transformers"]), "float16"),  # in any model
    ("quark", "vllm"): "bfloat16",
}


@pytest.mark.parametrize("program", [None, *PROGRAMS])
@pytest.mark.parametrize("format", sorted(FORMATS))
def test_scales_are_in_the_type_in_which_the_reader_computes(format: str, program: str | None) -> None:
    config = LLMTemplate.get("llama").get_config("int4_wo_32")
    weight = config_for(config, format, program, torch.bfloat16).global_quant_config.weight
    assert weight.scale_type.name == CAST_TO.get((format, program), "float")
    weight = config_for(config, format, program, torch.float32).global_quant_config.weight
    assert weight.scale_type.name == ("float16" if format in (*GPTQMODEL, "gguf") else "float")  # no reader has more
