"""Sigmoid as the device computes it: a HardSigmoid (ConvertSigmoidToHardSigmoid).

1 / (1 + exp(-x))   becomes   clip(x / 6 + 1/2, 0, 1)
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.passes.dpu_hard_sigmoid import ALPHA, BETA


def run(model: ir.Model, wanted: Callable[[ir.Node], bool]) -> PassReport:
    """Rewrite the wanted nodes of ``model`` in place; they keep their names."""
    fired = 0
    for node in model.graph:
        if node.op_type == "Sigmoid" and node.domain == "" and wanted(node):
            node.op_type = "HardSigmoid"
            node.attributes["alpha"] = ir.AttrFloat32("alpha", ALPHA)
            node.attributes["beta"] = ir.AttrFloat32("beta", BETA)
            fired += 1
    return PassReport("dpu_sigmoid", fired)
