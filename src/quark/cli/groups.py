"""Groups of commands. One that lacks a command says which other group has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.core import TyperGroup

from quark.cli.words import Typed


class CommandGroup(Typed, TyperGroup):
    """As typer's, and ``quark quantize`` is answered with ``quark onnx quantize`` and ``quark torch quantize``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that the first word names, its name and the other words."""
        root = ctx.find_root()
        found = [] if args[0] in self.commands else list(paths(root.command, args[0], root.info_name))
        if found:
            ctx.fail(f"No such command {args[0]!r} here. It is: {' or '.join(found)}")
        return super().resolve_command(ctx, args)


def paths(group: Any, name: str, way: str) -> Iterator[str]:
    """How to call every command of this name, below a group that is called ``way``."""
    for word, command in getattr(group, "commands", {}).items():
        if word == name:
            yield f"{way} {word}"
        yield from paths(command, name, f"{way} {word}")


#: Settings of every group that can stand at the root of a command line.
ROOT: dict[str, Any] = {
    "cls": CommandGroup,
    "no_args_is_help": True,
    "rich_markup_mode": "markdown",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
