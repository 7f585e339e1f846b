"""Nodes that keep a fault of ONNX Runtime away from a model.

ONNX Runtime (1.31) carries a DequantizeLinear forward over operators that only move values, and writes past the end of
a node's inputs when it arrives at a subgraph that reads the result from outside (``If`` and ``Loop``; the functions of
block formats have an ``If`` inside): the process ends when it loads the file. A ``Max`` of one tensor, a copy that the
runtime neither removes nor looks through, stops it.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.graph.surgery import Names

#: What ONNX Runtime carries a DequantizeLinear over.
MOVERS = frozenset(["MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice"])
#: Functions of these domains may hold an If that reads what they are given.
DOMAINS = ("com.amd.quark", "org.openquark")


def shield(model: ir.Model) -> int:
    """Put a copy before every such reader of what a DequantizeLinear reaches, in place; how many copies."""
    names, made = Names(model), 0
    for node in list(model.graph):
        if not _carries(node):
            continue
        value, moved = node.outputs[0], node.op_type in MOVERS
        inside = [use for use in value.uses() if use.node.domain in DOMAINS or (moved and _is_below(use.node, model))]
        if not inside:
            continue
        name = names.fresh(f"{value.name}_copy")
        copy = ir.Value(name=name, shape=value.shape, type=value.type)
        model.graph.insert_after(node, ir.node("Max", [value], outputs=[copy], name=name))
        for use in inside:
            use.node.replace_input_with(use.idx, copy)
        made += 1
    return made


def _is_below(node: ir.Node, model: ir.Model) -> bool:
    """Whether a node stands in a subgraph."""
    return node.graph is not model.graph


def _carries(node: ir.Node) -> bool:
    """Whether a node is a DequantizeLinear, or a chain of movers leads back to one."""
    while node.op_type in MOVERS and not node.domain:
        source = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        if source is None:
            return False
        node = source
    return node.op_type == "DequantizeLinear" and node.domain in ("", "com.microsoft")
