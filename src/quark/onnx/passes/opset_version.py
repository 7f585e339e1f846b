"""Bring a model to an opset (ConvertOpsetVersion): the pass over :mod:`quark.onnx.graph.lift` and, where all its
operators have the same form in an older one, :mod:`quark.onnx.graph.lower`.
"""

from __future__ import annotations

from typing import Annotated

import onnx_ir as ir

from quark.ir.surgery import opset
from quark.onnx.graph.lift import lift
from quark.onnx.graph.lower import lower
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import adopt

Target = Annotated[int, "The wanted version of the default operator set."]


def run(model: ir.Model, target_opset_version: Target) -> PassReport:
    """Change ``model`` in place.

    Raises:
        ModelError: a node has no equivalent in the wanted opset.
    """
    before = opset(model)
    lower(model, target_opset_version)
    if before == target_opset_version:
        return PassReport("opset_version", refused=(f"the model has opset {before} already",))
    lifted = lift(model, target_opset_version)
    if lifted is not model:
        adopt(model, lifted)
    return PassReport("opset_version", fired=1)
