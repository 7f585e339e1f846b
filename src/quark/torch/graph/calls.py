"""Reading the nodes of an exported graph: names of operators, arguments, tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node


def operator(node: Node) -> str:
    """``relu`` for ``aten.relu.default``, ``getitem`` for that of Python; "" where a node calls neither."""
    if node.op != "call_function":
        return ""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).removeprefix("aten::")
    return "getitem" if getattr(node.target, "__name__", "") == "getitem" else ""


def overload_of(node: Node) -> OpOverload:
    """The operator that a node calls."""
    if not isinstance(node.target, OpOverload):
        raise TypeError(f"{node.name} calls {node.target}, which is not an operator of torch")
    return node.target


def first(node: Node) -> Node:
    """The node that makes the first argument of another."""
    found = node.args[0]
    if not isinstance(found, Node):
        raise TypeError(f"{node.name} reads {found!r} first, which no node makes")
    return found


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operator by the names of its schema, defaults too."""
    schema = overload_of(node)._schema.arguments
    values = {item.name: item.default_value for item in schema if item.has_default_value()}
    positional = {item.name: value for item, value in zip(schema, node.args, strict=False)}
    return {**values, **positional, **node.kwargs}


def is_real(node: Node) -> bool:
    """Whether a node makes one tensor of real numbers with at least one axis."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0


def tensor_of(model: GraphModule, node: Any) -> torch.Tensor | None:
    """The parameter, buffer or constant that a node reads; None for other nodes."""
    if not (isinstance(node, Node) and node.op == "get_attr"):
        return None
    value: Any = model
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, torch.Tensor) else None


def path_of(node: Node) -> str:
    """The module in whose ``forward`` a node was made; "" for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""
