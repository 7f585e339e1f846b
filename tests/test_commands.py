"""Every command of the command line: its help, its words, the page under an error, what `doctor` says."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

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


WRONG = {
    "--exclude": ("plan", []),
    "--layout": ("plan", []),
    "--for": ("plan", []),
    "--algorithm": ("quantize", ["--random"]),
    "--config": ("plan", []),
    "--budget": ("search", ["--random", "--target", "sqnr>=9", "-c", "A8W8"]),
    "--target": ("search", ["--random", "-c", "A8W8"]),
    "--backend": ("search", ["--random", "--target", "sqnr>=9", "-c", "A8W8"]),
    "--fail-under": ("quantize", ["--random"]),
    "--data": ("quantize", ["--random"]),
    "--limit": ("search", ["--random", "--target", "sqnr>=9", "-c", "A8W8"]),
}


@pytest.mark.parametrize("flag", WRONG)
def test_a_wrong_value_is_told_by_its_flag(flag: str, tmp_path: Path, capsys: Capture) -> None:
    """Nobody who typed a flag reads of fields of a configuration that is written in Python."""
    from quark.demo.data import model_path

    name, more = WRONG[flag]
    output = [] if name == "plan" else ["-o", str(tmp_path / "out.yaml")]
    assert main(["onnx", name, str(model_path()), *output, *more, flag, "7"]) == 1
    said = capsys.readouterr().err.partition("error: ")[2]
    assert flag in said and not re.search(r"nodes_to_exclude|extra_options|dataloader|data_reader|unknown target", said)
