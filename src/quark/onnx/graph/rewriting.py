"""What most graph passes are: nodes that are looked at one by one, and either rewritten or left, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import STANDS_FOR, Names, add_initializer, label, substitute
from quark.onnx.graph.report import PassReport

Found = TypeVar("Found")


class NodeWriter:
    """Nodes in the place of one: the layer, by its type, keeps its name, without one the last; what rules say
    of that name holds for the others too."""

    def __init__(self, node: ir.Node, layer: str, names: Names) -> None:
        self.node, self.layer, self.names = node, layer, names
        self.base = node.name or str(node.outputs[0].name)
        self.nodes = list[ir.Node]()

    def add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> ir.Value:
        """One more node behind the others; what it makes. Attributes of ``None`` are left out."""
        kept = {key: value for key, value in (attributes or {}).items() if value is not None}
        return self._write(op_type, inputs, kept, domain)[0]

    def split(self, value: ir.Value, sizes: Sequence[int]) -> list[ir.Value]:
        """Parts of the last axis."""
        where = self.constant(np.array(sizes, np.int64), "sizes")
        return self._write("Split", [value, where], {"axis": -1}, count=len(sizes))

    def _write(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        domain: str = "",
        count: int = 1,
    ) -> list[ir.Value]:
        outputs = [ir.Value(name=self.names.fresh(f"{self.base}_{op_type}")) for _ in range(count)]
        name = self.base if op_type == self.layer else outputs[0].name
        made = ir.node(op_type, inputs, attributes, domain=domain, outputs=outputs, name=name)
        made.meta[STANDS_FOR] = (self.base,)
        self.nodes.append(made)
        return outputs

    def constant(self, array: np.ndarray, name: str) -> ir.Value:
        """An initializer beside the node."""
        graph = self.node.graph
        if not isinstance(graph, ir.Graph):
            raise ValueError(f"{self.base!r} is in no graph")
        return add_initializer(graph, array, self.names.fresh(f"{self.base}_{name}"))

    def stand_for(self, position: int = 0) -> None:
        """Let what was written since the last call make an output of the node."""
        if not self.layer:
            self.nodes[-1].name = self.base
        substitute(self.node.outputs[position], self.nodes)
        self.nodes = []


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
