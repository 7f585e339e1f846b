"""``quark onnx tool``: the tools of :mod:`quark.onnx.tools` as one command."""

from __future__ import annotations

from collections.abc import Sequence

from quark.cli.output import show
from quark.report import Table

EVALUATE = "evaluate"


def run(name: str, arguments: Sequence[str]) -> int:
    """Run one tool; without a name, list them all. Returns the exit code."""
    from quark.onnx.tools.command import find, main

    if name in ("", "--help", "-h"):
        show(listed())
        return 0
    if name == EVALUATE:
        from quark.onnx.tools.evaluate.__main__ import main as evaluate

        return evaluate(arguments)
    return main(find(name), arguments)


def listed() -> Table:
    """Every tool in one line."""
    from quark.onnx.tools.command import find
    from quark.onnx.tools.names import TOOLS

    compares = (EVALUATE, "Compare two folders of results, file by file.")
    rows = tuple(sorted([*((name, find(name).doc) for name in TOOLS), compares]))
    return Table("Tools", ("name", "what it does"), rows, "Also as `python -m quark.onnx.tools.NAME`.")
