"""Files of the user's on the command line.

    --extension FILE.py        registers formats, calibration methods, algorithms and schemes; runs before the command
                               does, in worker processes too: its names are then names like any other
    --algorithm FILE.py:NAME   one function becomes a registered algorithm, under its name

A file of ``--extension`` runs once a process.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import quark
from quark import parallel
from quark.algorithms.names import parted
from quark.algorithms.own import OWN
from quark.errors import ConfigError, QuarkError, lines_of, said
from quark.search.function import digest_of, load_function, run_file

OPTION = "--extension"
_RUN: set[Path] = set()
"""The files of ``--extension`` that ran in this process."""
_TYPED: list[str] = []
"""Those of the command that runs, as they were typed."""
_LOADED: dict[str, tuple[Path, str]] = {}
"""Algorithms of ``--algorithm``: name -> the file, and what tells its content from another."""


@contextmanager
def extended(words: Sequence[str]) -> Iterator[list[str]]:
    """The words of a command line without the option, which may stand anywhere, while its files are those of a command.

    Raises:
        ConfigError: no such file, or what it raised, with its line, now or while the command runs.
    """
    rest, files = _parted(words)
    run_extensions(files)
    _TYPED[:] = files
    try:
        with parallel.before_calls(run_extensions, [str(Path(file).resolve()) for file in files]):
            yield rest
    except QuarkError:
        raise
    except Exception as error:
        for file in {name for name, _ in lines_of(error)}.intersection(files):
            raise said(f"{OPTION} {file!r}", error, file) from error
        raise
    finally:
        _TYPED.clear()


def _parted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    rest, files, given = list[str](), list[str](), iter(words)
    for word in given:
        name, equals, value = word.partition("=")
        if name != OPTION:
            rest.append(word)
            continue
        file = value if equals else next(given, "")
        if not file or file.startswith("-"):
            raise ConfigError(f"{OPTION} takes a Python file, such as {OPTION} mine.py")
        files.append(file)
    return rest, files


def run_extensions(files: Sequence[str]) -> None:
    """Run the files that have not run in this process; what they print is no output of the command."""
    for file in files:
        if Path(file).resolve() not in _RUN:
            with redirect_stdout(sys.stderr):
                run_file(file, OPTION)
            _RUN.add(Path(file).resolve())


def command_line(words: Sequence[str]) -> str:
    """A command as people type it, with the files of the one that runs."""
    return shlex.join([*words, *(word for file in _TYPED for word in (OPTION, file))])


def with_own(texts: Sequence[str]) -> tuple[str, ...]:
    """The algorithms by name alone; functions in files are registered, unless they are already.

    Args:
        texts: ``gptq``, ``mine.py:descend``; settings behind one more colon stay there.

    Raises:
        ConfigError: no such file or function, the function is none that ``register_algorithm`` takes, or its name is
            taken.
    """
    return tuple(_registered(*parted(text)) for text in texts)


def _registered(file: str, rest: str) -> str:
    name = rest.partition(":")[0]
    if not file:
        return rest
    typed, path = f"{file}:{name}", Path(file).resolve()
    if name in OWN and path.is_file() and _LOADED.get(name) == (path, digest_of(typed)):
        return rest
    function = load_function(typed, "--algorithm")
    if name in OWN and _LOADED.get(name, ("", ""))[0] == path:  # the file has changed
        quark.unregister_algorithm(name)
    quark.register_algorithm(name, function)
    _LOADED[name] = path, digest_of(typed)
    return rest
