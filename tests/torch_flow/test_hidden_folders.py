"""Folders that a job keeps beside its output take no name that somebody has: of a model, or of somebody's files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.pairs import thinned

from quark.cli import main
from quark.files.folder import detour, scratch_beside

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
FORMAT = ["--format", "compressed-tensors"]
#: Commands that need a folder for a while: a source that is decoded, or files in a format before the last one.
JOBS = {
    "quantize": ["torch", "quantize", "coded", "-s", "int8_wo_per_channel"],
    "quantize, GGUF": ["torch", "quantize", "coded", "--gguf-type", "Q8_0"],
    "quantize-files": ["torch", "quantize-files", "coded", "-s", "int8_wo_per_channel"],
    "quantize-files, another format": ["torch", "quantize-files", "plain", "-s", "int4_wo_32", *FORMAT],
    "convert": ["torch", "convert", "coded", *FORMAT],
    "convert anew": ["torch", "convert", "coded", "--requantize", "int8_wo_per_channel", *FORMAT],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float checkpoint, and a quantized one."""
    made = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=48, **SIZES))
    model.save_pretrained(made / "plain")
    assert main(["torch", "quantize-files", str(made / "plain"), "-o", str(made / "coded"), "-s", "int4_wo_32"]) == 0
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names_beside(words: list[str], models: Path, folder: Path) -> set[str]:
    """The hidden folders that a job has beside its output while it runs, without the part that is drawn."""
    seen: set[str] = set()
    made = Path.mkdir

    def watched(path: Path, *args: int, **kwargs: bool) -> None:
        seen.add(path.name)
        made(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", watched)
        patch.chdir(models)
        main([*words, "-o", str(folder / "q")])
    return {name for name in seen if name.startswith(".")} | {".q.float", ".q.quark"}


@pytest.mark.parametrize("job", thinned(JOBS, 2))
def test_what_is_there_under_a_hidden_name_stays(
    job: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(models)
    first = tmp_path / "first"
    first.mkdir()
    for name in names_beside(JOBS[job], models, first):
        source = tmp_path / name
        shutil.copytree(models / JOBS[job][2], source)
        (source / "thesis.txt").write_text("mine")
        before = contents(source)
        for given in (JOBS[job][2], str(source)):  # beside the source, and as the source
            words = [given if word == JOBS[job][2] else word for word in JOBS[job]]
            code = main([*words, "-o", str(tmp_path / "q")])
            assert contents(source) == before, (name, given)
            said = capsys.readouterr().err
            assert code == 0 or "is in the way" in said or "tokenizer" in said, said
            shutil.rmtree(tmp_path / "q", ignore_errors=True)
        shutil.rmtree(source)


def test_an_unfinished_detour_is_no_source(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder of a job that was killed before its last step bears our mark, and is read by this job."""
    source = detour(tmp_path / "q")
    shutil.copytree(models / "plain", source)
    (source / ".quark-detour").touch()
    before = contents(source)
    words = ["torch", "quantize-files", str(source), "-s", "int4_wo_32", *FORMAT, "-o", str(tmp_path / "q")]
    assert main(words) == 1
    assert "is in the way" in capsys.readouterr().err and contents(source) == before


def test_two_jobs_have_two_folders(tmp_path: Path) -> None:
    with scratch_beside(tmp_path / "q") as one, scratch_beside(tmp_path / "q") as other:
        assert one != other and one.parent == other.parent == tmp_path
    assert list(tmp_path.iterdir()) == []
