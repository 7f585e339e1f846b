"""A quantized graph as the NPU computes it (onnx_xint8_simulate): the rewrites of ``SimulateDPU`` on a Q/DQ model.

LeakyRelu, Sigmoid, HardSigmoid, AveragePool and ReduceMean; :mod:`quark.onnx.npu.simulate` says what happens to each.
Only nodes that read dequantized values are rewritten, and activation functions that such a node feeds: what computes in
float does not run on the device. A factor comes between a node and the Q behind it; a node that has one stays.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.ir.surgery import constant_array, input_at, sole_consumer
from quark.onnx.graph.quantized import dequantizer
from quark.onnx.graph.report import PassReport
from quark.onnx.npu.positions import CORRECTED, FUSED
from quark.onnx.npu.simulate import SIMULATIONS

#: No correction factor of the device is further from 1.
WIDEST = 0.1


def run(model: ir.Model) -> PassReport:
    """Rewrite the quantized nodes of ``model``, in place."""
    quantized = {node for node in model.graph if _is_quantized(node) and not _is_corrected(node)}
    reports = [row.run(model, quantized.__contains__) for row in SIMULATIONS if row.by_default]
    refused = tuple(reason for report in reports for reason in report.refused)
    return PassReport("xint8_simulate", sum(report.fired for report in reports), refused)


def _is_quantized(node: ir.Node) -> bool:
    data = input_at(node, 0)
    maker = data.producer() if data is not None else None
    if maker is not None and node.op_type in FUSED and dequantizer(data) is None:
        data = input_at(maker, 0)
    return dequantizer(data) is not None


def _is_corrected(node: ir.Node) -> bool:
    follower = sole_consumer(node.outputs[0])
    if node.op_type not in CORRECTED or follower is None or follower.op_type != "Mul":
        return False
    factor = constant_array(input_at(follower, 1))
    return factor is not None and factor.size == 1 and bool(abs(factor - 1) < WIDEST)
