"""What of a graph depends on no input of the model and on no layer: its own tensors, and what is computed from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from quark.dataclass import dataclass
from quark.torch.graph.calls import tensor_of


@dataclass(frozen=True)
class FixedTensors:
    """Their values, each computed when it is first asked for.

    Attributes:
        model: whose parameters and buffers the graph reads.
        computed: the operators whose results are fixed, in the order of the graph.
    """

    model: GraphModule
    computed: dict[Node, None]
    _known: dict[Node, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: GraphModule, graph: Graph) -> FixedTensors:
        """Those of a graph over the tensors of ``model``."""
        return cls(model, dict.fromkeys(_computed_alone(graph)))

    def value(self, node: Any) -> torch.Tensor | None:
        """The tensor that a node stands for; None where it depends on an input, or is none."""
        if not isinstance(node, Node):
            return None
        with torch.no_grad():
            found = self._result(node)
        return found if isinstance(found, torch.Tensor) else None

    def _result(self, node: Node) -> Any:
        if node not in self.computed:
            return tensor_of(self.model, node)
        if node not in self._known:
            function: Any = node.target
            arguments, named = map_arg(node.args, self._result), map_arg(node.kwargs, self._result)
            self._known[node] = function(*arguments, **named)
        return self._known[node]


def _computed_alone(graph: Graph) -> Iterator[Node]:
    reached = set[Node]()
    for node in graph.nodes:
        if node.op in ("placeholder", "call_module") or reached.intersection(node.all_input_nodes):
            reached.add(node)  # what a layer makes of numbers alone changes with its weights
        elif node.op == "call_function":
            yield node
