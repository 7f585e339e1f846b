"""Files that may come from strangers, opened with care: regular files only, bounded, every failure one sentence.

Readers of single formats build on this: each names the exceptions that its format's parser raises, and says them in
words. Nothing here, or there, catches everything: what is left is a defect of ours and shows itself.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from quark.errors import ModelError, QuarkError, printable

LARGEST_TEXT = 2**28
"""Bytes of a text file that is read whole: 256 MiB. The largest index of a published checkpoint has 60 MB."""
DAMAGED_TEXT = (ValueError, RecursionError, MemoryError, OverflowError)
"""What parsers of text raise: wrong syntax or numbers of too many digits, nesting, more than memory holds."""


def regular_file(path: str | os.PathLike[str], kind: type[QuarkError], what: str = "the file") -> int:
    """The size of a regular file in bytes. A pipe would wait for ever, a device has no end: neither is opened.

    Raises:
        kind: there is no such file, or it is a folder, a pipe, a device or a socket.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError as error:
        raise kind(f"{what} {str(path)!r} does not exist") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise kind(f"{what} {str(path)!r} cannot be read: {reason_of(error)}") from error
    if not stat.S_ISREG(found.st_mode):
        named = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, a device or a socket"
        raise kind(f"{what} {str(path)!r} is {named}: a regular file is needed")
    return found.st_size


def read_text(
    path: str | os.PathLike[str], kind: type[QuarkError], what: str = "the file", limit: int = LARGEST_TEXT
) -> str:
    """The text of a UTF-8 file.

    Raises:
        kind: it is missing, no regular file, larger than ``limit`` bytes, not readable or not UTF-8.
    """
    size = regular_file(path, kind, what)
    if size > limit:
        raise kind(f"{what} {str(path)!r} has {size} bytes; at most {limit} are read")
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise kind(f"{what} {str(path)!r} is not UTF-8 text: byte {error.start} does not fit") from error
    except OSError as error:
        raise kind(f"{what} {str(path)!r} cannot be read: {reason_of(error)}") from error


def parse_json(text: str, source: str, kind: type[QuarkError]) -> Any:
    """The value of a JSON text.

    Args:
        source: how the message calls the text, such as the quoted path.

    Raises:
        kind: it is not JSON, nested too deeply, has a number of thousands of digits, or gives a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except DAMAGED_TEXT as error:
        raise kind(f"{source} is not JSON that can be read: {reason_of(error)}") from error


def read_json(
    path: str | os.PathLike[str], kind: type[QuarkError], what: str = "the file", limit: int = LARGEST_TEXT
) -> Any:
    """The value in a JSON file; see ``read_text`` and ``parse_json``."""
    return parse_json(read_text(path, kind, what, limit), f"{what} {str(path)!r}", kind)


def reason_of(error: BaseException) -> str:
    """The reason of an exception on one line of at most 300 characters; its type where it has no words."""
    words = " ".join(str(getattr(error, "strerror", None) or error).split())
    if isinstance(error, RecursionError):
        words = "it is nested too deeply"
    if isinstance(error, MemoryError):
        words = "it needs more memory than there is"
    words = printable(words)
    return (words if len(words) <= 300 else f"{words[:299]}…") or type(error).__name__


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; Python's own reader keeps the last of two values under one key and says nothing."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r:.80} is given twice")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The JSON file of a model, with an object in it.

    Raises:
        ModelError: not there, not JSON, or not an object.
    """
    data = read_json(path, ModelError)
    if not isinstance(data, dict):
        raise ModelError(f"{str(path)!r} must hold an object, and holds a {type(data).__name__}")
    return data
