"""Which options of a command are paths that it reads or writes; looked at before any command begins.

    report: Annotated[Path | None, Writes(), typer.Option("--report")]

``Guarded`` is the class of every command that has paths. It refuses outputs that are inputs, other outputs, devices, or
somebody's files (``quark.files.outputs``), before the command does anything. An option of the type ``Path`` that says
neither ``Reads`` nor ``Writes`` is a defect, which a test finds.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from quark.algorithms.names import parted
from quark.cli.words import Typed
from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.files.atomic import check_name
from quark.files.outputs import Input, Output, check_outputs

FOLDER = "folder"
LIKE_MODEL = "like the model"
#: For the parameter ``overwrite`` of commands; ``Guarded`` looks at it, commands need not.
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Overwrite existing files that are not results of this program.")
]


@dataclass(frozen=True)
class Reads:
    """The option names files that the command reads.

    Attributes:
        function: it is ``FILE.py:FUNCTION``.
    """

    function: bool = False


@dataclass(frozen=True)
class Writes:
    """The option names a file, or a new folder, that the command writes.

    Attributes:
        kind: as of ``quark.files.outputs.Output``; "folder" is checked where the folder is made. ``LIKE_MODEL``:
            a folder where the model is one, the file of a model otherwise.
        folder: the folder of the file is made where it is missing.
        beside: of everything that was typed, what is written beside the file without an option of its own.
    """

    kind: str = "text"
    folder: bool = False
    beside: Callable[[Mapping[str, Any]], Iterable[Output]] = lambda given: ()


class Guarded(Typed, TyperCommand):
    """A command whose outputs pass the gate before it begins."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse empty paths: ``Path("")`` is the current folder, and nobody who types nothing means that.

        Raises:
            ConfigError: one is.
        """
        marks = {} if self.callback is None else marks_of(inspect.unwrap(self.callback))
        typed = self.make_parser(ctx).parse_args(list(args))[0] if "" in args else {}
        for one in (one for one in self.params if one.name in marks):
            given = typed.get(str(one.name))
            if "" in (given if isinstance(given, (list, tuple)) else [given]):
                told = next((word for word in one.opts if word.startswith("--")), one.metavar or str(one.name).upper())
                raise ConfigError(f"{told} is empty: give a path")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Check, then run."""
        if self.callback is not None:
            guard(inspect.unwrap(self.callback), ctx.params)
        return super().invoke(ctx)


def guard(command: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise where what was typed for ``command`` would write over something.

    Raises:
        ConfigError: the system does not open an input: a name that is too long, links in a circle, a folder that
            may not be looked into.
        OutputError: as ``check_outputs``.
    """
    marks = marks_of(command)
    for name, mark in marks.items():
        if isinstance(mark, Writes) and given.get(name) is not None:
            (_check_folder if _is_folder(mark, given) else check_name)(Path(given[name]), _option(name))
    for name, path in _read(marks, given):
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):  # what reads it says so; some are names of ours, not of files
            continue
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{_option(name)} {str(path)[:80]!r} cannot be read: {reason}") from error
    check_outputs(outputs_of(marks, given), inputs_of(marks, given), bool(given.get("overwrite")))


def marks_of(command: Callable[..., Any]) -> dict[str, Reads | Writes]:
    """The options that are paths, by the names of the command's parameters."""
    found = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        for mark in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
            if isinstance(mark, Reads | Writes):
                found[name] = mark
    return found


def outputs_of(marks: Mapping[str, Reads | Writes], given: Mapping[str, Any]) -> Iterator[Output]:
    """The files that are to be written."""
    for name, mark in marks.items():
        if not isinstance(mark, Writes) or given.get(name) is None:
            continue
        yield from mark.beside(given)
        if not _is_folder(mark, given):
            kind = "model" if mark.kind == LIKE_MODEL else mark.kind
            yield Output(Path(given[name]), _option(name), kind, mark.folder)


def _check_folder(path: Path, name: str) -> None:
    from quark.files.folder import check_place

    check_place(path, name)


def _is_folder(mark: Writes, given: Mapping[str, Any]) -> bool:
    """Whether a folder is written."""
    return mark.kind == FOLDER or (mark.kind == LIKE_MODEL and os.path.isdir(given["model"]))


def inputs_of(marks: Mapping[str, Reads | Writes], given: Mapping[str, Any]) -> Iterator[Input]:
    """The files and folders that are read."""
    for name, path in _read(marks, given):
        if path.suffix == ".onnx" and path.is_file():
            yield from _of_model(path, _option(name))
        elif path.exists():
            yield f"the input {_option(name)}", path


def _read(marks: Mapping[str, Reads | Writes], given: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """(parameter, path) of what is typed for inputs; a metric of ours is a name without a file."""
    for name, mark in marks.items():
        if isinstance(mark, Reads) and given.get(name) is not None:
            texts = map(str, given[name] if isinstance(given[name], (list, tuple)) else [given[name]])
            parts = (parted(text)[0] if mark.function else text for text in texts)
            yield from ((name, Path(one)) for one in parts if one)


def _of_model(path: Path, name: str) -> Iterator[Input]:
    from quark.onnx.graph.model import inputs_of_model

    return inputs_of_model(path, f"the input {name}")


def _option(name: str) -> str:
    """How a parameter is called on the command line."""
    return {"model": "MODEL", "quantized": "QUANTIZED_MODEL"}.get(name, f"--{name.replace('_', '-')}")
