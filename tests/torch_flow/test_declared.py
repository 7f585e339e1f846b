"""What a folder says of its model is in the folder that a command makes of it, or the command says what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.pairs import thinned
from tests.torch_flow.export.networks import llama
from tests.torch_flow.export.test_reload import quantized

from quark.cli import main
from quark.errors import ModelError
from quark.torch import LLMTemplate
from quark.torch.export.checkpoint import read_checkpoint
from quark.torch.export.write_as import export_as
from quark.torch.files.folder_caches import cache_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore")
KEPT = {  # in the result as they are
    **{name: name for name in ("vocab.txt", "merges.txt", "tokenizer.model", "source.spm", "bpe.codes", "a.tiktoken")},
    **dict.fromkeys(("tekken.json", "preprocessor_config.json", "processor_config.json"), "{}"),
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/rag.jinja": "{{ documents }}",
    "modeling_own.py": "class Own: ...",
    "custom_generate/generate.py": "def generate(): ...",
    "modules.json": json.dumps([{"idx": 0, "path": ""}, {"idx": 1, "path": "2_Dense"}]),
    "2_Dense/config.json": "{}",
    "2_Dense/pytorch_model.bin": "tensors that the list of modules asks for",
    "LICENSE": "its licence",
}
OTHERS = {"pytorch_model.bin": "its tensors once more", ".cache": "hidden", "figures/one.txt": "a folder nobody names"}
STALE = dict.fromkeys(("quantize_config.json", "quant_config.json", "recipe.yaml"), "how the source was quantized")
SETTINGS = {"temperature": 0.6, "do_sample": True, "eos_token_id": [2, 7], "own_setting": 5}
ENTRIES = {
    "own_entry": {"a": 1},
    "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"},
    "task_specific_params": {"summary": {"length": 7}},
}
CACHES = {"quark": "fp8", "compressed-tensors": "fp8_per_head", "fp8": "fp8"}
WRITE = ["--scheme", "int8_wo_per_channel"]
COMMANDS = {
    "quantize": ["torch", "quantize", *WRITE],
    "quantize in compressed-tensors": ["torch", "quantize", *WRITE, "--format", "compressed-tensors"],
    "quantize-files": ["torch", "quantize-files", *WRITE],
    "quantize-files in compressed-tensors": ["torch", "quantize-files", *WRITE, "--format", "compressed-tensors"],
    "convert": ["torch", "convert", "--format", "compressed-tensors"],
    "convert to quark": ["torch", "convert", "--format", "quark"],
    "convert anew": ["torch", "convert", "--format", "quark", "--requantize", "int8_wo_per_channel"],
    "auto": ["auto", "--for", "transformers", "--drop", "50%", "--minutes", "0.01"],
}


def declare(folder: Path) -> None:
    """Give a folder all that a folder may have beside its tensors."""
    for name, text in {**KEPT, **OTHERS, **STALE}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "README.md").write_text("---\nlicense: mit\n---\nthe card of the source")
    (folder / "generation_config.json").write_text(json.dumps(SETTINGS))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | ENTRIES))


def source(form: str, tie: bool, folder: Path, cache: str | None = None) -> None:
    """A folder of a model in bfloat16, float or quantized by FP8."""
    model: Any = llama(torch.bfloat16, tie)
    if form == "float":
        model.save_pretrained(folder)
    else:
        config = LLMTemplate.get("llama").get_config("fp8", kv_cache_scheme=cache)
        config.kv_cache_post_rope = (
            cache is not None
        )  # as other programs quantize keys; convert refuses another place for them
        model = quantized(model, config)
        export_as(model, folder, form, folder, program="vllm")
    declare(folder)


def made(command: str, folder: Path, goal: Path) -> int:
    """The exit code of a command on a folder."""
    np.save(goal.with_name("ids.npy"), np.random.default_rng(0).integers(0, 256, (8, 32)))
    data = ["--data", str(goal.with_name("ids.npy"))] if command == "auto" else []
    words = COMMANDS[command]
    count = 1 + (words[0] == "torch")
    return main([*words[:count], str(folder), "-o", str(goal), *words[count:], *data])


SLOW = (("float", False), ("quark", True))
CASES = [
    (command, form, tie)
    for command in COMMANDS
    for form, tie in (("float", True), ("float", False), *((form, True) for form in CACHES))
    if (form != "float" or not command.startswith("convert")) and (command != "auto" or (form, tie) in SLOW)
]


@pytest.mark.parametrize("case", thinned(CASES, 2), ids=str)
def test_what_a_folder_declares_is_kept(
    case: tuple[str, str, bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, form, tie = case
    source(form, tie, tmp_path / "source", CACHES.get(form))
    capsys.readouterr()
    assert made(command, tmp_path / "source", tmp_path / "out") == 0
    told, out = capsys.readouterr().out, tmp_path / "out"
    assert {name: (out / name).read_text() for name in KEPT if (out / name).exists()} == KEPT
    assert not [name for name in {**OTHERS, **STALE} if (out / name).exists()]
    settings = json.loads((out / "generation_config.json").read_text())
    assert {key: settings.get(key) for key in SETTINGS} == SETTINGS
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "source", out))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed <= {"quantization_config"}
    card = (out / "README.md").read_text()
    assert "license: mit" in card and "the card of the source" in card and "base_model: source\n" in card
    tensors = load_file(out / "model.safetensors")
    assert {value.dtype for name, value in tensors.items() if name.endswith("norm.weight")} == {torch.bfloat16}
    assert ("lm_head.weight" in tensors) == (not tie)
    if cache_of(tmp_path / "source") and not cache_of(out):
        assert f"quark torch quantize --kv-cache {CACHES[form]} --data TEXT" in told
    else:
        assert "--kv-cache" not in told
    assert (cache_of(out) is None) == (form == "float" or command not in ("convert", "convert to quark"))


def test_a_cache_that_is_float_is_not_said_to_be_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form in CACHES:
        source(form, True, tmp_path / form / "source")
        assert cache_of(tmp_path / form / "source") is None
    assert made("quantize", tmp_path / "quark" / "source", tmp_path / "out") == 0
    assert "--kv-cache" not in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_with_an_adapter_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source("quark" if command.startswith("convert") else "float", True, tmp_path / "source")
    (tmp_path / "source" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"lora_A.weight": torch.zeros(2, 8)}, tmp_path / "source" / "adapter_model.safetensors")  # no shard
    assert made(command, tmp_path / "source", tmp_path / "out") == 1
    assert "merge_and_unload" in capsys.readouterr().err and not (tmp_path / "out").exists()
    (tmp_path / "source" / "adapter_config.json").unlink()
    assert made(command, tmp_path / "source", tmp_path / "out") == 1
    assert "an adapter without 'adapter_config.json'" in capsys.readouterr().err


def test_a_tensor_in_two_files_is_named_with_both(tmp_path: Path) -> None:
    source("float", True, tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    files = {f"model-{k}-of-2.safetensors": half for k, half in ((1, tensors), (2, dict(list(tensors.items())[:1])))}
    (tmp_path / "source" / "model.safetensors").unlink()
    for file, half in files.items():
        save_file(half, tmp_path / "source" / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, half in files.items() for name in half}}
    (tmp_path / "source" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-1-of-2.* says is in 'model-2-of-2.safetensors': delete one"):
        read_checkpoint(tmp_path / "source")


@pytest.mark.parametrize("command", ["quantize", "quantize-files"])
def test_a_tensor_of_64_bits_has_the_type_of_the_model(command: str, tmp_path: Path) -> None:
    source("float", True, tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    tensors |= {"model.norm.weight": tensors["model.norm.weight"].double()}
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    assert made(command, tmp_path / "source", tmp_path / "out") == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["model.norm.weight"].dtype == found["model.embed_tokens.weight"].dtype


@pytest.mark.parametrize("form", ["quark", "compressed-tensors"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_types_and_sizes_of_files_are_those_that_are_asked_for(dtype: str, form: str, tmp_path: Path) -> None:
    """By files, the tensors are those of the model in memory."""
    source("float", False, tmp_path / "source")
    words = [*WRITE, "--dtype", dtype, "--max-shard-size", "20KB", "--format", form]
    found: list[dict[str, torch.Tensor]] = []
    for command in ("quantize", "quantize-files"):
        out = tmp_path / command
        assert main(["torch", command, str(tmp_path / "source"), "-o", str(out), *words]) == 0
        files = {path.name: load_file(path) for path in out.glob("*.safetensors")}
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
        assert index["metadata"]["total_size"] == sum(one.nbytes for file in files.values() for one in file.values())
        assert len(files) > 2 and all(
            len(tensors) == 1 or sum(one.nbytes for one in tensors.values()) <= 20_000 for tensors in files.values()
        )
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype
        found.append({name: value for tensors in files.values() for name, value in tensors.items()})
    first, second = found
    assert first.keys() == second.keys()
    assert {name for name in first if not torch.equal(first[name], second[name])} == set()
    assert {one.dtype for name, one in first.items() if name.endswith("norm.weight")} == {getattr(torch, dtype)}


def test_what_was_decoded_and_stays_float_has_the_type_of_the_model(tmp_path: Path) -> None:
    source("compressed-tensors", False, tmp_path / "source")
    words = ["--scheme", "int8_wo_per_channel", "--exclude", "*down_proj"]
    assert main(["torch", "quantize-files", str(tmp_path / "source"), "-o", str(tmp_path / "out"), *words]) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {one.dtype for name, one in tensors.items() if name.endswith("down_proj.weight")} == {torch.bfloat16}
