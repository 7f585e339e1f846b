"""The documents of the interface beside the repository, read as data: options, fields, tables and blocks of code.

Pages are named by their number. Nothing of their text is kept in the repository; where the folder is absent, what needs
it is skipped and the facts in ``tests.seeds.options`` and ``tests.seeds.rows`` stand for themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / ".." / "shared" / "seeds"
PRESENT = FOLDER.is_dir()
needed = pytest.mark.skipif(not PRESENT, reason="no folder 'shared' beside the repository")
PAGES = ("000", "001", "002", "003", "004")
OPTION = re.compile(r"(?:^|(?<=\.))([A-Za-z0-9_]+): ?\(((?:[^()]|\([^()]*\))*)\)")
FIRST_OPTION = "PreprocessYAML"
#: The words of a type, in the order in which they are looked for, and the kind that they mean.
KINDS = {
    "List of tuples": "pairs",
    "List of Strings": "strings",
    "List of str": "strings",
    "Dictionary": "dictionary",
    "dict": "dictionary",
    "Dict": "dictionary",
    "List": "list",
    "Boolean": "bool",
    "Bool": "bool",
    "bool": "bool",
    "String": "string",
    "str": "string",
    "Int": "int",
    "int": "int",
    "Float": "float",
    "DataReader": "reader",
}


@cache
def lines(page: str) -> list[str]:
    """The lines of a page; line n is element n - 1."""
    return next(FOLDER.glob(f"{page}_*.txt")).read_text(encoding="utf-8").split("\n")


@dataclass(frozen=True)
class Option:
    """What the text says of one option."""

    name: str
    line: int
    types: str
    text: str

    @property
    def kind(self) -> str:
        """The kind of its values; ``?`` behind it: or None."""
        kind = next((kind for words, kind in KINDS.items() if words in self.types), self.types)
        return kind + ("?" if "None" in self.types else "")

    @property
    def default(self) -> str:
        """What it says of the default, as little as is unambiguous: the word behind "default is"."""
        text = self.text.translate({ord("‘"): "'", ord("’"): "'", ord("“"): '"', ord("”"): '"'})
        said = re.search(
            r"[Dd]efault(?:s to|(?: value| setting)? is|:)\s*(?:an empty dict ?\(?)?\s*"
            r"(an empty list|\[[^\]]*\]|\{\}|'[^']*'|\"[^\"]*\"|[A-Za-z0-9.]*[A-Za-z0-9])",
            text,
        )
        return said[1].strip("'\"").replace("an empty list", "[]") if said else ""


def options() -> list[Option]:
    """All options and their fields, in the order of the page; a line that continues one belongs to it."""
    found: list[Option] = []
    for number, line in enumerate(lines("004"), 1):
        matches = list(OPTION.finditer(line))
        if not found and not (matches and matches[0][1] == FIRST_OPTION):
            continue
        if found and (not matches or matches[0].start()):
            end = matches[0].start() if matches else len(line)
            last = found[-1]
            found[-1] = Option(last.name, last.line, last.types, f"{last.text} {line[:end]}")
        for place, match in enumerate(matches):
            end = matches[place + 1].start() if place + 1 < len(matches) else len(line)
            found.append(Option(match[1], number, match[2], line[match.end() : end]))
    return found


def block(page: str, first: str, last: str, start: int = 1) -> tuple[int, str]:
    """The lines from the one that begins with ``first`` to the next that begins with ``last``, and where they begin."""
    every = lines(page)
    begin = next(n for n in range(start - 1, len(every)) if every[n].strip().startswith(first))
    end = next(n for n in range(begin, len(every)) if every[n].strip().startswith(last))
    return begin + 1, "\n".join(every[begin : end + 1])


def indented(code: str) -> str:
    """Code whose lines carry one space too many."""
    kept = code.split("\n")
    return "\n".join(line[1:] if (len(line) - len(line.lstrip(" "))) % 4 == 1 else line for line in kept)


def uncommented(code: str) -> str:
    """Code that the text has in comments."""
    return "\n".join(re.sub(r"^# ?", "", line) for line in code.split("\n"))
