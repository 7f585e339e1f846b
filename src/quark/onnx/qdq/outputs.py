"""Graph outputs that stay float, what an order is read of, and inputs of layers that compute in float altogether.

Quantizing the last result of a network costs accuracy (logits lose resolution, values beyond the calibrated range are
clipped) and wins nothing where the operator can write float from integer operands (Gemm, MatMul) or is cheap. A
convolution keeps its quantized output: without it the runtime has no integer kernel for it. NPU flows, and flows that
force every operator (``ForceQuantizeNoInputCheck``), keep the pairs that their compilers look for, unless
``FloatOutputs`` is set: a Softmax over 1,000 classes has next to no codes left on its scale from 0 to 1.

What TopK, ArgMax and ArgMin read is like an output: codes make equal what differed, and then the first is chosen, which
changes all that is taken by the index (the three largest of 32 features, one-hot: 17.7 dB, and 42.9 of float values).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan
from quark.ir.surgery import name_of
from quark.onnx.qdq.op_rules import OP_RULES

#: Operators whose integer kernels write integers only, or whose result is moved on as it is.
_KEEPS = frozenset(["Conv", "ConvTranspose", "Concat", "MaxPool", "Relu", "Clip", "LeakyRelu", "PRelu", "Split"])

#: Operators of whose results places are read, which are those of the largest or smallest values.
_ORDERS = frozenset(["TopK", "ArgMax", "ArgMin"])


def leave_float(model: ir.Model, plan: Plan, job: Job) -> None:
    """Take the outputs that may stay float out of the plan, with the layout operators that only move them."""
    options, usual = job.options, _is_usual(job)
    if not (usual if options.FloatOutputs is None else options.FloatOutputs):
        return
    reason = (
        "the last result keeps its resolution outside NPU flows"
        if usual
        else "FloatOutputs: the last result keeps its resolution"
    )
    for output in model.graph.outputs:
        for value in _movable(output):
            plan.leave(name_of(value), reason)


def _is_usual(job: Job) -> bool:
    """Whether no compiler looks for pairs of Q and DQ everywhere."""
    forced = job.options.ForceQuantizeNoInputCheck and job.target != "cpu"
    return not (job.power_of_two or forced or job.options.EnableVaimlBF16)


def leave_ordered(model: ir.Model, plan: Plan, job: Job) -> None:
    """Let what reads an order read float values, where what computes them can write these."""
    for node in model.graph if _is_usual(job) else ():
        value = node.inputs[0] if node.op_type in _ORDERS and not node.domain else None
        tensor = None if value is None else plan.tensors.get(name_of(value))
        if value is None or tensor is None:
            continue
        others = frozenset(name_of(use.node) for use in value.uses() if use.node.op_type not in _ORDERS)
        chain = _movable(value)
        if chain and others:
            kept = others if tensor.readers is None else tensor.readers & others
            plan.put(replace(tensor, readers=kept))
        for one in () if others else chain:
            plan.leave(name_of(one), f"{node.op_type} reads its order, which codes change")


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


def leave_inputs(model: ir.Model, plan: Plan, names: Collection[str]) -> None:
    """Take the tensors out of the plan that only the nodes called ``names`` read, with the layout operators that only
    move them to there: a layer that is kept in float for its precision wants the values before rounding."""
    for node in (node for node in model.graph if node.name in names) if names else ():
        for value in node.inputs:
            while value is not None and _read_by(value, names):
                plan.leave(name_of(value), "only layers that stay float read it")
                producer = value.producer()
                if producer is None or producer.op_type not in OP_RULES:
                    break
                if OP_RULES[producer.op_type].output != "same" or len(producer.outputs) != 1:
                    break
                names = {*names, name_of(producer)}
                value = producer.inputs[0]


def _read_by(value: ir.Value, names: Collection[str]) -> bool:
    return not value.is_graph_output() and all(name_of(use.node) in names for use in value.uses())
