"""The errors a user can meet, the sentence they share, and the checks of names and types that end in it.

Every message names the thing (field, file, tensor, node), the value that was given, what is allowed, and the nearest
match when there is one. All of them are ``ValueError`` so that code written for another tool keeps catching them.
What the user's own code raises inside of ours becomes one of them (``users_code``).
"""

from __future__ import annotations

import difflib
import math
import os
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

T = TypeVar("T")

OURS = str(Path(__file__).parent)

LONGEST = 1000
"""Letters of a message: a name of a hundred thousand letters, quoted, would hide the sentence around it."""


def printable(text: str) -> str:
    """``text`` for a terminal: what would move the cursor, colour or reorder, as escapes; ends of lines stay.

    Names of nodes, tensors and files may come from strangers.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one == "\n" or one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )


class QuarkError(ValueError):
    """Base of every error that a user's input can cause."""

    def __str__(self) -> str:
        words = printable(super().__str__())
        return words if len(words) <= LONGEST else f"{words[: LONGEST - 300]} … {words[-297:]}"


class ConfigError(QuarkError):
    """A configuration, preset or option that cannot work."""


class ModelError(QuarkError):
    """A model that cannot be read, lifted, quantized or written."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """The model file does not exist."""


class OutputError(ModelError, ConfigError):
    """A file that must not or cannot be written: an input, a device, a folder that takes no files, a full disk.

    It is both other errors too, because what writes models raised the one, and what writes plans the other.
    """


class DataError(QuarkError):
    """Calibration or evaluation data that does not fit the model."""


class NoSamplesError(DataError):
    """Something reads samples, and there are none."""


def known(value: T | None, what: str) -> T:
    """``value``, which must have been found before.

    Raises:
        RuntimeError: it is None, by a defect of ours.
    """
    if value is None:
        raise RuntimeError(f"{what} is not known yet")
    return value


def as_a(cls: type[T], value: object) -> T:
    """``value``, which must be of a class.

    Raises:
        TypeError: it is not, by a defect of ours.
    """
    if not isinstance(value, cls):
        raise TypeError(f"{value!r} is not a {cls.__name__}")
    return value


def nearest(name: str, allowed: Iterable[str]) -> str:
    """``" Did you mean 'X'?"`` for the closest allowed name, or an empty string when nothing is close."""
    lowered = {str(candidate).lower(): str(candidate) for candidate in allowed}
    close = difflib.get_close_matches(str(name).lower(), list(lowered), n=1, cutoff=0.6)
    return f" Did you mean {lowered[close[0]]!r}?" if close else ""


def unknown(kind: str, value: object, allowed: Iterable[str]) -> str:
    """The message for a value outside a closed set: what, which value, the nearest match, what is allowed."""
    names = [str(name) for name in allowed]
    shown = ", ".join(names[:24]) + (f", … ({len(names)} in all)" if len(names) > 24 else "")
    return f"unknown {kind} {value!r}.{nearest(str(value), names)} Allowed: {shown}"


def check_name(kind: str, value: object, allowed: Collection[Any], error: type[QuarkError] = ConfigError) -> None:
    """Raise unless a value is in a closed set, with the nearest match."""
    if value not in allowed:
        raise error(unknown(kind, value, allowed))


def check_names(
    kind: str, values: Iterable[object], allowed: Collection[Any], error: type[QuarkError] = ConfigError
) -> None:
    """The same for each of several values."""
    for value in values:
        check_name(kind, value, allowed, error)


def is_of(value: object, hint: Any, none_is_empty: bool = False) -> bool:
    """Whether a value is of the type of a field: a number, text, list, path or dictionary; others are left to bounds.

    Numbers are finite, and True is none.
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(is_of(value, one, none_is_empty) for one in inner)
    if kind in (int, float):
        number: Any = value if isinstance(value, Integral if kind is int else Real) else math.inf
        return not isinstance(value, bool) and bool(abs(number) <= sys.float_info.max)
    if value is None and none_is_empty and kind in (list, str):
        return True
    if kind in (list, tuple, Sequence):
        each = inner[0] if inner else object
        return isinstance(value, list | tuple) and all(is_of(one, each, none_is_empty) for one in value)
    return isinstance(value, Mapping if kind is dict else kind if kind in PLAIN else object)


def words_of(hint: Any) -> str:
    """What a value of a type is, in words."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return " or ".join(dict.fromkeys(WORDS.get(get_origin(one) or one, str(one)) for one in kinds))


PLAIN = (bool, str, NoneType, os.PathLike, Path)
WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a finite number",
    bool: "True or False",
    str: "text",
    list: "a list, each entry of its type",
    tuple: "a list, each entry of its type",
    Sequence: "a list, each entry of its type",
    dict: "a dictionary",
    os.PathLike: "a path",
    Path: "a path",
    NoneType: "None",
}


# ---- code of the user -----------------------------------------------------------------------------------------------


@contextmanager
def users_code(who: str, file: str = "") -> Iterator[None]:
    """What is raised within the block becomes a ``ConfigError``, whose cause it is; errors of this package stay.

    Args:
        who: whose code runs, in words.
        file: where it is; empty: in the first file on the way down that is none of this package.
    """
    try:
        yield
    except QuarkError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit() would end the command as if all were done
        raise said(who, error, file) from error


def said(who: str, error: BaseException, file: str = "") -> ConfigError:
    """The sentence about what was raised; arguments of ``users_code``."""
    lines = lines_of(error)
    file = file or next((name for name, _ in lines if not name.startswith(OURS)), "")
    inside = [line for name, line in lines if name == file]
    line = error.lineno if isinstance(error, SyntaxError) else inside[-1] if inside else None
    where = "" if line is None else f" in line {line} of {Path(file).name}"
    return ConfigError(f"{who} raised {type(error).__name__}{where}: {error}")


def lines_of(error: BaseException) -> list[tuple[str, int]]:
    """Files and lines on the way down to where it was raised."""
    return [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]


def short_of_memory(error: BaseException) -> bool:
    """Whether a library says by ``error`` that memory is short; most have no class of their own for it."""
    said = str(error).lower()
    signs = ("bad_alloc", "allocate memory", "bfcarena", "out of memory", "not enough memory")
    return isinstance(error, MemoryError) or any(sign in said for sign in signs)
