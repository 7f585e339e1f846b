"""HardSigmoid as the device computes it: x / 6 is x * 2731 / 2**14 (ConvertHardSigmoidToDPUVersion).

    HardSigmoid(alpha 1/6, beta 1/2)   becomes   the same, times (2731 / 2**14) / (1/6) = 1.0001220703125

Other slopes have no table on the device and stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import float_attribute
from quark.onnx.passes.dpu_factor import correct

ALPHA, BETA = 1 / 6, 0.5
FACTOR = 2731 / 2**14 * 6
_TOLERANCE = 1e-6
#: alpha of ONNX where the attribute is absent.
_ONNX_ALPHA = 0.2


def is_sixth(node: ir.Node) -> bool:
    """Whether a HardSigmoid is the one that the device has."""
    alpha, beta = float_attribute(node, "alpha", _ONNX_ALPHA), float_attribute(node, "beta", BETA)
    return abs(alpha - ALPHA) < _TOLERANCE and abs(beta - BETA) < _TOLERANCE


def run(model: ir.Model, wanted: Callable[[ir.Node], bool]) -> PassReport:
    """Rewrite the wanted nodes of ``model`` in place."""

    def look(node: ir.Node) -> float | str:
        return FACTOR if is_sixth(node) else "the device has alpha 1/6 and beta 1/2 only"

    return correct(model, "dpu_hard_sigmoid", ("HardSigmoid",), wanted, look)
