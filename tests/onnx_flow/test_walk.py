"""Walks through all nodes and graphs of a model meet them in the order in which onnx_ir's do."""

from __future__ import annotations

import onnx_ir as ir

from quark.ir.walk import all_nodes, bodies, graphs_of, nodes_within


def graph(name: str, *nodes: ir.Node) -> ir.Graph:
    return ir.Graph([], [], nodes=nodes, name=name, opset_imports={"": 21})


def node(name: str, *held: ir.Graph, many: tuple[ir.Graph, ...] = ()) -> ir.Node:
    attributes = [ir.AttrInt64("axis", 1), *(ir.AttrGraph(f"g{at}", one) for at, one in enumerate(held))]
    return ir.Node("", "Relu", [], [*attributes, *([ir.AttrGraphs("gs", many)] if many else [])], name=name)


def test_all_nodes_and_graphs_are_met_in_order() -> None:
    deep = graph("deep", node("a"), node("b", graph("empty")))
    first = node("c", deep, graph("two", node("d")), many=(graph("three", node("e")), graph("four", node("f"))))
    model = ir.Model(graph("main", node("g"), first, node("h")), ir_version=10)
    inside = graph("inside", node("i", graph("body", node("j"))))
    function = ir.Function("own", "f", graph=inside, attributes=[])
    model.functions[function.identifier()] = function
    assert [one.name for one in nodes_within(model.graph)] == list("gcabdefh")
    assert list(nodes_within(model.graph)) == list(ir.traversal.RecursiveGraphIterator(model.graph))
    assert [one.name for one in all_nodes(model)] == list("gcabdefhij")
    assert [one.name for one in graphs_of(model)] == ["main", "deep", "empty", "two", "three", "four"]
    assert list(graphs_of(model)) == list(model.graphs())
    assert [one.name for one in bodies(first)] == ["deep", "two", "three", "four"]
