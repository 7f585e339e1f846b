"""Isolated groups: cheap operators between float ones, where codes would cost accuracy and win nothing.

    pow → [quantizer] add → [quantizer] sqrt

A group of connected operators without a layer or product, all of whose inputs come from float operators and all of
whose results go to float operators, saves no bytes and reaches no integer kernel (``quark.onnx.qdq.isolated`` is the
same of ONNX). One that touches an input or output of the graph stays quantized.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch.fx import GraphModule, Node

from quark.torch.graph.calls import is_real
from quark.torch.graph.operators import is_cheap, is_operator, passes

REASON = "it stands between float operators: codes would cost accuracy and reach no integer kernel"


def isolated_nodes(model: GraphModule, floats: Container[Node]) -> Iterator[Node]:
    """The nodes of isolated groups.

    Args:
        model: a lifted graph.
        floats: what stays float for other reasons.
    """
    left = dict.fromkeys(node for node in model.graph.nodes if node not in floats and _is_member(node))
    members = set(left)
    while left:
        group = _connected(next(iter(left)), members)
        for node in group:
            left.pop(node, None)
        if all(is_cheap(node) or passes(node) for node in group):
            yield from group


def _is_member(node: Node) -> bool:
    """Whether a node is quantized, moves values, or is an end of the graph."""
    ends = node.op in ("call_module", "placeholder", "output")
    return ends or (is_real(node) and (is_operator(node) or passes(node)))


def _connected(node: Node, members: set[Node]) -> set[Node]:
    """The node and all members that tensors of real numbers link to it."""
    group, open_ends = {node}, [node]
    while open_ends:
        one = open_ends.pop()
        near = [other for other in one.all_input_nodes if is_real(other)] + (list(one.users) if is_real(one) else [])
        for other in near:
            if other in members and other not in group:
                group.add(other)
                open_ends.append(other)
    return group
