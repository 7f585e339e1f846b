"""What lies beside the tensors: the card, the licence, the original card, shards and types."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.torch_flow.export.networks import llama

from quark.cli import main

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
    for words in ("`fp8`: weights fp8_e4m3", "ids.npy, ", "vllm serve out", "from_pretrained", "It says nothing."):
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


@pytest.mark.parametrize(
    ("given", "sentence"),
    [(["--dtype", "bfloat"], "Did you mean 'bfloat16'"), (["--max-shard-size", "5"], "as in 5GB")],
)
def test_mistakes_are_told(given: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m").mkdir()
    assert main(["torch", "quantize", str(tmp_path / "m"), "-o", str(tmp_path / "o"), "--scheme", "fp8", *given]) != 0
    assert sentence in " ".join(capsys.readouterr().err.split())
