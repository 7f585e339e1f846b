"""What most graph passes are: nodes that are looked at one by one, and either rewritten or left, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import Names, label

Found = TypeVar("Found")


def rewrite_each(
    model: ir.Model,
    name: str,
    nodes: Iterable[ir.Node],
    look: Callable[[ir.Node], Found | str | None],
    rewrite: Callable[[ir.Node, Found, Names], object],
) -> PassReport:
    """Rewrite the nodes where there is something to rewrite, in place.

    Args:
        model: what the nodes are of.
        name: of the pass.
        nodes: those that are looked at, each when it is its turn.
        look: what is found at a node; None where it is nothing of the kind; or the reason why it stays.
        rewrite: is given the node, what was found there, and the names in use; False: nothing changed after all.
    """
    fired, refused, names = 0, [], None
    for node in nodes:
        found = look(node)
        if isinstance(found, str):
            refused.append(f"{label(node)} stays: {found}")
        elif found is not None:
            names = names or Names(model)
            fired += rewrite(node, found, names) is not False
    return PassReport(name, fired, tuple(refused))


def adopt(model: ir.Model, other: ir.Model) -> None:
    """Let ``model`` be what ``other`` is."""
    model.graph = other.graph
    model.functions.clear()
    model.functions.update(other.functions)


def insert_behind(graph: ir.Graph, value: ir.Value, nodes: ir.Node | Sequence[ir.Node]) -> None:
    """Put nodes behind the one that makes ``value``; to the beginning where none does."""
    maker = value.producer()
    if maker is not None:
        graph.insert_after(maker, nodes)
    elif len(graph):
        graph.insert_before(graph[0], nodes)


def put_behind(old: ir.Value, nodes: Sequence[ir.Node], name: str) -> None:
    """Let everybody but ``nodes`` read what the last of them makes of ``old``, under its name, type and shape.

    ``old``, which a node makes, is called ``name`` then.
    """
    new, maker = nodes[-1].outputs[0], old.producer()
    if maker is None or maker.graph is None:
        raise ValueError(f"no node makes {old.name!r}")
    maker.graph.insert_after(maker, nodes)
    readers = [use for use in old.uses() if use.node in nodes]
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    for use in readers:
        use.node.replace_input_with(use.idx, old)
    new.type, new.shape = old.type, old.shape
    old.name, new.name = name, old.name
