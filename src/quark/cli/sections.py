"""The help of every command in sections: the options that people use most on top, the rest by what they are about.

One table for all commands, so that an option stands in the same section wherever it is. ``arrange`` is applied to the
finished command line; an option that is in no section is a defect, which a test finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Section -> options, in the order of the help. Those of the first stand on top, in the box that every help has.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Options": ("--output", "--preset", "--scheme", "--data", "--for", "--exclude", "--help"),
    "What is quantized": (
        *("--config", "--algorithm", "--set", "--layout", "--tune-speed", "--layer", "--exclude-only", "--kv-cache"),
        *("--gguf-type", "--plan-from", "--requantize", "--register"),
    ),
    "What is searched": (
        *(
            "--candidate",
            "--metric",
            "--labels",
            "--target",
            "--limit",
            "--budget",
            "--compare",
            "--rounds",
            "--estimate",
            "--drop",
            "--minutes",
        ),
    ),
    "Samples": ("--eval-data", "--samples", "--seq-len", "--batch-size", "--random", "--preprocess", "--strict"),
    "Images": ("--size", "--resize", "--bgr", "--scale", "--mean", "--std"),
    "Checks": ("--check", "--verify", "--fail-under", "--fail-slower"),
    "What is written": (
        *("--format", "--dtype", "--max-shard-size", "--report", "--plan", "--tensors", "--ledger", "--json"),
        *("--overwrite",),
    ),
    "How it runs": (
        *("--device", "--threads", "--backend", "--workers", "--custom-ops", "--trust-remote-code", "--verbose"),
        *("--extension", "--version", "--install-completion", "--show-completion"),
    ),
}
_ORDER = [name for names in SECTIONS.values() for name in names]
_SECTION_OF = {name: section for section, names in SECTIONS.items() for name in names}


def arrange(command: Any) -> Any:
    """The command line with every option in its section; changed in place, and returned."""
    for each in every(command):
        for option in options_of(each):
            option.rich_help_panel = _SECTION_OF.get(option.opts[0])
        each.params.sort(key=_place)
    return command


def every(command: Any) -> Iterator[Any]:
    """A command and all commands below it."""
    yield command
    for below in getattr(command, "commands", {}).values():
        yield from every(below)


def options_of(command: Any) -> list[Any]:
    """The options of a command, without its arguments."""
    return [one for one in command.params if one.param_type_name == "option"]


def _place(parameter: Any) -> int:
    """Arguments first, as they were; then options in the order of the table."""
    name = parameter.opts[0]
    return _ORDER.index(name) if name in _ORDER else -1
