"""The help of ``quark onnx transform`` ends with the list of graph passes."""

from __future__ import annotations

import inspect
from typing import Any

from quark.cli.paths import Guarded


class WithPasses(Guarded):
    """A command whose help ends with the list of passes, which is read only when the help is shown."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The help of the command and the list of passes."""
        self.epilog = f"{self.epilog or ''}\n\n**Passes**\n\n{list_of_passes()}"
        super().format_help(ctx, formatter)


def list_of_passes() -> str:
    """One paragraph a pass: name, parameters with defaults, sentence."""
    from quark.onnx.passes.registry import passes

    lines = []
    for row in passes().values():
        parameters = ", ".join(describe(one.name, one.default) for one in row.parameters.values())
        lines.append(f"`{row.name}`{f' ({parameters})' if parameters else ''}: {row.doc}")
    return "\n\n".join(lines)


def describe(name: str, default: Any) -> str:
    """A parameter and its default."""
    return name if default is inspect.Parameter.empty else f"{name}={default!r}"
