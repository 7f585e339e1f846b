"""``--format gguf`` on the command line: what the file loses is told, and what cannot be written is refused first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.torch_flow.export.test_gguf import bpe, model_of  # noqa: F401

from quark.cli import main

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
SCHEME = ("--scheme", "int4_wo_32", "--format", "gguf")


@pytest.fixture
def folder(bpe: Path, tmp_path: Path) -> Path:  # noqa: F811
    """A float model with a tokenizer."""
    path = tmp_path / "model"
    model_of().save_pretrained(path)
    for file in bpe.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def told(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["torch", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_command_tells_the_loss_of_the_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = ("quantize", "quantize-files")
    first, second = (told(capsys, name, folder, "-o", tmp_path / name, *SCHEME) for name in commands)
    assert first["file_loss"] == second["file_loss"] == 0  # scales were float16 before they were evaluated
    files = [(tmp_path / name / "llama.gguf").read_bytes() for name in commands]
    assert files[0] == files[1]
    told(capsys, "quantize", folder, "-o", tmp_path / "quark", "--scheme", "int4_wo_32")
    moved = told(capsys, "convert", tmp_path / "quark", "-o", tmp_path / "convert", "--format", "gguf")
    assert first["file_loss"] < moved["file_loss"] < 1e-3  # scales are rounded to float16 beside them
    assert [facts["kept_as_f32"] for facts in (first, second, moved)] == [[], [], []]


def test_a_tokenizer_that_cannot_be_written_is_refused_before_the_perplexity(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quark.torch.language.perplexity", lambda *_: pytest.fail("it was measured"))
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    np.save(tmp_path / "ids.npy", np.arange(128).reshape(2, 64))
    words = ("quantize", folder, "-o", tmp_path / "out", *SCHEME, "--data", tmp_path / "ids.npy", "--seq-len", "32")
    assert main(["torch", *map(str, words)]) != 0
    assert "'Unigram'; only BPE can be written" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
