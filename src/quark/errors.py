"""The errors a user can meet, and the sentence they share.

Every message names the thing (field, file, tensor, node), the value that was given, what is allowed, and the nearest
match when there is one. All of them are ``ValueError`` so that code written for another tool keeps catching them.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

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
