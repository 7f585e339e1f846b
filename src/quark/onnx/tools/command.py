"""What every tool shares: its arguments, reading and writing the model, telling what was done, exit codes.

A tool is a value: a name, a sentence, arguments, and a function. Those that are a graph pass (:func:`over_pass`) take
the parameters of the pass. Every tool takes its files by position (``tool in.onnx out.onnx``) or by flag, under each
name that tools of this interface use: ``--input_model``, ``--input_model_path`` or ``--input``; the output likewise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quark.dataclass import dataclass
from quark.errors import QuarkError, check_name

MODEL_FLAGS = ("model", "model_path")
REQUIRED = object()


def boolean(text: str) -> bool:
    """True or False from what people type."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return words[text.lower()]


def names(text: str) -> list[str]:
    """``a;b`` or ``a,b``, or a JSON list."""
    if text.lstrip().startswith("["):
        return [str(one) for one in json.loads(text)]
    return [one.strip() for one in text.replace(",", ";").split(";") if one.strip()]


def subgraphs(text: str) -> list[tuple[list[str], list[str]]]:
    """``start,start:end;start:end``, or a JSON list of ``[[start, …], [end, …]]``."""
    if text.lstrip().startswith("["):
        found = [(list(start), list(end)) for start, end in json.loads(text)]
    else:
        sides = [part.split(":") for part in text.split(";") if part.strip()]
        if any(len(pair) != 2 for pair in sides):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form start,start:end;start:end")
        found = [(names(start), names(end)) for start, end in sides]
    return found


def pairs(text: str) -> list[tuple[str, str]]:
    """``Conv,Relu;Add,Relu``."""
    found = [tuple(part.strip() for part in pair.split(",")) for pair in text.split(";") if pair.strip()]
    if any(len(pair) != 2 for pair in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form A,B;C,D")
    return [(pair[0], pair[1]) for pair in found]


@dataclass(frozen=True)
class Argument:
    """One argument besides the files. A boolean without a value is true.

    Attributes:
        parameter: the parameter of the pass that takes it, where that has another name.
        accepted: scripts may give it, and it changes nothing: what it asks for is what the tool does.
    """

    name: str
    doc: str
    kind: Callable[[str], Any] = str
    default: Any = REQUIRED
    parameter: str = ""
    accepted: bool = False


@dataclass(frozen=True)
class Tool:
    """One tool.

    Attributes:
        file: its module's file, which is called as it is.
        about: the docstring of the module, which begins with what it does.
        run: gets the parsed arguments; returns what to print.
        arguments: besides the files.
        files: what it reads and writes, as "input" and "output".
        order: positional arguments in order; the files by default.
        output_flags: more names of the output file's flag.
        writes: what the output is, "model" or "text".
    """

    file: str
    about: str | None
    run: Callable[[argparse.Namespace], str | None]
    arguments: tuple[Argument, ...] = ()
    files: tuple[str, ...] = ("input", "output")
    order: tuple[str, ...] = ()
    output_flags: tuple[str, ...] = ()
    writes: str = "model"

    @property
    def name(self) -> str:
        """How it is called."""
        return Path(self.file).stem

    @property
    def doc(self) -> str:
        """What it does, in one sentence."""
        return " ".join((self.about or "").partition("\n\n")[0].split())

    @property
    def positions(self) -> tuple[str, ...]:
        """Names of the arguments that may be given by position."""
        return self.order or self.files


def parser_of(tool: Tool) -> argparse.ArgumentParser:
    """The command line of a tool."""
    made = argparse.ArgumentParser(
        prog=f"python -m quark.onnx.tools.{tool.name}",
        description=tool.doc,
        epilog="Exit codes: 0 done, 1 the model cannot be converted, 2 wrong usage.",
        allow_abbrev=False,
    )
    made.add_argument("positional", nargs="*", metavar="VALUE", help=f"by position: {' '.join(tool.positions)}")
    for file in tool.files:
        flags = [f"--{file}_{end}" for end in MODEL_FLAGS] + [f"--{file}"]
        flags += [f"--{flag}" for flag in tool.output_flags if file == "output"]
        made.add_argument(*flags, dest=file, help=f"the {file} file")
    for one in tool.arguments:
        shown = one.doc if one.default is REQUIRED else f"{one.doc} Default: {one.default}."
        extra: dict[str, Any] = {"nargs": "?", "const": True} if one.kind is boolean else {}
        made.add_argument(f"--{one.name}", type=one.kind, dest=one.name, help=shown.replace("%", "%%"), **extra)
    if "output" in tool.files:
        made.add_argument("--overwrite", action="store_true", help="replace a file that is not a result of a tool")
        made.add_argument("--save_as_external_data", "--external_data", type=boolean, nargs="?", const=True)
    return made


def parse(tool: Tool, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments by name; positional ones fill what no flag has given, in order."""
    made = parser_of(tool)
    given = made.parse_args(arguments)
    kinds = {one.name: one.kind for one in tool.arguments}
    free = [name for name in tool.positions if getattr(given, name, None) is None]
    if len(given.positional) > len(free):
        made.error(f"too many values: {given.positional}; by position it takes {' '.join(tool.positions)}")
    for name, text in zip(free, given.positional, strict=False):
        try:
            setattr(given, name, kinds.get(name, str)(text))
        except (ValueError, argparse.ArgumentTypeError) as error:
            made.error(f"{name}: {error}")
    for one in tool.arguments:
        if getattr(given, one.name) is None and one.default is not REQUIRED:
            setattr(given, one.name, one.default)
    missing = [name for name in (*tool.files, *kinds) if getattr(given, name) is None and _needed(tool, name)]
    if missing:
        made.error(f"{', '.join(missing)} is missing")
    return given


def _needed(tool: Tool, name: str) -> bool:
    return name in tool.files or any(one.name == name and one.default is REQUIRED for one in tool.arguments)


def main(tool: Tool, arguments: Sequence[str] | None = None) -> int:
    """Run a tool; an error of the user's input is one sentence on standard error."""
    given = parse(tool, arguments)
    try:
        _check_files(tool, given)
        told = tool.run(given)
    except QuarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if told:
        print(told)
    return 0


def _check_files(tool: Tool, given: argparse.Namespace) -> None:
    """Raise before an input, which may be the only copy, or somebody's file is written over."""
    from quark.files.outputs import Output, check_outputs
    from quark.onnx.graph.model import inputs_of_model

    if "output" not in tool.files:
        return
    named = [(name, value) for name, value in vars(given).items() if name not in ("output", "input")]
    inputs = [(f"the file of {name}", Path(value)) for name, value in named if isinstance(value, str) and value]
    source = inputs_of_model(given.input, "the input file") if "input" in tool.files else ()
    output = Output(Path(given.output), kind=tool.writes, folder=tool.writes == "text")
    check_outputs([output], (*source, *inputs), bool(given.overwrite))


def over_pass(
    file: str,
    about: str | None,
    pass_name: str = "",
    fixed: dict[str, Any] | None = None,
    arguments: tuple[Argument, ...] = (),
    order: tuple[str, ...] = (),
) -> Tool:
    """A tool that applies one graph pass to a file.

    Args:
        file, about: as of ``Tool``.
        pass_name: empty: the pass is called like the tool.
        fixed: parameters of the pass that the tool sets.
        arguments: parameters of the pass that its user sets; the names are those of the pass.
        order: positional arguments, where the files are not all.
    """

    def run(given: argparse.Namespace) -> str:
        values = {one.parameter or one.name: getattr(given, one.name) for one in arguments if not one.accepted}
        chosen = {key: value for key, value in values.items() if value is not None}
        return apply_pass(pass_name or Path(file).stem, {**(fixed or {}), **chosen}, given)

    return Tool(file, about, run, arguments, order=order)


def apply_pass(name: str, parameters: dict[str, Any], given: argparse.Namespace, opset: int | None = None) -> str:
    """Read, lift to ``opset`` where one is given, apply a pass, write; what it did, in words."""
    from quark.onnx.graph import model as files
    from quark.onnx.passes.registry import get_pass
    from quark.onnx.shapeshifter import run_passes

    row, lifting = get_pass(name), get_pass("convert_opset_version")
    model = files.load(given.input)
    first = () if opset is None else ((lifting, {"target_opset_version": opset}),)
    report = run_passes(model, (*first, (row, row.arguments(parameters) or {})))[-1]
    files.save(model, Path(given.output), bool(given.save_as_external_data))
    lines = [f"{name}: {report.fired} changes", *(f"  {reason}" for reason in report.refused)]
    return "\n".join([*lines, f"written: {given.output}"])


def random_quantize(given: argparse.Namespace, preset: str, options: dict[str, Any], source: Any = None) -> str:
    """Quantize a file under a preset on generated data: for trying things out, not for results."""
    from quark.onnx import Config, ModelQuantizer, get_default_config

    config = get_default_config(preset)
    excluded, external = options.pop("exclude", []), options.pop("external", False)
    config.nodes_to_exclude = [*config.nodes_to_exclude, *excluded]
    config.subgraphs_to_exclude = [*config.subgraphs_to_exclude, *options.pop("subgraphs", [])]
    config.use_external_data_format = bool(external)
    config.extra_options.update({"UseRandomData": True, "PrintSummary": False, **options})
    ModelQuantizer(Config(config)).quantize_model(given.input if source is None else source, given.output)
    return f"quantized under {preset} on generated data; written: {given.output}"


def run_as_program(tool: Tool) -> None:
    """The end of every tool's file."""
    sys.exit(main(tool))


def find(name: str) -> Tool:
    """The tool of a name.

    Raises:
        ConfigError: there is none.
    """
    from importlib import import_module

    from quark.onnx.tools.names import TOOLS

    check_name("tool", name, TOOLS)
    found: Tool = import_module(f"quark.onnx.tools.{name}").TOOL
    return found
