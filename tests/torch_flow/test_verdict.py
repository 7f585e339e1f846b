"""The last lines of commands that write a folder: whether it is good, and what to type now."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from tests.killing import llama

from quark.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    made = llama(tmp_path_factory.mktemp("float"))
    (made / "tokenizer.json").unlink()
    return made


def words_of(command: list[str], folder: Path, out: Path, ids: Path | None) -> list[str]:
    data = [] if ids is None else ["--data", str(ids), "--seq-len", "8"]
    return ["torch", *command, str(folder), "-o", str(out), *data]


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    import numpy as np

    np.save(tmp_path / "ids.npy", np.arange(128, dtype=np.int64).reshape(16, 8) % 8 + 1)
    return tmp_path / "ids.npy"


COMMANDS = [
    (["quantize", "-s", "int4_wo_32"], True),
    (["quantize", "-s", "int4_wo_32"], False),
    (["quantize", "-s", "int4_wo_32", "--format", "compressed-tensors"], False),
    (["quantize-files", "-s", "int4_wo_32"], False),
    (["quantize-files", "-s", "int4_wo_32", "--format", "awq"], False),
]


@pytest.mark.parametrize(("command", "measured"), COMMANDS)
def test_every_command_that_writes_a_folder_ends_with_a_verdict(
    command: list[str], measured: bool, folder: Path, ids: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "q"
    assert main(words_of(command, folder, out, ids if measured else None)) == 0
    last = [line.split()[0] for line in capsys.readouterr().out.strip().splitlines()[-5:]]
    assert last == ["accuracy", "size", "coverage", "readers", "next"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "q"]  # no draft is left


@pytest.mark.parametrize("format", ["quark", "compressed-tensors", "awq", "gptq"])
def test_the_command_that_measures_what_was_not_measured_runs(
    format: str, folder: Path, ids: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "q"
    assert main([*words_of(["quantize", "-s", "int4_wo_32"], folder, out, None), "--format", format, "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert verdict["accuracy"]["word"] == "not measured" and verdict["accuracy"]["bad"]
    (advised,) = verdict["next"]
    program, *words = shlex.split(advised.replace("TEXT", str(ids)))
    assert program == "quark" and main([*words, "--seq-len", "8"]) == 0
    assert "perplexity" in capsys.readouterr().out


def test_coverage_counts_the_bytes_of_the_weights_that_became_codes(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            sizes |= {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    for command in ("quantize", "quantize-files"):
        words = [command, "-s", "int4_wo_32", "--exclude-only", "*q_proj", "--exclude-only", "lm_head"]
        assert main([*words_of(words, folder, tmp_path / command, None), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        left = ("embed_tokens", "norm", "q_proj", "lm_head")
        coded = sum(size for name, size in sizes.items() if not any(part in name for part in left))
        assert facts["weights_quantized"] == pytest.approx(coded / sum(sizes.values()))


@pytest.mark.parametrize("format", ["compressed-tensors", "quark"])
def test_coverage_does_not_depend_on_the_type_that_codes_are_decoded_to(
    format: str, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    sizes = {name: value.numel() for name, value in model.named_parameters()}
    coded = sum(
        size for name, size in sizes.items() if not any(part in name for part in ("embed_tokens", "norm", "lm_head"))
    )
    words = words_of(
        ["quantize", "-s", "int8_wo_per_channel", "--format", format], tmp_path / "half", tmp_path / "a", None
    )
    assert main(words) == 0
    capsys.readouterr()
    for command in ("quantize", "quantize-files"):
        words = [*words_of([command, "-s", "int4_wo_32"], tmp_path / "a", tmp_path / command, None), "--json"]
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out)["weights_quantized"] == pytest.approx(coded / sum(sizes.values()))


@pytest.mark.parametrize(
    ("after", "loss", "word"),
    [
        (10.4, None, "good"),
        (10.6, None, "doubtful"),
        (12.6, None, "lost"),
        (10.0, 0.02, "doubtful"),
        (9.0, 0.2, "lost"),
    ],
)
def test_the_worst_figure_decides(after: float, loss: float | None, word: str) -> None:
    from quark.cli.torch_verdict import accuracy_of

    facts = {"perplexity_before": 10.0, "perplexity_after": after} | ({} if loss is None else {"file_loss": loss})
    line = accuracy_of(facts)
    assert (line.word, line.bad) == (word, word != "good")


def test_a_file_that_holds_the_weights_says_nothing_about_answers() -> None:
    from quark.cli.torch_verdict import accuracy_of

    words = [accuracy_of({"file_loss": loss}).word for loss in (0.0, 0.009, 0.02, 0.2)]
    assert words == ["not measured", "not measured", "doubtful", "lost"]


def test_a_lost_model_names_the_command_that_tries_more(
    folder: Path, ids: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quark.torch import language

    figures = iter([10.0, 30.0])
    monkeypatch.setattr(language, "perplexity", lambda *args: next(figures))
    out = tmp_path / "q"
    assert main([*words_of(["quantize", "-s", "int4_wo_32"], folder, out, ids), "--for", "vllm"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-5].startswith("accuracy  lost: perplexity 10.0000 → 30.0000, +200.0 %")
    assert f"quark auto {folder} --data {ids} --for vllm -o {out}-auto" in lines[-1]


def test_an_interrupted_write_leaves_no_folder(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card is a part of the folder: without it there is none."""
    from quark.errors import OutputError
    from quark.torch.export import card

    def fail(*args: object) -> None:
        raise OutputError("the disk is full")

    monkeypatch.setattr(card, "write_card", fail)
    for command in (["quantize"], ["quantize-files", "--format", "awq"]):
        assert main(words_of([*command, "-s", "int4_wo_32"], folder, tmp_path / "q", None)) != 0
        assert not (tmp_path / "q").exists()
        assert "the disk is full" in capsys.readouterr().err


def test_a_conversion_without_its_card_leaves_no_folder(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quark.errors import OutputError
    from quark.torch.export import card

    def fail(*args: object) -> None:
        raise OutputError("the disk is full")

    assert main(words_of(["quantize-files", "-s", "int4_wo_32"], folder, tmp_path / "codes", None)) == 0
    monkeypatch.setattr(card, "write_card", fail)
    words = ["torch", "convert", str(tmp_path / "codes"), "-o", str(tmp_path / "q"), "--format", "compressed-tensors"]
    assert main(words) != 0
    assert not (tmp_path / "q").exists()
    assert "the disk is full" in capsys.readouterr().err


WHY = "vLLM turns rows of 'q'; --exclude q has none"


@pytest.mark.parametrize(
    ("scheme", "format", "readers", "not_for", "line"),
    [
        ("int4_wo_32", "quark", ["vllm", "transformers"], {}, "vLLM, transformers: where they have this architecture"),
        ("fp8_block", "fp8", ["transformers"], {}, "transformers: transformers on a CPU weights are decoded, activat"),
        (
            "int4_wo_32",
            "awq",
            ["transformers"],
            {"vllm": WHY},
            "transformers: transformers needs gptqmodel; vLLM turns",
        ),
        (
            "int4_wo_32",
            "awq",
            [],
            {"vllm": WHY, "transformers": "no"},
            "no program: vLLM turns rows of 'q'; transformers",
        ),
        ("mine", "quark", [], {}, None),  # in no table
    ],
)
def test_the_programs_that_read_a_file_are_told_with_what_is_to_be_known(
    scheme: str, format: str, readers: list[str], not_for: dict[str, str], line: str | None
) -> None:
    from quark.cli.torch_verdict import reader_lines

    found = reader_lines({"scheme": scheme, "format": format, "readers": readers, "not_for": not_for})
    assert [str(one)[:50] for one in found] == ([] if line is None else [f"{'readers':<10}{line}"[:50]])
    assert [one.bad for one in found] == ([] if line is None else [not readers])
