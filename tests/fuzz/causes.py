"""What is fuzzed: causes (a field of a file and a kind of damage), and the judge of what a reader makes of them.

A reader is a function of a folder: it reads the files that a cause has written there, as a user's command does, and
checks its own answer. It may refuse in one sentence or answer right; everything else is a finding.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quark.errors import QuarkError

SECONDS = 10.0
LONGEST = 1200
Damage = Callable[[Path], None]
Read = Callable[[Path], object]


@dataclass(frozen=True)
class Cause:
    """One way in which one field of one kind of file is wrong (or unusual, and right).

    Attributes:
        reader: the kind of file.
        field: what is touched.
        damage: how.
        make: writes the files into an empty folder.
    """

    reader: str
    field: str
    damage: str
    make: Damage

    def __str__(self) -> str:
        return f"{self.reader}: {self.field}: {self.damage}"


class Finding(AssertionError):
    """A reader did something else than refusing in one sentence, or answering right."""


def judge(name: str, make: Damage, read: Read, folder: Path) -> str:
    """What the reader made of a cause: its sentence, or "answered".

    Raises:
        Finding: a foreign exception, no sentence, files left behind, or too long a time.
    """
    make(folder)
    before = files_in(folder)
    start = time.perf_counter()
    try:
        read(folder)
        said = "answered"
    except QuarkError as error:
        said = sentence(name, str(error))
    except Finding as finding:
        raise Finding(f"{name}: {finding}") from finding
    except Exception as error:
        raise Finding(f"{name}: {type(error).__module__}.{type(error).__name__}: {error}") from error
    seconds = time.perf_counter() - start
    if seconds > SECONDS:
        raise Finding(f"{name}: {seconds:.0f} s")
    left = files_in(folder) - before
    if left:
        raise Finding(f"{name}: left behind {sorted(left)[:3]}")
    return said


def sentence(name: str, words: str) -> str:
    """The words, if they are one sentence that a person can read."""
    if not words.strip() or "\n" in words.strip() or len(words) > LONGEST or not words.isprintable():
        raise Finding(f"{name}: no sentence of one line: {words!r:.600}")
    return words


def files_in(folder: Path) -> set[str]:
    """Everything below a folder but results, which have names of their own."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {name for name in found if not name.startswith("result")}
