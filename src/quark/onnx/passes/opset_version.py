"""Lift a model to a newer opset (ConvertOpsetVersion): the pass over :mod:`quark.onnx.graph.lift`.

Opsets are never lowered: a model of the wanted opset or a newer one stays as it is.
"""

from __future__ import annotations

from typing import Annotated

import onnx_ir as ir

from quark.onnx.graph.lift import lift
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import opset

Target = Annotated[int, "The wanted version of the default operator set."]


def run(model: ir.Model, target_opset_version: Target) -> PassReport:
    """Lift ``model`` in place.

    Raises:
        ModelError: a node has no equivalent in the new opset.
    """
    before = opset(model)
    if before >= target_opset_version:
        return PassReport("opset_version", refused=(f"the model has opset {before} already",))
    lifted = lift(model, target_opset_version)
    if lifted is not model:
        model.graph = lifted.graph
        model.functions.clear()
        model.functions.update(lifted.functions)
    return PassReport("opset_version", fired=1)
