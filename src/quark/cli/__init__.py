"""The command line ``quark``. Exit codes: 0 done, 1 an error of the input (one sentence on standard error), 2 usage."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from quark.errors import QuarkError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; ``arguments`` are those of the process when they are not given.

    ``--verbose`` may stand anywhere: more is told about an error. So may ``--extension FILE.py``: it runs first.

    Returns:
        The exit code. An error that a user's input can cause is one sentence and the page that helps; anything else is
        a defect and shows itself.
    """
    from quark.cli.memory import memory_told
    from quark.cli.once import told_once
    from quark.garbage import rare_collections

    given = list(sys.argv[1:] if arguments is None else arguments)
    verbose = "--verbose" in given and given[:2] != ["onnx", "tool"]
    words_given = [one for one in given if not verbose or one != "--verbose"]
    try:
        with (
            rare_collections(),
            told_once(),
            _alone(words_given),
            _extended(words_given) as words_given,
            memory_told(words_given),
        ):
            command, way, rest = _called(words_given)
            command(args=rest, prog_name=way)
    except QuarkError as error:
        from quark.cli.guidance import flags_of, sentence, typed, words

        said = sentence(error, typed(_commands(), words_given), flags_of(_commands(), words_given))
        print(f"error: {said}", *words(error, verbose, said), sep="\n", file=sys.stderr)
        return 1
    except ImportError as error:
        from quark.cli.doctor import remedy_for

        there = not isinstance(error, ModuleNotFoundError)
        if (remedy := remedy_for(error.name or "", words_given, there)) is None:
            raise
        print(f"error: {remedy}", file=sys.stderr)
        return 1
    except SystemExit as stop:
        if where := _foreign(stop):  # of a function of the user's: the command has not done its work
            print(f"error: {where} ended the command by sys.exit({stop.code!r})", file=sys.stderr)
            return 1
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _foreign(stop: SystemExit) -> str | None:
    """The line that ended the process, where it is none of the command line's; ``quark onnx tool`` has argparse."""
    *_, (frame, line) = traceback.walk_tb(stop.__traceback__)
    code = frame.f_globals.get("__name__", "").partition(".")[0] in ("typer", "argparse", "quark")
    return None if code else f"line {line} of {frame.f_code.co_filename}"


def _extended(words: list[str]) -> AbstractContextManager[list[str]]:
    """The words without those that name files of the user's, which run now."""
    if not any(word.startswith("--extension") for word in words):
        return nullcontext(words)
    from quark.cli.extensions import extended

    return extended(words)


def _called(words: list[str]) -> tuple[Callable[..., Any], str, list[str]]:
    """The commands to look in, how they are called, and the words behind.

    A command of a group needs no options of others: they are a twelfth of what it imports, by time.
    """
    if words[:1] and words[0] in GROUPS and (only := _only(words[0], words[1:2])) is not None:
        return only, f"quark {words[0]}", words[1:]
    return _commands(), "quark", words


#: Group -> where it is.
GROUPS = {"onnx": ("quark.cli.onnx_app", "onnx_app"), "torch": ("quark.cli.torch_app", "torch_app")}


def _only(group: str, names: list[str]) -> Any:
    """A group with one of its commands; None where it has none of this name."""
    from importlib import import_module

    from typer import Typer
    from typer.main import get_command_name, get_group

    from quark.cli.groups import ROOT
    from quark.cli.sections import arrange

    module, name = GROUPS[group]
    whole, part = getattr(import_module(module), name), Typer(**ROOT)
    for row in whole.registered_commands:
        if names == [row.name or get_command_name(row.callback.__name__)]:
            part.registered_commands = [row]
            return arrange(get_group(part))
    return None


@cache
def _commands() -> Any:
    """All commands; their modules are imported now."""
    from typer.main import get_command

    from quark.cli.app import app
    from quark.cli.sections import arrange

    return arrange(get_command(app))


def _alone(words: list[str]) -> AbstractContextManager[None]:
    """What keeps words off standard output where one object has to stand there; ``quark onnx tool`` prints its own."""
    if "--json" not in words or "tool" in words:
        return nullcontext()
    from quark.cli.output import results_alone

    return results_alone()
