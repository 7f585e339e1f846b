"""``--format gguf`` on the command line: what the file loses is told, and what cannot be written is refused first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.torch_flow.export.test_gguf import bpe, model_of, of_transformers, read  # noqa: F401
from tests.torch_flow.export.test_gguf_architectures import network
from tests.torch_flow.export.test_reload import quantized

from quark.cli import main
from quark.torch import LLMTemplate
from quark.torch.export.api import export_gguf
from quark.torch.language import perplexity

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


def test_what_is_quantized_beside_weights_is_refused_by_every_command(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp rounds inputs and caches in its own way; a scheme of the weights keeps the codes."""
    np.save(tmp_path / "ids.npy", np.arange(64).reshape(2, 32) % 250)
    cache = ("--kv-cache", "fp8", "--data", tmp_path / "ids.npy", "--seq-len", "16")
    for number, more in enumerate(
        (("-s", "mxfp4"), ("-s", "int4_wo_32", *cache), ("-s", "int4_wo_32", "--layer", "*q_proj=mxfp4"))
    ):
        source = tmp_path / str(number)
        told(capsys, "quantize", folder, "-o", source, *more)
        for goal in (("--format", "gguf"), ("--for", "llama.cpp")):
            for words in (("quantize", folder, *more), ("quantize-files", folder, *more), ("convert", source)):
                assert main(["torch", *map(str, words), "-o", str(tmp_path / "x"), *goal]) == 1, (words, goal)
                assert "GGUF holds quantized weights alone" in capsys.readouterr().err
        assert not (tmp_path / "x").exists()
    given = ("--requantize", "mxfp4_weight_only", "--format", "gguf")
    facts = told(capsys, "convert", tmp_path / "0", "-o", tmp_path / "weights", *given)
    assert (facts["carried_over"], facts["quantized_again"], facts["file_loss"]) == (14, 0, 0)


def test_a_tokenizer_that_cannot_be_written_is_refused_before_the_perplexity(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quark.torch.language.perplexity", lambda *_: pytest.fail("it was measured"))
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"] = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "a": 1}}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    np.save(tmp_path / "ids.npy", np.arange(128).reshape(2, 64))
    words = ("quantize", folder, "-o", tmp_path / "out", *SCHEME, "--data", tmp_path / "ids.npy", "--seq-len", "32")
    assert main(["torch", *map(str, words)]) != 0
    assert "'WordLevel'; only BPE, Unigram and WordPiece can be written" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_types_are_asked_for_by_layer_and_what_is_told_is_what_the_file_holds(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Types, the values in the file and the perplexity, all by the decoders of gguf and of transformers."""
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 290, (2, 96)))
    kinds = {"*": "Q4_K", "*v_proj": "Q6_K", "*layers.1.*down_proj": "Q5_K"}
    words = [f"--gguf-type={glob}={kind}".replace("=*=", "=") for glob, kind in kinds.items()]
    data = ("--exclude", "*o_proj", "--data", tmp_path / "ids.npy", "--seq-len", "48")
    facts = told(capsys, "quantize", folder, "-o", tmp_path / "out", *words, *data)
    _, tensors = read(tmp_path / "out" / "llama.gguf")
    found = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    for block, down in enumerate(("Q4_K", "Q5_K")):
        wanted = {"attn_q": "Q4_K", "attn_v": "Q6_K", "attn_output": "F16", "ffn_up": "Q4_K", "ffn_down": down}
        assert {name: found[f"blk.{block}.{name}.weight"] for name in wanted} == wanted
    assert found["output.weight"] == "F16"
    model = of_transformers(tmp_path / "out" / "llama.gguf").eval()
    rows = list(torch.from_numpy(np.load(tmp_path / "ids.npy")))
    assert facts["perplexity_after"] == pytest.approx(perplexity(model, rows, 48), rel=1e-4)
    assert facts["perplexity_after"] != pytest.approx(facts["perplexity_before"], rel=1e-4)
    assert facts["file_loss"] == 0 and facts["kept_as_f32"] == []
    assert "Q4_K" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "granitemoe", "llama"])
def test_what_is_measured_has_the_values_of_every_tensor_of_the_file(family: str, bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    """The gate of a shared expert is a vector, which stays whole in the file, so it may not be rounded here."""
    model = network(family)
    model = quantized(model, LLMTemplate.for_model(model).get_config("Q8_0"))
    export_gguf(model, tmp_path, family, bpe, float_type="F32")
    whole = export_gguf(model, tmp_path / "whole", family, bpe, weight_type="F32", float_type="F32")
    assert whole.relative == 0
    tensors, wanted = read(tmp_path / f"{family}.gguf")[1], read(tmp_path / "whole" / f"{family}.gguf")[1]
    assert {tensor.tensor_type.name for tensor in tensors.values()} == {"F32", "Q8_0"}
    for name, tensor in tensors.items():
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(found.reshape(wanted[name].data.shape), wanted[name].data, err_msg=name)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gguf-type", "Q4K"], "Did you mean 'Q4_K'"),
        (["--gguf-type", "Q4_K", "--gguf-type", "*down_prj=Q6_K"], "'*down_prj'"),
        (["--gguf-type", "*down_proj=Q6_K"], "no --gguf-type without a glob"),
        (["--gguf-type", "Q4_K", "--scheme", "int4_wo_32"], "leave out --scheme"),
        (["--gguf-type", "Q4_K", "--config", "plan.yaml"], "leave out --config"),
        (["--gguf-type", "Q4_K", "--for", "vllm"], "the quark format has no Q4_K layer (Q4_K is a type of GGUF"),
    ],
)
def test_types_that_cannot_be_are_refused(
    words: list[str], sentence: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["torch", "quantize", str(folder), "-o", str(tmp_path / "out"), *words]) != 0
    assert sentence in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["quark", "gptq", "compressed-tensors", "gguf"])
def test_convert_keeps_the_licence_and_the_card(
    format: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n\nOf ours.\n", encoding="utf-8")
    (folder / "LICENSE").write_text("Do as you like.", encoding="utf-8")
    told(capsys, "quantize", folder, "-o", tmp_path / "quark", "--scheme", "int4_wo_32")
    told(capsys, "convert", tmp_path / "quark", "-o", tmp_path / "out", "--format", format)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: apache-2.0\nbase_model: quark\nbase_model_relation: quantized\n---\n")
    assert "carried over" in card and "int4_wo_32" in card and "Of ours." in card
    assert (tmp_path / "out" / "LICENSE").read_text(encoding="utf-8") == "Do as you like."


@pytest.mark.parametrize("words", [["-s", "Q4_K"], ["-s", "int4_wo_32", "--layer", "*.up_proj=Q6_K"]])
def test_types_of_ggml_are_no_scheme_file_by_file(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_of().save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    given = ["quantize-files", str(tmp_path / "m"), "-o", str(tmp_path / "o"), "--format", "gguf", *words]
    assert main(["torch", *given]) == 1
    assert "`quark torch quantize` writes it" in capsys.readouterr().err and not (tmp_path / "o").exists()


@pytest.mark.parametrize("kind", ["MXFP4", "mxfp4"])
def test_a_type_whose_name_is_no_scheme_is_taken(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told(capsys, "quantize", folder, "-o", tmp_path / "out", "--gguf-type", "Q8_0", "--gguf-type", f"*down_proj={kind}")
    found = {name: tensor.tensor_type.name for name, tensor in read(tmp_path / "out" / "llama.gguf")[1].items()}
    assert (found["blk.0.ffn_down.weight"], found["blk.0.ffn_up.weight"]) == ("MXFP4", "Q8_0")


@pytest.mark.parametrize("command", ["plan", "quantize", "quantize-files"])
def test_a_type_of_models_without_a_gguf_file_is_refused_by_every_command(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``plan`` said that the file would be written."""
    from quark.torch.export.gguf_table import ARCHITECTURES

    monkeypatch.delitem(ARCHITECTURES, "llama")
    output = () if command == "plan" else ("-o", tmp_path / "out")
    assert (
        main(["torch", command, *map(str, (folder, *output, "--scheme", "int8_wo_per_channel", "--for", "llama.cpp"))])
        == 1
    )
    assert "no GGUF file is written for model_type 'llama'" in " ".join(capsys.readouterr().err.split())
