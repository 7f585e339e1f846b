"""The folder of an interrupted job is no target of another one: refused by name, left as it is, and it goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quark.cli import main
from quark.torch.files import quantize

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


class Stopped(BaseException):
    """What ends a job in the middle."""


def contents(folder: Path) -> dict[str, bytes]:
    """All files, hidden ones too, but locks."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith(".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two float checkpoints of several files, and a quantized one."""
    made = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=48, **SIZES))
        model.save_pretrained(made / name, max_shard_size="16KB")
    words = ["torch", "quantize-files", str(made / "one"), "-o", str(made / "quantized"), "-s", "int4_wo_32"]
    assert main(words) == 0
    return made


BEGUN = {"quark": "out", "compressed-tensors": ".out.quark"}
FILES = ["torch", "quantize-files", "one", "-s", "int4_wo_32"]
OTHERS = {
    "another scheme": ["torch", "quantize-files", "one", "-s", "int8_wo_per_channel"],
    "another model": ["torch", "quantize-files", "two", "-s", "int4_wo_32"],
    "in memory": ["torch", "quantize", "one", "-s", "int4_wo_32"],
    "in memory, GGUF": ["torch", "quantize", "one", "--gguf-type", "Q8_0"],
    "convert": ["torch", "convert", "quantized", "--format", "compressed-tensors"],
    "convert anew": ["torch", "convert", "quantized", "--requantize", "int8_wo_per_channel"],
    "automatic": ["auto", "one", "--for", "transformers", "--data", "ids.npy"],
}


@pytest.mark.parametrize("format", BEGUN)
def test_another_job_does_not_take_it(
    format: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(models)
    (models / "one" / "tokenizer.json").write_text("{}")  # a GGUF file needs one
    np.save(models / "ids.npy", np.arange(128).reshape(16, 8) % 8 + 1)
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    first, out = [*FILES, "--format", format, "-o"], tmp_path / "killed" / "out"
    assert main([*first, str(tmp_path / "whole" / "out")]) == 0
    write, count = quantize.write_file, [0]

    def ends(path: Path, items: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            raise Stopped
        write(path, items)

    with monkeypatch.context() as patch:
        patch.setattr(quantize, "write_file", ends)
        with pytest.raises(Stopped):
            main([*first, str(out)])
    assert (tmp_path / "killed" / BEGUN[format] / "quark_progress.json").is_file()
    before = contents(tmp_path / "killed")
    other = next(name for name in BEGUN if name != format)
    for name, words in {**OTHERS, "another format": [*FILES, "--format", other]}.items():
        capsys.readouterr()
        assert main([*words, "-o", str(out)]) == 1, name
        said = capsys.readouterr().err
        assert str(tmp_path / "killed" / BEGUN[format]) in said and "job" in said, (name, said)
        assert contents(tmp_path / "killed") == before, name
    assert main([*first, str(out)]) == 0
    made = contents(tmp_path / "killed")
    assert made.keys() == contents(tmp_path / "whole").keys()
    assert {name: made[name] for name in made if name.endswith(".safetensors")} == {
        name: content for name, content in contents(tmp_path / "whole").items() if name.endswith(".safetensors")
    }
    shutil.rmtree(tmp_path / "killed")


@pytest.mark.parametrize("format", BEGUN)
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("fault", ["nan", "no blocks", "algorithm"])
def test_a_job_that_is_refused_before_it_finished_anything_leaves_nothing(
    fault: str, there: bool, format: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its mark would be refused as that of an interrupted job when the command is repeated with a mended input."""
    config = transformers.LlamaConfig(vocab_size=48, **SIZES)
    model = transformers.LlamaForCausalLM(config)
    words = ["torch", "quantize-files", str(tmp_path / "model"), "-o", str(tmp_path / "out"), "--format", format]
    if fault == "nan":
        model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
        words += ["-s", "int4_wo_32"]
    else:
        towers = {"text_config": SIZES, "vision_config": {**SIZES, "image_size": 8, "patch_size": 4}}
        model = transformers.CLIPModel(transformers.CLIPConfig(**towers)) if fault == "no blocks" else model
        words += ["--algorithm", "gptq"] if fault == "algorithm" else []
        np.save(tmp_path / "ids.npy", np.ones((2, 8), np.int64))
        words += ["-s", "fp8", "--data", str(tmp_path / "ids.npy"), "--seq-len", "8"]
    model.save_pretrained(tmp_path / "model")
    if there:
        (tmp_path / "out").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert main(words) == 1
    assert "error: " in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
