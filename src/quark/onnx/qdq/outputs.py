"""Graph outputs that stay float.

Quantizing the last result of a network costs accuracy (logits lose resolution, values beyond the calibrated range are
clipped) and wins nothing where the operator can write float from integer operands (Gemm, MatMul) or is cheap. A
convolution keeps its quantized output: without it the runtime has no integer kernel for it. NPU flows, and flows that
force every operator (``ForceQuantizeNoInputCheck``), keep the pairs that their compilers look for.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan
from quark.onnx.qdq.op_rules import OP_RULES

#: Operators whose integer kernels write integers only, or whose result is moved on as it is.
_KEEPS = frozenset(["Conv", "ConvTranspose", "Concat", "MaxPool", "Relu", "Clip", "LeakyRelu", "PRelu", "Split"])


def leave_float(model: ir.Model, plan: Plan, job: Job) -> None:
    """Take the outputs that may stay float out of the plan, with the layout operators that only move them."""
    forced = job.options.ForceQuantizeNoInputCheck and job.target != "cpu"
    if job.power_of_two or forced or job.options.EnableVaimlBF16:
        return
    for output in model.graph.outputs:
        for value in _movable(output):
            plan.tensors.pop(value.name or "", None)


def _movable(output: ir.Value) -> list[ir.Value]:
    """The output and the tensors it is moved from, back to what computes it; empty where that keeps its Q/DQ."""
    chain, value = [output], output
    while (producer := value.producer()) is not None:
        if producer.op_type in _KEEPS or producer.op_type not in OP_RULES or value is not producer.outputs[0]:
            return []
        if OP_RULES[producer.op_type].output != "same":
            return chain
        source = producer.inputs[0]
        if source is None or len(source.uses()) != 1 or source.is_graph_output():
            return []
        value = source
        chain.append(value)
    return []
