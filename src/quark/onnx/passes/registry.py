"""The registry of graph passes: those of the package, in the order of their table, and those that the user adds.

Shapeshifter, the flow, the command line and the documentation read it. Names may be written with the prefix ``onnx_``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from quark.errors import ConfigError, check_name, unknown
from quark.ir.surgery import name_new
from quark.ir.walk import all_nodes
from quark.onnx.graph.report import PassReport
from quark.onnx.passes.row import Pass, Run
from quark.onnx.passes.table import TABLE

PREFIX = "onnx_"
_OWN: dict[str, Pass] = {}


def register_pass(name: str, run: Run, doc: str = "", shapes: bool = False) -> Pass:
    """Add a pass of your own, for the rest of the process.

    Args:
        name: how configurations name it; not a name that is taken.
        run: ``run(model, …) -> PassReport``: edits an ``onnx_ir.Model`` in place.
        doc: one sentence; the first line of the docstring of ``run`` by default.
        shapes: infer shapes before it runs.

    Raises:
        ConfigError: the name is taken, or ``run`` is no such function.
    """
    if not callable(run) or not inspect.signature(run).parameters:
        raise ConfigError(f"the pass {name!r} must be a function whose first argument is the model")
    return add(Pass(without_prefix(name), doc or (inspect.getdoc(run) or "").split("\n")[0], run, shapes))


def add(row: Pass) -> Pass:
    """Add a row of your own, for the rest of the process.

    Raises:
        ConfigError: its name is taken.
    """
    if row.name in passes():
        raise ConfigError(f"there is a pass {row.name!r} already: give yours another name")
    _OWN[row.name] = row
    return row


def unregister_pass(name: str) -> None:
    """Take a pass of your own out again.

    Raises:
        ConfigError: it is not one that :func:`register_pass` added.
    """
    if _OWN.pop(without_prefix(name), None) is None:
        raise ConfigError(unknown("pass of your own", name, _OWN))


def passes() -> dict[str, Pass]:
    """Every pass by name: the package's in the order of their table, then the user's."""
    return {**{row.name: row for row in TABLE}, **_OWN}


def get_pass(name: str) -> Pass:
    """The pass of a name, with or without the prefix ``onnx_``.

    Raises:
        ConfigError: there is none; the message shows the nearest name.
    """
    known, plain = passes(), without_prefix(name)
    check_name("pass", plain, known)
    return known[plain]


def without_prefix(name: str) -> str:
    """The name as the registry has it."""
    return name.removeprefix(PREFIX)


def apply(model: ir.Model, row: Pass, arguments: Mapping[str, Any]) -> PassReport:
    """Run one pass with parsed arguments; a row with ``shapes`` needs them inferred before.

    Raises:
        ConfigError: the function returned something else than a report.
    """
    old = set(all_nodes(model))
    report = row.run(model, **arguments)
    if not isinstance(report, PassReport):
        raise ConfigError(f"the pass {row.name!r} returned {type(report).__name__}, not a PassReport")
    if report.fired:
        name_new(model, old)
    return PassReport(row.name, report.fired, report.refused)
