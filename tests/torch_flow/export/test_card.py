"""What lies beside the tensors: the card, the licence, the original card, shards and types."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.torch_flow.export.networks import llama

from quark.cli import main
from quark.config.file_formats import FORMATS, check_formats, row_of
from quark.errors import ConfigError
from quark.torch.export.card import Card, facts, loader_of, text_of, uses, without_own, write_card
from quark.torch.export.model_files import COPIED, copy_files

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
ORIGINAL = """---
license: apache-2.0
base_model:
  - somebody/before
tags:
  - tiny
---

# A small llama

It says nothing.
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    llama(torch.bfloat16, hidden_size=128, intermediate_size=256).save_pretrained(path)
    (path / "README.md").write_text(ORIGINAL)
    (path / "LICENSE.txt").write_text("Do as you like.")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    np.save(tmp_path / "ids.npy", np.arange(4 * 64).reshape(4, 64) % 256)
    return path


@pytest.mark.parametrize("command", ["quantize", "quantize-files"])
@pytest.mark.parametrize("format", ["quark", "compressed-tensors"])
def test_the_card_says_what_was_done(command: str, format: str, folder: Path, tmp_path: Path) -> None:
    given = ["--scheme", "fp8", "--format", format, "--data", str(tmp_path / "ids.npy"), "--seq-len", "32"]
    assert main(["torch", command, str(folder), "-o", str(tmp_path / "out"), *given]) == 0
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    head, rest = card.removeprefix("---\n").split("---\n", 1)
    assert head.splitlines() == [
        "license: apache-2.0", "tags:", "  - tiny", "base_model: tiny", "base_model_relation: quantized"
    ]  # fmt: skip
    for words in (
        "`fp8`: weights fp8_e4m3",
        "ids.npy, ",
        "vllm serve out",
        "5.13 or newer",
        "from_pretrained",
        "It says nothing.",
    ):
        assert words in rest
    assert ("perplexity" in rest) is (command == "quantize")
    assert (tmp_path / "out" / "LICENSE.txt").read_text() == "Do as you like."
    assert (tmp_path / "out" / "chat_template.jinja").exists()


def test_shards_and_types(folder: Path, tmp_path: Path) -> None:
    given = ["--scheme", "int4_wo_32", "--dtype", "float16", "--max-shard-size", "60KB"]
    assert main(["torch", "quantize", str(folder), "-o", str(tmp_path / "out"), *given]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0].endswith(f"-of-{len(files):05d}.safetensors")
    head = load_file(tmp_path / "out" / index["weight_map"]["lm_head.weight"])["lm_head.weight"]
    assert head.dtype is torch.float16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.parametrize("format", ["quark", "compressed-tensors"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_measured_in_another_type_is_what_the_folder_answers(
    dtype: str, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that is cast after it was loaded has other rotary frequencies than one that is loaded in the type."""
    llama(torch.float32, hidden_size=128, intermediate_size=256).save_pretrained(tmp_path / "tiny")
    np.save(tmp_path / "ids.npy", np.arange(4 * 64).reshape(4, 64) % 256)
    data = ["--data", str(tmp_path / "ids.npy"), "--seq-len", "64", "--json"]
    given = ["--scheme", "int8_wo_per_channel", "--format", format, "--dtype", dtype, *data]
    assert main(["torch", "quantize", str(tmp_path / "tiny"), "-o", str(tmp_path / "out"), *given]) == 0
    measured = json.loads(capsys.readouterr().out)["perplexity_after"]
    assert main(["torch", "evaluate", str(tmp_path / "out"), *data]) == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] == measured


@pytest.mark.parametrize(
    ("given", "sentence"),
    [(["--dtype", "bfloat"], "Did you mean 'bfloat16'"), (["--max-shard-size", "5"], "as in 5GB")],
)
def test_mistakes_are_told(given: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m").mkdir()
    assert main(["torch", "quantize", str(tmp_path / "m"), "-o", str(tmp_path / "o"), "--scheme", "fp8", *given]) != 0
    assert sentence in " ".join(capsys.readouterr().err.split())


def made(format: str = "quark", scheme: str = "int8", **given: Any) -> Card:
    facts: dict[str, Any] = {"floats": (), "calibration": None, "windows": 0, "perplexity": None, **given}
    return Card(base="tiny", scheme=scheme, words="weights int8", format=format, bytes=(4_000, 1_000), **facts)


def rows(card: Card) -> dict[str, str]:
    return dict(line.strip("| ").split(" | ") for line in facts(card).splitlines()[2:])


@pytest.mark.parametrize("bytes", [COPIED, COPIED + 1, 2**40])
def test_files_that_would_fill_the_disk_are_not_copied(
    bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sparse ones: a card of a terabyte was read for minutes, and a template copied to the last byte of the disk."""
    source, target = tmp_path / "source", tmp_path / "made"
    names = ("README.md", "LICENSE", "chat_template.jinja")
    for folder in (source, target):
        folder.mkdir()
    for name in names:
        with (source / name).open("wb") as file:
            file.truncate(bytes)
    went = list[str]()
    monkeypatch.setattr(shutil, "copyfile", lambda path, goal: went.append(path.name))
    monkeypatch.setattr(Path, "read_text", lambda path, *given: went.append(path.name) or "")
    copy_files(source, target)
    write_card(target, source, made())
    assert sorted(went) == (sorted([*names, "LICENSE"]) if bytes == COPIED else [])
    assert caplog.text.count("is not copied") == (0 if bytes == COPIED else 4)


def test_facts_that_there_are_none_of_have_no_row() -> None:
    assert set(rows(made())) == {"base model", "scheme", "format", "size", "made with"}
    assert rows(made())["size"] == "4.0 kB → 1.0 kB" and rows(made())["scheme"] == "`int8`: weights int8"
    found = rows(made(calibration="ids.npy", windows=3, perplexity=(7.0, 7.25)))
    assert found["calibration"] == "ids.npy, 3 windows"
    assert found["perplexity"] == "7.0000 → 7.2500 (of the calibration data)"


@pytest.mark.parametrize("count", [1, 12, 13, 40])
def test_twelve_layers_are_named(count: int) -> None:
    names = [f"layer.{k}" for k in range(count)]
    told = ", ".join(f"`{name}`" for name in names[:12]) + (", …" if count > 12 else "")
    assert rows(made(floats=tuple(names)))["stay float"] == told


@pytest.mark.parametrize(
    "name", ["tiny", "a/b-1.5_x", "a\nlicense: evil", "x: y", "- x", "a|b<b>`\x1b[2J", 'q"\\', "#no"]
)
def test_a_name_is_one_value_of_the_head_and_one_line_of_the_card(name: str, tmp_path: Path) -> None:
    text = text_of(replace(made(), base=name), "---\nlicense: mit\n---\nwords", tmp_path)
    _, head, rest = text.split("---\n", 2)
    assert yaml.safe_load(head) == {"license": "mit", "base_model": name, "base_model_relation": "quantized"}
    assert [line for line in rest.splitlines() if line.startswith("| base model |") and line.endswith(" |")]
    assert "\x1b" not in rest and "<b>" not in rest and "\nlicense" not in rest


def test_keys_of_ours_go_with_what_belongs_to_them() -> None:
    head = "license: mit\nbase_model:\n  - a/b\n- c\ntags:\n  - x\nlibrary_name: peft\nbase_model_relation: of\nz: 1\n"
    assert without_own(head) == "license: mit\ntags:\n  - x\nz: 1\n"


def test_each_program_is_told_what_it_opens(tmp_path: Path) -> None:
    for name in ("m-00002-of-00002.gguf", "m-00001-of-00002.gguf", "a.txt"):
        (tmp_path / name).touch()
    told = uses(made("gguf", "Q4_K"), tmp_path)
    assert f"llama-server -m {tmp_path.name}/m-00001-of-00002.gguf\n" in told and "openquark" not in told
    own = uses(made("quark", "fp8"), tmp_path)
    assert f'import_model_from_safetensors(None, "{tmp_path.name}")' in own


@pytest.mark.parametrize("format", [name for name in FORMATS if name not in ("gguf", "onnx")])
@pytest.mark.parametrize("scheme", ["fp8", "ptpc_fp8", "mxfp8", "nvfp4", "uint4_wo_32", "int4_wo_32"])
def test_a_program_that_opens_a_folder_and_misreads_it_is_named(format: str, scheme: str, tmp_path: Path) -> None:
    """ModelOpt's codes are weights to transformers: the card tells, and a command that names it is refused."""
    if not row_of(scheme, format, "export").works:  # type: ignore[union-attr]
        return
    told, row = uses(made(format, scheme), tmp_path), row_of(scheme, format, "transformers")
    if row is None or row.works:
        assert "Not for transformers" not in told
        return
    assert f"Not for transformers: {row.shown_by}" in told and "from_pretrained" not in told
    with pytest.raises(ConfigError, match=re.escape(row.shown_by)):
        check_formats([scheme], format, "transformers")


@pytest.mark.parametrize(
    ("config", "loader"),
    [
        (None, "AutoModelForCausalLM"),
        ({}, "AutoModelForCausalLM"),
        ({"architectures": []}, "AutoModelForCausalLM"),
        ({"architectures": "BertModel"}, "AutoModelForCausalLM"),
        ({"architectures": [5]}, "AutoModelForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"]}, "AutoModelForCausalLM"),
        ({"architectures": ["BertModel", "Other"]}, "BertModel"),
        ({"architectures": ["BertModel"], "auto_map": {}}, "AutoModelForCausalLM"),
        ({"architectures": ["no name"]}, "AutoModelForCausalLM"),
    ],
)
def test_what_loads_a_model(config: dict[str, Any] | None, loader: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert loader_of(tmp_path) == loader
