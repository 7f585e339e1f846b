"""No command writes over what it reads: every command, every output option, every input; and no writer is elsewhere.

The commands and their options are those of the command line as it is, and the calls that write those of the source as
it is: a new option or a new writer that passes by the gate turns a test red.
"""

from __future__ import annotations

import ast
import inspect
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models
from tests.test_architecture import modules
from typer.main import get_command

from quark.cli import main
from quark.cli.app import app
from quark.cli.paths import FOLDER, Guarded, Reads, Writes, inputs_of, marks_of
from quark.config.plan import Plan
from quark.errors import ModelError
from quark.files.ours import MARK
from quark.onnx import ModelQuantizer, QConfig, QLayerConfig
from quark.onnx.quantization.config.spec import Int8Spec
from quark.onnx.shapeshifter import transform
from quark.onnx.tools.command import find
from quark.onnx.tools.command import main as run_tool
from quark.onnx.tools.names import TOOLS


def commands() -> dict[str, Any]:
    """Every command by the words that call it."""
    found: dict[str, Any] = {}

    def walk(command: Any, words: tuple[str, ...]) -> None:
        for name, below in getattr(command, "commands", {}).items():
            walk(below, (*words, name))
        if not hasattr(command, "commands"):
            found[" ".join(words)] = command

    walk(get_command(app), ())
    return found


COMMANDS = commands()
#: Options of the type ``str`` that name files, and are marked as such.
FILES_IN_WORDS = ("algorithms", "config", "metric", "preprocess")
REQUIRED = {"onnx search": ["--target", "sqnr>=1"], "torch search": ["--target", "kl<=1", "--scheme", "fp8"]}
REQUIRED |= {"torch quantize": ["--scheme", "int4_wo_32"], "torch quantize-files": ["--scheme", "int4_wo_32"]}


def test_every_path_of_every_command_says_what_it_is_for() -> None:
    seen = 0
    for name, command in COMMANDS.items():
        function = inspect.unwrap(command.callback)
        marks = marks_of(function)
        for option, hint in get_type_hints(function, include_extras=True).items():
            if Path in (hint, *get_args(hint), *(one for part in get_args(hint) for one in get_args(part))) or (
                "list[pathlib.Path]" in str(hint)
            ):
                assert option in marks, f"{name}: {option} is a path that is neither Reads nor Writes"
                seen += 1
            elif option in marks:
                assert option in FILES_IN_WORDS
        if marks:
            assert isinstance(command, Guarded), f"{name} has paths and no guard"
        if any(isinstance(mark, Writes) and mark.kind not in ("state", FOLDER) for mark in marks.values()):
            assert "overwrite" in inspect.signature(function).parameters, name
    assert seen > 35


def test_what_is_no_path_is_no_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric that is a name, or an option that is not given, is not the folder in which the command is called."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ledger.json").write_text("{}")
    for name, command in COMMANDS.items():
        marks = marks_of(inspect.unwrap(command.callback))
        given = {one.name: one.default for one in command.params if not one.required}
        given |= {key: "kl" for key, mark in marks.items() if isinstance(mark, Reads) and mark.function}
        assert list(inputs_of(marks, given)) == [], name


@pytest.mark.parametrize("name", COMMANDS)
def test_an_empty_path_is_no_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a variable of the shell that is not set: neither read nor written is the folder one is in."""
    monkeypatch.chdir(tmp_path)
    params, marks = COMMANDS[name].params, marks_of(inspect.unwrap(COMMANDS[name].callback))
    for empty in (one for one in params if one.name in marks):
        words = ["" if one is empty else "x" for one in params if one.param_type_name == "argument"]
        words += [empty.opts[0], ""] if empty.param_type_name == "option" else []
        assert main([*name.split(), *words]) == 1, words
        said = capsys.readouterr().err
        told = next((one for one in empty.opts if one.startswith("--")), str(empty.metavar or empty.name.upper()))
        assert said.startswith(f"error: {told} is empty: give a path"), said
        assert not any(tmp_path.iterdir())


def files(folder: Path) -> dict[str, Path]:
    """One input of every kind."""
    proto = models.conv_chain(2)
    onnx.save(proto, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    onnx.save(proto, folder / "quantized.onnx")
    np.save(folder / "data.npy", next(iter(models.feeds(proto).values())))
    (folder / "samples").mkdir()
    np.save(folder / "samples" / "0.npy", np.zeros(3))
    (folder / "plan.yaml").write_text("preset: A8W8\n")
    (folder / "plan.json").write_text(Plan().to_json())
    (folder / "metric.py").write_text("def f(path): return 1.0\n")
    (folder / "library.so").write_bytes(b"no library")
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text("{}")
    (folder / "llama" / "model.safetensors").write_bytes(b"weights")
    return {path.name: path for path in folder.rglob("*") if path.is_file()}


def state_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def value_of(option: str, command: str, folder: Path, marked: Reads) -> str:
    """What is typed for an input."""
    if marked.function:
        return f"{folder / 'metric.py'}:f"
    names = {"model": "llama" if command.startswith("torch") else "model.onnx", "quantized": "quantized.onnx"}
    names |= dict.fromkeys(("before", "after"), "plan.json")
    names |= {
        "labels": "data.npy",
        "data": "samples",
        "eval_data": "data.npy",
        "config": "plan.yaml",
        "plan_from": "plan.json",
        "register": "metric.py",
        "custom_ops": "library.so",
    }
    return str(folder / names[option])


def cases() -> Iterator[tuple[str, str]]:
    for name, command in COMMANDS.items():
        for option, mark in marks_of(inspect.unwrap(command.callback)).items():
            if isinstance(mark, Writes):
                yield name, option


def typed(name: str, folder: Path, outputs: dict[str, Path], inputs: Mapping[str, str] = {}) -> list[str]:
    """A whole command line: every input, some under other names, and these outputs."""
    command, words = COMMANDS[name], name.split()
    marks = marks_of(inspect.unwrap(command.callback))
    for parameter in command.params:
        mark = marks.get(parameter.name)
        if mark is None or (isinstance(mark, Writes) and parameter.name not in outputs and not parameter.required):
            continue
        if name == "torch quantize" and parameter.name == "config" and "config" not in inputs:
            continue  # in the place of --scheme
        if name.endswith("search") and parameter.name == "metric":
            pass
        given = outputs.get(parameter.name, folder / f"free-{parameter.name}.yaml")
        value = str(given) if isinstance(mark, Writes) else value_of(parameter.name, name, folder, mark)
        value = inputs.get(parameter.name, value)
        words += [value] if parameter.param_type_name == "argument" else [parameter.opts[0], value]
    return [*words, *REQUIRED.get(name, [])]


@pytest.mark.parametrize(("name", "option"), list(cases()), ids=lambda value: str(value))
def test_no_output_of_any_command_replaces_any_input(
    name: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = files(tmp_path)
    before = state_of(tmp_path)
    marks = marks_of(inspect.unwrap(COMMANDS[name].callback))
    read = {key: value_of(key, name, tmp_path, mark) for key, mark in marks.items() if isinstance(mark, Reads)}
    roots = [Path(value.rpartition(":")[0] if value.endswith(":f") else value) for value in read.values()]
    own = [path for path in inputs.values() if any(path == root or root in path.parents for root in roots)]
    own += [tmp_path / "weights.bin"] if name.startswith("onnx") else []
    assert own
    for path in own:
        for flag in ([], ["--overwrite"] if any(p.name == "overwrite" for p in COMMANDS[name].params) else []):
            code = main([*typed(name, tmp_path, {option: path}), *flag])
            told = capsys.readouterr().err
            assert code == 1 and "error: " in told and "Traceback" not in told, (path.name, told)
            assert state_of(tmp_path) == before, path.name


@pytest.mark.parametrize("name", sorted({name for name, _ in cases()}))
def test_two_outputs_of_a_command_are_two_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files(tmp_path)
    before = state_of(tmp_path)
    options = [option for one, option in cases() if one == name]
    for first in options:
        for second in options:
            if first < second and (FOLDER,) not in [(marks_of(inspect.unwrap(COMMANDS[name].callback))[first].kind,)]:
                same = {first: tmp_path / "one.json", second: tmp_path / "one.json"}
                assert main(typed(name, tmp_path, same)) == 1
                assert "are one file" in capsys.readouterr().err and state_of(tmp_path) == before


@pytest.mark.skipif(os.name == "nt", reason="devices of POSIX")
@pytest.mark.parametrize(("name", "option"), list(cases()), ids=lambda value: str(value))
def test_no_command_replaces_a_device_or_somebodys_file(
    name: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files(tmp_path)
    (tmp_path / "thesis.txt").write_text("mine")
    before = state_of(tmp_path)
    assert main(typed(name, tmp_path, {option: Path("/dev/null")})) == 1
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert main(typed(name, tmp_path, {option: tmp_path / "thesis.txt"})) in (1, 2)
    assert "Traceback" not in capsys.readouterr().err and state_of(tmp_path) == before


# ---- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOOLS)
def test_no_tool_replaces_what_it_reads(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs, tool = files(tmp_path), find(name)
    before = state_of(tmp_path)
    if "output" not in tool.files:
        return
    values = {"data_path": str(tmp_path / "samples"), "target_opset_version": "21", "between_ops": "Conv,Relu"}
    more = [f"--{one.name}={values[one.name]}" for one in tool.arguments if one.name in values]
    needed = [one.name for one in tool.arguments if repr(one.default).startswith("<object")]
    more += [f"--{one}=x:[1]" for one in needed if one not in values]
    reads = [inputs["model.onnx"], inputs["weights.bin"]]
    reads += [inputs["0.npy"]] if any(one.name == "data_path" for one in tool.arguments) else []
    for path in reads:
        for flag in ([], ["--overwrite"]):
            try:
                code = run_tool(tool, ["--input", str(inputs["model.onnx"]), "--output", str(path), *more, *flag])
            except SystemExit as stop:  # an argument that this test knows nothing about
                pytest.fail(f"{name}: usage ({stop.code}): {capsys.readouterr().err}")
            assert code == 1 and "error: " in capsys.readouterr().err, path.name
    assert run_tool(tool, ["--input", str(inputs["model.onnx"]), "--output", str(inputs["plan.yaml"]), *more]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert state_of(tmp_path) == before


# ---- functions -------------------------------------------------------------------------------------------------------


def quantized(source: Path, output: Path, reader: Any, **options: Any) -> None:
    extra = {"PrintSummary": False, **options}
    config = QConfig(QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()), extra_options=extra)
    ModelQuantizer(config).quantize_model(source, output, reader)


def test_functions_replace_results_and_never_inputs(tmp_path: Path) -> None:
    inputs = files(tmp_path)
    proto = onnx.load(inputs["model.onnx"])
    feeds = [models.feeds(proto)]
    before = state_of(tmp_path)
    model, passes = inputs["model.onnx"], {"passes": ["remove_input_init"]}
    (tmp_path / "p.yaml").write_text(f"passes: [remove_input_init]\npreprocessed_model_path: {model}\n")
    before = state_of(tmp_path)
    attempts = {
        "model": lambda: quantized(model, model, feeds),
        "weights": lambda: quantized(model, inputs["weights.bin"], feeds),
        "resume": lambda: quantized(model, tmp_path / "q.onnx", feeds, SaveAndRestore=str(model)),
        "preprocessed": lambda: quantized(model, tmp_path / "q.onnx", feeds, PreprocessYAML=str(tmp_path / "p.yaml")),
        "passes": lambda: transform(model, passes, model),
        "passes, weights": lambda: transform(model, passes, inputs["weights.bin"]),
        "passes, yaml": lambda: transform(model, tmp_path / "p.yaml", tmp_path / "p.yaml"),
    }
    for name, attempt in attempts.items():
        with pytest.raises((ModelError, ValueError)):
            attempt()
        assert state_of(tmp_path) == before, name
    (tmp_path / "theirs.onnx").write_bytes(b"of another tool")
    quantized(model, tmp_path / "theirs.onnx", feeds)
    quantized(model, tmp_path / "theirs.onnx", feeds)
    assert (tmp_path / "theirs.onnx").stat().st_size > 1000


# ---- writers ---------------------------------------------------------------------------------------------------------

#: Calls that write, move or remove files; ``open`` counts with a mode that writes.
WRITERS = {
    *("write_text", "write_bytes", "write_arrays", "save_file", "tofile", "mkstemp"),
    *("TemporaryFile", "NamedTemporaryFile"),
    *(
        "TemporaryDirectory",
        "mkdtemp",
        "makedirs",
        "mkdir",
        "rename",
        "renames",
        "unlink",
        "rmdir",
        "rmtree",
        "copyfile",
    ),
    *("copy2", "copytree", "symlink", "link", "touch", "truncate", "memmap", "savez", "savez_compressed", "GGUFWriter"),
    *("symlink_to", "hardlink_to", "chmod", "removedirs"),
}
METHODS = {"write_text", "write_bytes", "rename", "unlink", "mkdir", "rmdir", "touch", "link", "chmod", "truncate"}
MODULES_OF_FILES = {"os": ("replace", "remove", "open"), "shutil": ("move", "copy"), "ir": ("save",)}
MODULES_OF_FILES |= {"onnx": ("save", "save_model"), "np": ("save",), "torch": ("save",)}
#: Where they may be, outside of ``quark.files``, and why.
PRIVATE = "in a temporary folder of its own"
DRAFT = "on a draft or in a folder that the gate gave"
OWN = "in the folder of an unfinished job, under a name that nothing else has"
ALLOWED = {
    "quark.numerics.array_files": "a memory map to read from",
    "quark.onnx.algorithms.mixprecision": PRIVATE,
    "quark.onnx.algorithms.samples": "files of random names in TmpDir or cache_dir",
    "quark.onnx.injected": PRIVATE,
    "quark.onnx.layer_runs": PRIVATE,
    "quark.onnx.scratch": "the folder for intermediate files",
    "quark.onnx.search": PRIVATE,
    "quark.onnx.workers": PRIVATE,
    "quark.onnx.graph.model": DRAFT,
    "quark.onnx.graph.wire": DRAFT,
    "quark.search.knapsack": "os.devnull, where the solver's own lines go",
    "quark.demo.__main__": "makes the folder of its results",
    "quark.torch.auto": PRIVATE,
    "quark.torch.layer_runs": PRIVATE,
    "quark.torch.one_pass": PRIVATE,
    "quark.torch.export.card": DRAFT,
    "quark.torch.export.genai": DRAFT,
    "quark.torch.export.gguf_in_transformers": PRIVATE,
    "quark.torch.export.gguf_model": DRAFT,
    "quark.torch.export.model_files": DRAFT,
    "quark.torch.export.modelopt": DRAFT,
    "quark.torch.export.onnx_model": DRAFT,
    "quark.torch.export.shards": DRAFT,
    "quark.torch.files.headers": "a writer of GGUF without a file",
    "quark.torch.files.prequantized": DRAFT,
    "quark.torch.files.quantize": OWN,
    "quark.torch.files.target": OWN,
    "quark.torch.files.tuned": OWN,
}


def writes(tree: ast.AST) -> Iterator[str]:
    """The calls in a module that write."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = (
            node.func.value.id if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) else ""
        )
        modes = [arg.value for arg in (*node.args, *(k.value for k in node.keywords)) if isinstance(arg, ast.Constant)]
        opened = name == "open" and any(
            isinstance(mode, str) and set(mode) & set("wax+") and len(mode) < 4 for mode in modes
        )
        if isinstance(node.func, ast.Name) and name in METHODS:
            continue
        if name in WRITERS or name in MODULES_OF_FILES.get(owner, ()) or opened:
            yield f"{owner}.{name}" if owner else name


def test_writers_are_found_in_code() -> None:
    code = "open(p, 'w'); open(p); p.open('ab'); p.open('rb'); os.replace(a, b); s.replace(a, b); p.write_text(t)"
    code += "; np.save(p, x)"
    assert list(writes(ast.parse(code))) == ["open", "p.open", "os.replace", "p.write_text", "np.save"]


def test_everything_that_writes_is_behind_the_gate() -> None:
    found = {name: set(writes(tree)) for name, tree in modules().items()}
    writing = {name: calls for name, calls in found.items() if calls and not name.startswith("quark.files")}
    assert {name: calls for name, calls in writing.items() if name not in ALLOWED} == {}
    assert set(ALLOWED) <= set(writing), "an entry of ALLOWED writes nothing any more"


# ---- what has no option of its own -----------------------------------------------------------------------------------


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A model, arrays, a picture, and files of a user under the names that commands write beside their outputs."""
    from PIL import Image

    files(tmp_path)
    (tmp_path / "pictures").mkdir()
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "pictures" / "0.png")
    for name in ("preprocess.yaml", "best.recipe.yaml"):
        (tmp_path / name).write_text(f"# {MARK}\npreset: A8W8\n")  # as one that we have written
    return tmp_path


BESIDE: dict[str, list[str]] = {
    "onnx quantize": ["-o", "q.onnx", "--data", "pictures", "--config", "preprocess.yaml"],
    "onnx quantize, plan": ["-o", "q.onnx", "--data", "pictures", "--plan", "preprocess.yaml"],
    "auto, ledger": ["-o", "best.onnx", "--data", "data.npy", "--ledger", "best.recipe.yaml"],
    "auto, report": ["-o", "best.onnx", "--data", "data.npy", "--report", "best.recipe.yaml"],
    "auto, folder": ["-o", "best", "--data", "data.npy", "--report", "best.recipe.yaml"],
}


@pytest.mark.parametrize("case", BESIDE)
@pytest.mark.parametrize("flag", [[], ["--overwrite"]], ids=["", "overwrite"])
def test_what_lies_beside_an_output_is_an_output(
    case: str, flag: list[str], given: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recipes and ``preprocess.yaml``: no input and no other output, before any work."""
    monkeypatch.chdir(given)
    before = state_of(given)
    name, model = case.partition(",")[0], "llama" if case.endswith("folder") else "model.onnx"
    assert main([*name.split(), model, *BESIDE[case], *flag]) == 1
    said = capsys.readouterr().err
    assert ("are one file" in said or "give another path" in said) and state_of(given) == before, said


def test_commands_make_outputs_of_options_alone() -> None:
    """What has no option is named in ``quark.cli.beside``, where the gate sees it before the work."""
    others = set()
    for name, tree in modules().items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and name.startswith("quark.cli")]
        outputs = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "Output"]
        texts = [ast.literal_eval(one.args[1]) for one in outputs if isinstance(one.args[-1], ast.Constant)]
        if len(texts) < len(outputs) or not all(text.startswith("--") for text in texts):
            others.add(name)
    assert others == {"quark.cli.beside", "quark.cli.output", "quark.cli.paths"}  # the second writes what it is given


def readings() -> Iterator[tuple[str, str]]:
    """(command, option) of everything that is read."""
    for name, command in COMMANDS.items():
        for option, mark in marks_of(inspect.unwrap(command.callback)).items():
            if isinstance(mark, Reads):
                yield name, option


@pytest.mark.skipif(os.name == "nt", reason="links and names of POSIX")
@pytest.mark.parametrize(("name", "option"), list(readings()), ids=lambda value: str(value))
def test_inputs_that_the_system_does_not_open_are_refused_in_a_sentence(
    name: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names that are too long, links in a circle, a file that is taken for a folder, a character of no name."""
    files(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    before = state_of(tmp_path)
    mark = marks_of(inspect.unwrap(COMMANDS[name].callback))[option]
    ending = ":f" if isinstance(mark, Reads) and mark.function else ""
    for odd in ("a" * 300, "a/" * 3000, "loop", "loop/x", "plan.yaml/x", "a\0b", "\udcff"):
        path = f"{tmp_path / odd}{'.py' if ending else ''}{ending}"
        assert main(typed(name, tmp_path, {}, {option: path})) in (1, 2), odd
        said = capsys.readouterr().err
        assert "Traceback" not in said and len(said) < 2000 and state_of(tmp_path) == before, said


@pytest.mark.skipif(os.name == "nt", reason="links and names of POSIX")
@pytest.mark.parametrize(("name", "option"), list(cases()), ids=lambda value: str(value))
def test_outputs_that_the_system_does_not_take_are_refused_in_a_sentence(
    name: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also folders with a name that leaves no room for the longer one of unfinished work beside them."""
    files(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    before = state_of(tmp_path)
    long = ["a" * 250] if marks_of(inspect.unwrap(COMMANDS[name].callback))[option].kind == "folder" else []
    for odd in ("a" * 256, "é" * 128, "a/" * 3000, "loop", "loop/x", *long):
        assert main(typed(name, tmp_path, {option: tmp_path / odd})) == 1, odd
        said = capsys.readouterr().err
        told = f"error: --{option.replace('_', '-')} ", "error: the recipe ", "error: the file "  # of ours, beside it
        assert said.startswith(told), said
        assert state_of(tmp_path) == before
        assert "cannot be written" in said and "Traceback" not in said and len(said) < 9000, said


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
@pytest.mark.parametrize(("name", "option"), list(cases()), ids=lambda value: str(value))
def test_names_that_libraries_cannot_open_are_refused_before_the_work(
    name: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files(tmp_path)
    before = state_of(tmp_path)
    for odd in ("\udcff.json", "\udcff", "\udcff/new.json"):
        assert main(typed(name, tmp_path, {option: tmp_path / odd})) == 1
        said = capsys.readouterr().err
        assert "error: " in said and "Traceback" not in said and state_of(tmp_path) == before, said
        assert "is no UTF-8 text" in said or "/" in odd, said
