"""In-place operators become functional ones, so that a quantizer can stand between any two nodes; no-ops go.

``y = relu_(x)`` writes into x: whoever reads x afterwards reads y. Not handled: writing into a tensor of which a view
is read afterwards, which is an error; torch's own decompositions rewrite it (``trace``).
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from quark.errors import ModelError
from quark.torch.graph.calls import arguments, first, operator, overload_of

VIEWS = frozenset((
    "view", "reshape", "flatten", "unflatten", "permute", "transpose", "t", "squeeze", "unsqueeze", "slice",
    "select", "expand", "contiguous", "detach", "alias", "chunk", "split", "split_with_sizes", "getitem",
    "narrow", "unbind", "movedim",
))  # fmt: skip
WITHOUT = "give the graph without it: torch.export.export(model, args).run_decompositions({}).module()"
NOTHING = frozenset(("dropout", "feature_dropout", "alpha_dropout"))


def make_functional(graph: Graph) -> None:
    """Rewrite ``graph``: no guards, no dropout, nothing written in place.

    Raises:
        ModelError: an in-place operator that cannot be rewritten, ``vmap``, or a model traced in training mode.
    """
    for node in list(graph.nodes):
        name = operator(node)
        if getattr(node.target, "__module__", "").startswith("torch._functorch"):
            raise ModelError(f"the graph holds vmap ({node.name}) as calls that are no operators; {WITHOUT}")
        if node.op == "call_module" and str(node.target).startswith("_guards_fn"):
            graph.erase_node(node)
        elif name.removesuffix("_") in NOTHING:
            if arguments(node)["train"]:
                raise ModelError("the graph was exported in training mode (dropout is on); export model.eval()")
            replace_by_first(graph, node)
        elif node.target is torch.ops.aten.view.default:  # torch proves it for the strides that it saw while tracing
            node.target = torch.ops.aten.reshape.default
        elif name.endswith("_") and not name.startswith("_") and overload_of(node)._schema.is_mutable:
            out_of_place(graph, node, name)
    graph.eliminate_dead_code()


def replace_by_first(graph: Graph, node: Node) -> None:
    """Readers of a no-op read its input."""
    node.replace_all_uses_with(first(node))
    graph.erase_node(node)


def out_of_place(graph: Graph, node: Node, name: str) -> None:
    """Exchange an in-place operator for its functional form, and let later readers of its input read its result."""
    packet = getattr(torch.ops.aten, name[:-1], None)
    overload = getattr(packet, overload_of(node)._overloadname, None)
    if overload is None:
        raise ModelError(
            f"{node.name} writes in place, and {node.target} has no form that returns a new tensor; {WITHOUT}"
        )
    written = first(node)
    later = set()
    following = node.next
    while following.op != "root":
        later.add(following)
        following = following.next
    check_views(written, later, node)
    with graph.inserting_after(node):
        made = graph.call_function(overload, node.args, node.kwargs)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    written.replace_all_uses_with(made, delete_user_cb=lambda user: user in later)
    graph.erase_node(node)


def base_of(node: Node) -> Node:
    """The tensor whose memory ``node`` shows."""
    while operator(node) in VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def check_views(written: Node, later: set[Node], node: Node) -> None:
    """Nobody reads other views of what is written."""
    base = base_of(written)
    same = [other for other in node.graph.nodes if other is not written and base_of(other) is base]
    read = [user.name for other in same for user in other.users if user in later]
    if read:
        raise ModelError(f"{node.name} writes in place into a tensor of which {read[0]} reads a view; {WITHOUT}")
