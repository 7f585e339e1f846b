"""LeakyRelu as the device computes it: the slope is a multiple of 1/256 (ConvertLeakyReluToDPUVersion).

alpha becomes round(256 alpha) / 256, ties to even
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import float_attribute

STEPS = 256
#: alpha of ONNX where the attribute is absent.
DEFAULT = 0.01


def run(model: ir.Model, wanted: Callable[[ir.Node], bool]) -> PassReport:
    """Rewrite the wanted nodes of ``model`` in place."""
    fired = 0
    for node in model.graph:
        if node.op_type == "LeakyRelu" and wanted(node):
            alpha = float_attribute(node, "alpha", DEFAULT)
            rounded = round(STEPS * alpha) / STEPS
            fired += rounded != alpha
            node.attributes["alpha"] = ir.AttrFloat32("alpha", rounded)
    return PassReport("dpu_leaky_relu", fired)
