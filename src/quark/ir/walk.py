"""Every node, and every graph, of a model: those that an If, a Loop, a Scan or the like holds included, in order.

What passes begin with: a quantization walks a hundred times through its graph. ``onnx_ir`` has the same walks, which
ask each node through five calls what it holds and take three times as long.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

_GRAPH, _GRAPHS = ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS


def bodies(node: ir.Node) -> list[ir.Graph]:
    """The graphs that an If, a Loop, a Scan or the like holds; empty for other nodes."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.data.values():
        kind = attribute.type
        if kind is _GRAPH:
            found.append(attribute.as_graph())
        elif kind is _GRAPHS:
            found += attribute.as_graphs()
    return found


def nodes_within(graph: ir.Graph | ir.Function | ir.GraphView) -> Iterator[ir.Node]:
    """The nodes of a graph, each before those of the graphs that it holds."""
    for node in graph:
        yield node
        for body in bodies(node):
            yield from nodes_within(body)


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Every node, those of subgraphs and model-local functions included."""
    yield from nodes_within(model.graph)
    for function in model.functions.values():
        yield from nodes_within(function)


def graphs_of(whole: ir.Model | ir.Graph) -> Iterator[ir.Graph]:
    """The main graph and every graph in it, each before those that its nodes hold."""
    graph = whole.graph if isinstance(whole, ir.Model) else whole
    yield graph
    yield from dict.fromkeys(_inside(graph))


def _inside(graph: ir.Graph) -> Iterator[ir.Graph]:
    for node in graph:
        for body in bodies(node):
            yield body
            yield from _inside(body)
