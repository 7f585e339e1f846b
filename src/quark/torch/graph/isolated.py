"""Isolated groups: cheap operators between float ones, where codes would cost accuracy and win nothing.

    pow → [quantizer] add → [quantizer] sqrt

A group of connected operators without a layer or product, all of whose inputs come from float operators and all of
whose results go to float operators, saves no bytes and reaches no integer kernel (``quark.onnx.qdq.isolated`` is the
same of ONNX). One that touches an input or output of the graph stays quantized.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch.fx import GraphModule, Node

from quark.graphs import connected
from quark.torch.graph.calls import is_real
from quark.torch.graph.operators import is_cheap, is_operator, passes

REASON = "it stands between float operators: codes would cost accuracy and reach no integer kernel"


def isolated_nodes(model: GraphModule, floats: Container[Node]) -> Iterator[Node]:
    """The nodes of isolated groups.

    Args:
        model: a lifted graph.
        floats: what stays float for other reasons.
    """
    members = [node for node in model.graph.nodes if node not in floats and _is_member(node)]
    for group in connected(members, _neighbours):
        if all(is_cheap(node) or passes(node) for node in group):
            yield from group


def _is_member(node: Node) -> bool:
    """Whether a node is quantized, moves values, or is an end of the graph."""
    ends = node.op in ("call_module", "placeholder", "output")
    return ends or (is_real(node) and (is_operator(node) or passes(node)))


def _neighbours(node: Node) -> Iterator[Node]:
    """The nodes that tensors of real numbers link to it."""
    yield from filter(is_real, node.all_input_nodes)
    yield from node.users if is_real(node) else ()
