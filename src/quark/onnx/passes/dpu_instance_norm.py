"""InstanceNormalization as the device's own operator (ConvertInstanceNormToDPUVersion).

    InstanceNormalization   becomes   com.amd.quark::ExtendedInstanceNormalization

The operator comes as a function that every runtime runs; a compiler that has a kernel of its own for it uses that.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import float_attribute

EPSILON = 1e-5


def run(model: ir.Model, wanted: Callable[[ir.Node], bool]) -> PassReport:
    """Rewrite the wanted nodes of ``model`` in place; they keep their names."""
    fired = 0
    for node in model.graph:
        if node.op_type == "InstanceNormalization" and node.domain == "" and wanted(node):
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", float_attribute(node, "epsilon", EPSILON))
            node.op_type, node.domain = "ExtendedInstanceNormalization", "com.amd.quark"
            fired += 1
    return PassReport("dpu_instance_norm", fired)
