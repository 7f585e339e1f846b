"""A second type for some readers of a tensor: an Identity before them, whose output is quantized on its own.

The Identity keeps the two tensors apart in the Plan and in the graph while decisions are made, ranges found and weights
tuned. It is taken out when the graph is written: one DequantizeLinear then feeds the next QuantizeLinear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from quark.config.plan import NodePlan, Plan
from quark.ir.surgery import bypass, name_of
from quark.onnx.graph.rewriting import insert_behind
from quark.onnx.qdq.biases import adders_of

REASON = "it marks a change of type and is not in the written graph"


def insert(model: ir.Model, plan: Plan, value: ir.Value, name: str, readers: Sequence[ir.Node]) -> ir.Value:
    """Let ``readers`` read a copy of ``value`` called ``name``; what the Plan knows of them follows.

    Returns:
        The copy; its own decision is for the caller to make.
    """
    copy = ir.Value(name=name, shape=value.shape, type=value.type)
    node = ir.node("Identity", [value], outputs=[copy], name=name)
    insert_behind(model.graph, value, node)
    plan.nodes[name] = NodePlan(name, "Identity", True, REASON)
    hand_over(plan, value, copy, readers)
    return copy


def hand_over(plan: Plan, value: ir.Value, copy: ir.Value, readers: Sequence[ir.Node]) -> None:
    """Let nodes read ``copy`` instead of ``value``; their biases take its scale."""
    for reader in readers:
        for position, operand in enumerate(reader.inputs):
            if operand is value:
                reader.replace_input_with(position, copy)
    names, source = {adder.name for reader in readers for adder in adders_of(reader)}, name_of(value)
    for bias in plan.of_role("bias"):
        if bias.bias_of is not None and source in bias.bias_of and names & (bias.readers or frozenset()):
            scales = tuple(name_of(copy) if name == source else name for name in bias.bias_of)
            plan.put(replace(bias, bias_of=(scales[0], scales[1])))


def drop(model: ir.Model, plan: Plan) -> None:
    """Take the Identity nodes out of the graph."""
    names = {name for name, node in plan.nodes.items() if node.reason == REASON}
    for node in [node for node in model.graph if node.name in names and node.op_type == "Identity"] if names else ():
        if node.inputs[0] is not None:
            bypass(node, node.inputs[0])
