"""Isolated groups: a few cheap operators between float ones, where codes would cost accuracy and time and win nothing.

    Pow → [Q/DQ] ReduceMean [Q/DQ] → Transpose [Q/DQ] → GRU

A group of connected quantized nodes without a sum of products, all of whose inputs come from float nodes and all of
whose results go to float nodes, saves no bytes and reaches no integer kernel: every runtime converts to codes and back
around it. Left in float it is exact. A group that touches an input or an output of the graph stays quantized, since
whoever feeds or reads the model may hold codes.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from quark.graphs import connected
from quark.ir.surgery import is_constant
from quark.onnx.qdq import slots
from quark.onnx.qdq.op_rules import OP_RULES

REASON = "it stands between float operators: codes would cost accuracy and reach no integer kernel"


def isolated_nodes(chosen: Iterable[ir.Node]) -> set[ir.Node]:
    """Those of the nodes that are to be quantized which form isolated groups."""
    groups = connected(chosen, _neighbours)
    return {node for group in groups if all(_cheap(one) and _inland(one) for one in group) for node in group}


def _neighbours(node: ir.Node) -> list[ir.Node]:
    producers = [value.producer() for value in node.inputs if value is not None and slots.is_float(value)]
    readers = [use.node for value in node.outputs if slots.is_float(value) for use in value.uses()]
    return [other for other in [*producers, *readers] if other is not None]


def _cheap(node: ir.Node) -> bool:
    rule = OP_RULES.get(node.op_type)
    return rule is not None and rule.weight is None


def _inland(node: ir.Node) -> bool:
    """Whether neither an input nor an output of the graph (nor another graph) is reached from the node."""
    inputs = [value for value in node.inputs if value is not None and slots.is_float(value) and not is_constant(value)]
    fed = bool(inputs) and all(value.producer() is not None for value in inputs)
    outputs = [value for value in node.outputs if slots.is_float(value)]
    return fed and bool(outputs) and all(value.uses() and not value.is_graph_output() for value in outputs)
