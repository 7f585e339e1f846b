"""What a script written for AMD Quark should write: the table ``answers.json``, read when a name is first missing.

modules   module → sentence, about all names that it lacks, and about modules below it that are not here.
          ``{"in": [modules], "instead": sentence}``: names that those modules of ours have are theirs.
names     module → {names, apart by spaces → answer}; the answer ``= module.name`` is where the name lives here,
          anything else is a sentence.
"""

from __future__ import annotations

import json
from functools import cache
from pkgutil import get_data
from typing import Any

from quark.dataclass import dataclass


@dataclass(frozen=True)
class NameAnswer:
    """What is known about a name that is not where AMD Quark has it.

    Attributes:
        target: ``module.name`` that is the same here; empty where there is none.
        homes: modules to look into for the name.
        instead: what to write, a sentence.
    """

    target: str = ""
    homes: tuple[str, ...] = ()
    instead: str = ""


@cache
def table() -> dict[str, dict[str, Any]]:
    """The file."""
    found: dict[str, dict[str, Any]] = json.loads(get_data(__package__ or "", "answers.json") or "")
    return found


@cache
def names_of(module: str) -> dict[str, NameAnswer]:
    """The answers about single names of a module."""
    found = {}
    for names, text in table()["names"].get(module, {}).items():
        answer = NameAnswer(target=text[2:]) if text.startswith("= ") else NameAnswer(instead=text)
        found.update(dict.fromkeys(names.split(), answer))
    return found


def module_row(module: str) -> NameAnswer | None:
    """The answer about a module as a whole: its own row, or that of the nearest package above it."""
    rows, name = table()["modules"], module
    while name:
        if name in rows:
            row = rows[name]
            return NameAnswer(instead=row) if isinstance(row, str) else NameAnswer("", tuple(row["in"]), row["instead"])
        name = name.rpartition(".")[0]
    return None


def is_answered(module: str) -> bool:
    """Whether the table says something about names of ``module`` or of modules below it."""
    return module in table()["names"] or module in table()["modules"] or is_above(module)


def is_above(module: str) -> bool:
    """Whether the table says something about modules below ``module``."""
    return module in _packages()


@cache
def _packages() -> frozenset[str]:
    """The packages above all modules of the table."""
    parts = (name.split(".") for rows in table().values() for name in rows)
    return frozenset(".".join(words[:depth]) for words in parts for depth in range(1, len(words)))


def has_aliases(module: str) -> bool:
    """Whether names of ``module`` are somewhere here."""
    row = table()["modules"].get(module)
    return isinstance(row, dict) or any(answer.target for answer in names_of(module).values())


def answer_of(module: str, name: str, here: bool) -> NameAnswer | None:
    """What is known about ``module.name``; ``here``: this package has the module, so its packages say nothing."""
    names = names_of(module)
    if name in names:
        return names[name]
    if name.startswith("_") or (here and module not in table()["modules"]):
        return None
    row = module_row(module)
    for home in row.homes if row else ():
        if name in names_of(home):
            return names_of(home)[name]
    return row
