"""Why the tensors that no decision names stay float: a sentence each, for ``explain``."""

from __future__ import annotations

import onnx_ir as ir

from quark.config.plan import Plan
from quark.ir.surgery import label, name_of
from quark.onnx.qdq import slots


def note_floats(model: ir.Model, plan: Plan) -> None:
    """Give the reason of its nodes to every float tensor that the plan neither quantizes nor has left out."""
    graph = model.graph
    made = [value for node in graph for value in node.outputs]
    for value in (*graph.inputs, *graph.initializers.values(), *made):
        name = name_of(value)
        if name not in plan.tensors and name not in plan.floats and slots.is_float(value):
            plan.floats[name] = _reason(value, plan)


def _reason(value: ir.Value, plan: Plan) -> str:
    producer = value.producer()
    nodes = [*([producer] if producer is not None else []), *(use.node for use in value.uses())]
    for node in nodes:
        decision = plan.nodes.get(name_of(node))
        if decision is not None and not decision.quantized:
            return f"{label(node)} stays float: {decision.reason}"
    return f"no rule quantizes it for {label(nodes[0])}" if nodes else "nothing reads it"
