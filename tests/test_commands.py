"""Every command of the command line: its help, its words, the page under an error, what `doctor` says."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.main import get_command

from quark import cli
from quark.cli import doctor, guidance, main
from quark.cli.app import app
from quark.cli.common import USUAL
from quark.cli.sections import SECTIONS, arrange, every, options_of
from quark.config.presets import HARDWARE, PRESETS
from quark.errors import ConfigError, DataError, ModelError, ModelNotFoundError, OutputError, QuarkError

ROOT = Path(__file__).parents[1]
PROGRAM = arrange(get_command(app))
COMMANDS = [one for one in every(PROGRAM) if not hasattr(one, "commands")]
OPTIONS = [(command, option) for command in COMMANDS for option in options_of(command)]
PAGES = {*(page for _, page in guidance.BY_PLACE), *guidance.FIRST.values(), *guidance.BY_KIND.values()}
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=lambda one: one.name)
def test_every_option_has_help_and_a_section(command: Any, option: Any) -> None:
    assert (option.help and option.help[0].isupper()) or option.help.startswith("`"), option.name
    assert option.rich_help_panel in SECTIONS, f"{option.opts[0]} of {command.name}: add it to quark.cli.sections"


@pytest.mark.parametrize(("number", "bound"), [(-1, "min"), (1 << 62, "max")])
def test_a_number_that_nothing_can_count_is_refused_with_the_bound(number: int, bound: str, capsys: Capture) -> None:
    for command, option in (one for one in OPTIONS if one[1].type_descriptor.annotation is int):
        with pytest.raises(SystemExit, match="2"):
            command(args=[option.opts[0], str(number)], prog_name=command.name)
        said = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert f"Invalid value for '{option.opts[0]}'" in said and f"{getattr(option, bound)}" in said, command.name


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one.name)
def test_at_most_five_options_stand_on_top(command: Any) -> None:
    top = [one for one in options_of(command) if one.rich_help_panel == next(iter(SECTIONS))]
    assert len(top) <= 5
    assert command.help


def test_no_option_of_the_table_is_gone() -> None:
    known = {one.opts[0] for command in every(PROGRAM) for one in options_of(command)}
    assert {name for names in SECTIONS.values() for name in names} - known == {"--help"}


def test_one_word_means_one_thing() -> None:
    """An option of one name takes the same kind of value everywhere, and a parameter has one option."""
    kinds: dict[str, set[tuple[Any, bool]]] = defaultdict(set)
    for _, option in OPTIONS:
        kinds[option.opts[0]].add((option.bare_type().replace("Path", "str"), option.is_flag))
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}
    flows = {
        name: {one.opts[0] for c, one in OPTIONS if c.callback.__module__.endswith(name)} for name in ("torch_app",)
    }
    assert {"--algorithm", "--exclude", "--config", "--for", "--format"} <= flows["torch_app"]
    quantize = next(one for one in COMMANDS if one.name == "quantize")
    assert {"--algorithm", "--exclude", "--config", "--for"} <= {one.opts[0] for one in options_of(quantize)}


@pytest.mark.parametrize("group", ["", "onnx", "torch", "plan"])
@pytest.mark.parametrize("name", sorted({str(one.name) for one in COMMANDS}))
def test_a_command_of_another_group_is_named(group: str, name: str, capsys: Capture) -> None:
    ways = {
        way for way in (("quark", name), *(("quark", other, name) for other in ("onnx", "torch", "plan"))) if known(way)
    }
    if known(("quark", *group.split(), name)):
        return
    assert main([*group.split(), name]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"No such command '{name}' here" in said and all(" ".join(way) in said for way in ways), said


def known(way: tuple[str, ...]) -> bool:
    """Whether a command can be called by these words."""
    command: Any = PROGRAM
    for word in way[1:]:
        command = getattr(command, "commands", {}).get(word)
    return command is not None


def test_the_usual_presets_are_for_their_hardware() -> None:
    assert set(USUAL) == set(HARDWARE)
    assert [name for kind, name in USUAL.items() if kind not in PRESETS[name].hardware] == []


@pytest.mark.parametrize("page", sorted(PAGES))
def test_pages_of_errors_exist(page: str) -> None:
    path, _, anchor = page.partition("#")
    text = (ROOT / path).read_text(encoding="utf-8")
    headings = [re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-")
                for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]  # fmt: skip
    assert not anchor or anchor in headings


def test_every_kind_of_error_has_a_page() -> None:
    for kind in (ConfigError, DataError, ModelError, ModelNotFoundError, OutputError, QuarkError):
        assert guidance.page_of(kind("x")) in PAGES


@pytest.mark.parametrize(
    ("arguments", "page"),
    [
        (["onnx", "plan", "absent.onnx"], "docs/quickstart.md"),
        (["presets", "A8W9"], "docs/choose.md#presets"),
        (["torch", "formats", "--scheme", "int5"], "docs/torch/configuration.md"),
    ],
)
def test_an_error_links_to_its_page(arguments: list[str], page: str, capsys: Capture) -> None:
    assert main(arguments) == 1
    first, second, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ") and second == f"see {page}; {guidance.DETAILS}" and rest == []


def test_verbose_tells_kind_place_and_cause(capsys: Capture) -> None:
    assert main(["onnx", "plan", "absent.onnx", "--verbose"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:3] == ["see docs/quickstart.md", "kind: ModelNotFoundError"]
    assert lines[3].startswith("raised by: quark.")


def test_causes_are_told_in_order() -> None:
    def fails() -> None:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise DataError("outer") from inner

    with pytest.raises(DataError) as caught:
        fails()
    assert "caused by: KeyError: 'inner'" in guidance.words(caught.value, True)


def test_for_chooses_the_preset(capsys: Capture) -> None:
    assert main(["onnx", "quantize", "m.onnx", "-o", "q.onnx", "--for", "npu", "--preset", "A8W8"]) == 2
    assert "--preset or --for" in " ".join(capsys.readouterr().err.split())
    assert main(["onnx", "quantize", "m.onnx", "-o", "q.onnx", "--for", "tpu"]) == 1
    assert "Allowed: cpu, npu, gpu" in capsys.readouterr().err


def test_doctor_tells_versions_and_what_is_missing(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.version_of
    ages = {"scipy": None, "onnx": "1.2.0"}
    monkeypatch.setattr(doctor, "version_of", lambda name: ages[name] if name in ages else real(name))
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["extras"]["search"] == ["scipy"]
    assert found["extras"]["onnx"] == ["onnx>=1.21 (here 1.2.0)"]
    assert found["extras"]["torch"] == []
    assert "CPUExecutionProvider" in found["providers"] and found["threads"]["usable"] >= 1
    assert main(["doctor"]) == 0
    told = capsys.readouterr()
    assert "missing: scipy" in " ".join(told.out.split()) and told.err.startswith("next: ")


def test_versions_are_compared_as_numbers() -> None:
    assert doctor.numbers("1.21.0rc1") == (1, 21, 0) < doctor.numbers("1.100")
    assert doctor.numbers("2.13.0+cpu") == (2, 13, 0)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "nodes_to_exclude: the node name 'Conv_5' matches no node of the model. Did you mean 'Conv_6'?",
            "--exclude Conv_5: no such node. Did you mean 'Conv_6'? `quark onnx tool print_names` lists the names",
        ),
        (
            "static activations need samples, and dataloader is None: give one, or use is_dynamic=True (first of 2)",
            "static activations need samples, and there are none: add `--data text.txt`, or choose a scheme with "
            "dynamic activations, such as ptpc_fp8 (first of 2)",
        ),
        ("extra_options: unknown 'X'", "--set: unknown 'X'"),
        ("the model has no inputs", "the model has no inputs"),
    ],
)
def test_messages_of_the_command_line_name_flags(said: str, expected: str) -> None:
    assert guidance.sentence(ConfigError(said)) == expected


def test_a_wrong_node_is_told_by_its_flag(tmp_path: Path, capsys: Capture) -> None:
    from quark.demo.data import model_path

    assert main(["onnx", "plan", str(model_path()), "--exclude", "Conv_5"]) == 1
    assert capsys.readouterr().err.startswith("error: --exclude Conv_5: no such node.")


#: A line of each command that takes texts; it works but for the option under test.
LINES = (
    "onnx quantize model.onnx -o out.onnx --data data.npz",
    "onnx plan model.onnx",
    "onnx sensitivity model.onnx --data data.npz",
    "onnx search model.onnx -o out.yaml --data data.npz --target sqnr>=9 -c A8W8",
    "onnx compare model.onnx model.onnx --data data.npz",
    "onnx transform model.onnx -o out.onnx --config xint8",
    "auto model.onnx -o out.onnx --data data.npz",
    "auto llama -o out --data ids.npz",
    "torch quantize llama -o out --scheme int8_wo_per_channel",
    "torch plan llama --scheme int8_wo_per_channel",
    "torch explain llama lm_head --scheme int8_wo_per_channel",
    "torch quantize-files llama -o out --scheme int8_wo_per_channel",
    "torch sensitivity llama -c int8_wo_per_channel --data ids.npz",
    "torch search llama -o out.yaml -c int8_wo_per_channel --data ids.npz --target kl<=1",
    "torch evaluate llama --data ids.npz",
    "torch convert llama -o out",
    "torch formats",
    "presets",
)
#: Option -> wrong values, where there are others than ``nonsense``.
WRONG: dict[str, tuple[str, ...]] = {
    "--fail-under": ("7", "nonsense=7"),
    "--layer": ("nonsense", "*=nonsense", "nonsense=int8"),
    "--set": ("nonsense", "Nonsense=1", "CalibMovingAverage=nonsense", "OpTypesToQuantize=[Nonsense]"),
    "--target": ("nonsense", "nonsense>=1", "sqnr>=nonsense"),
    "--algorithm": ("nonsense", "nonsense.py:nonsense"),
    "--metric": ("nonsense", "nonsense.py:nonsense"),
    "--candidate": ("nonsense", "A8W8+nonsense", "int8+nonsense"),
}
#: Options that any text may follow, and those of pictures, which these models have not.
ANY = {"--output", "--plan", "--report", "--ledger", "--mean", "--std", "--size", "--resize"}


def mistakes() -> Iterator[tuple[str, str, str]]:
    """A line, an option of its command that takes a text, and a text that it cannot take."""
    for line in LINES:
        command: Any = PROGRAM
        for word in line.split():
            command = getattr(command, "commands", {}).get(word, command)
        for option in options_of(command):
            name = option.opts[0]
            if name not in ANY and re.search("str|Path", option.bare_type()):
                yield from ((line, name, wrong) for wrong in WRONG.get(name, ("nonsense",)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind, and ids of tokens."""
    from quark.demo.data import model_path

    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("mistakes")
    shutil.copy(model_path(), folder / "model.onnx")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, **sizes)).save_pretrained(folder / "llama")
    np.savez(folder / "ids.npz", input_ids=np.ones((2, 8), np.int64))
    np.savez(folder / "data.npz", image=np.zeros((2, 1, 32, 32), np.float32))
    return folder


@pytest.mark.parametrize(("line", "option", "wrong"), [*mistakes()])
def test_a_wrong_value_is_told_by_its_flag(
    line: str, option: str, wrong: str, folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody who typed an option reads of a field of a configuration that is written in Python."""
    monkeypatch.chdir(folder)
    assert main([*line.split(), option, wrong]) in (1, 2)
    said = capsys.readouterr().err.rpartition("error: ")[2].splitlines()
    first = " ".join(said) if said[0].startswith("Usage") else said[0]
    assert option in first
    assert not re.search(r"nodes_to_exclude|extra_options|layer_quant_config|dataloader|data_reader", first)


@pytest.mark.parametrize("format", ["awq", "fp8", "gptq", "modelopt", "mxfp4"])
def test_what_a_format_does_not_hold_is_told_by_its_flag(format: str) -> None:
    """``fp8`` and ``mxfp4`` are schemes too, and the flag that was typed first was blamed."""
    error = ConfigError(f"custom_mode '{format}' does not fit this configuration: keys and values must be static")
    said = guidance.sentence(error, [("--scheme", format), ("--format", format)])
    assert said == f"--format '{format}' does not fit this configuration: keys and values must be static"


def test_who_does_not_read_a_value_is_still_told() -> None:
    said = guidance.sentence(ConfigError("vLLM does not read 'mine' yet"), [("--scheme", "mine")])
    assert said == "--scheme 'mine': vLLM does not read 'mine' yet"


def test_a_warning_of_a_command_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And by the next command again."""
    printer = logging.lastResort
    assert printer is not None

    def command(args: Any, prog_name: str) -> None:
        for number in (1, 1, 2, 1):
            printer.handle(logging.makeLogRecord({"name": "x", "msg": "left %d", "args": (number,), "levelno": 30}))

    monkeypatch.setattr("quark.cli._called", lambda words: (command, "quark", words))
    for _ in range(2):
        assert main(["any"]) == 0
        assert capsys.readouterr().err.splitlines() == ["left 1", "left 2"]


GPU = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.19 GiB of which 5 MiB is free."
BUFFER = "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested buffer of size 123456"
SHORT: dict[str, tuple[Callable[[], Any], str]] = {
    "numpy": (lambda: np.empty(1 << 58, np.uint8), "this machine has not enough memory (asked for 256 PiB)"),
    "torch": (lambda: torch.empty(1 << 46), "this machine has not enough memory (asked for 281474976710656 bytes)"),
    "a GPU": (lambda: _raised(torch.OutOfMemoryError(GPU)), "GPU 1 has not enough memory (asked for 2.00 GiB)"),
    "onnxruntime": (lambda: _raised(Exception(BUFFER)), "this machine has not enough memory (asked for 123456 bytes)"),
    "Python": (lambda: _raised(MemoryError()), "this machine has not enough memory"),
}
BIG = {
    "torch quantize x": "quark torch quantize-files",
    "torch quantize-files x": "--batch-size 1",
    "onnx plan x": "fewer",
}


def _raised(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("words", BIG)
@pytest.mark.parametrize("library", SHORT)
def test_memory_that_is_short_is_an_error_with_what_needs_less(
    library: str, words: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, told = SHORT[library]
    monkeypatch.setattr(cli, "_called", lambda words: (lambda args, prog_name: ask(), "quark", words))
    assert main(words.split()) == 1
    sentence, page = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"error: {told}: ") and BIG[words] in sentence
    assert page.startswith("see docs/faq.md#there-is-not-enough-memory")


@pytest.mark.parametrize("said", ["can't start new thread", "thread constructor failed: Resource unavailable"])
def test_threads_that_cannot_be_started_are_an_error(
    said: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = lambda args, prog_name: _raised(RuntimeError(said))  # noqa: E731
    monkeypatch.setattr(cli, "_called", lambda words: (call, "quark", words))
    assert main(["onnx", "plan", "x"]) == 1
    assert capsys.readouterr().err.startswith("error: this machine starts no more threads for the command: ")


def test_other_errors_of_libraries_show_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cli, "_called", lambda words: (lambda args, prog_name: torch.zeros(2) @ torch.zeros(3), "", words)
    )
    with pytest.raises(RuntimeError, match="size"):
        main(["torch", "quantize", "x"])
