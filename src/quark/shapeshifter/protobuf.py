"""A pass over protobuf models as a row of the registry, whose passes work on ``onnx_ir`` graphs in place.

The model goes to a protobuf with all its weights and back, so such a pass costs twice the memory of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.onnx.graph.model import to_proto
from quark.onnx.graph.report import PassReport
from quark.onnx.passes.row import Pass

Edit = Callable[[onnx.ModelProto, dict[str, Any]], onnx.ModelProto]


@dataclass(frozen=True)
class Open(Pass):
    """A pass that takes any parameter, and checks its own."""

    def arguments(self, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """The parameters as one mapping; ``None`` where the pass is switched off."""
        given = dict(given or {})
        return None if given.pop(self.name, True) is False else {"config": given}


def row_of(name: str, edit: Edit, doc: str) -> Open:
    """The row of a pass that edits a protobuf."""

    def run(model: ir.Model, config: dict[str, Any]) -> PassReport:
        before = to_proto(model)
        kept = before.SerializeToString(deterministic=True)
        made = edit(before, config)
        if not isinstance(made, onnx.ModelProto):
            raise ConfigError(f"the pass {name!r} returned {type(made).__name__}, not a ModelProto")
        if made.SerializeToString(deterministic=True) == kept:
            return PassReport(name, 0)
        changed = ir.from_proto(made)
        model.graph = changed.graph
        model.functions.clear()
        model.functions.update(changed.functions)
        model.ir_version = changed.ir_version
        return PassReport(name, 1)

    return Open(name, doc, run)
