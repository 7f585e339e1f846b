"""What stays float in a graph though the table knows its operator, and the tensors that operators read as they are.

computed alone     what depends on no input of the model, such as positions. Who reads it beside data may quantize it as
                   an input; weights of layers are lifted before
divisors           what makes a divisor (variance, norm, temperatures of a position): a small one rounded to 0 divides
                   to infinity
angles             what a sine or cosine is taken of: positions times frequencies, which 8 bits step by radians
masks              what carries a mask, from the node that puts it in to the one that makes small numbers of it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from quark.dataclass import dataclass
from quark.numerics.masks import FAR_ABOVE, MASK_VALUE, is_mask
from quark.torch.graph import isolated
from quark.torch.graph.calls import first, is_real, operator
from quark.torch.graph.fixed import FixedTensors
from quark.torch.graph.operators import JOINS, PASSES, source

ALONE = "it is computed from no input of the model"
DIVIDES = "it makes a divisor, which may not be rounded to 0"
MASKED = "it carries a mask, whose large numbers leave the values beside them no resolution"
ANGLE = "a sine or cosine is taken of its result, and a rounded angle is another angle"
_TAKES_ANGLES = frozenset(("sin", "cos", "tan"))
_LEADS_TO_ANGLES = PASSES | JOINS | frozenset(("add", "sub", "rsub", "mul", "div", "neg", "to", "_to_copy"))
_PRODUCTS = frozenset(("matmul", "bmm", "mm", "einsum"))
#: Products over so few numbers are of coordinates, not of features.
_COORDINATES = 4
#: Operator -> the argument that it divides by, or of which it takes the logarithm.
_DIVISORS = {"div": 1, "reciprocal": 0, "rsqrt": 0, "log": 0, "log2": 0, "log10": 0, "logit": 0}
_LOGARITHMS = frozenset(("log", "log2", "log10", "logit"))
#: Operators between a tensor and a divisor made from it: the statistics of a normalization.
_MAKES_DIVISORS = frozenset((
    "abs", "add", "amax", "cat", "clamp", "clamp_max", "clamp_min", "exp", "linalg_vector_norm", "maximum", "mean",
    "mul", "norm", "pow", "sqrt", "square", "sum", "var",
))  # fmt: skip
#: Operators before a logarithm that keep small values: the odds of a probability, log(p / (1 - p)), too.
_MAKES_ODDS = _MAKES_DIVISORS | {"div", "rsub", "sigmoid", "softmax", "sub"}
#: Operators that may put a mask into a tensor: a number that they are given, or a tensor that depends on no input.
_PUTS_IN = frozenset((
    "add", "cat", "constant_pad_nd", "full_like", "masked_fill", "minimum", "mul", "new_full", "pad", "rsub",
    "scatter", "stack", "sub", "where",
))  # fmt: skip
#: Operators whose results are small numbers again.
_ENDS = frozenset(("exp", "hardsigmoid", "scaled_dot_product_attention", "sigmoid", "softmax", "tanh"))
_SIZE_LIMIT = 1 << 24


@dataclass(frozen=True)
class LeftFloat:
    """The decisions of this file.

    Attributes:
        nodes: what is not quantized, and why.
        tensors: values that nobody quantizes.
        divisors: (operator, tensor) that it divides by.
    """

    nodes: Mapping[Node, str]
    tensors: frozenset[Node]
    divisors: frozenset[tuple[Node, Node]]


def float_nodes(model: GraphModule) -> LeftFloat:
    """What of a lifted graph stays float."""
    divisors, fixed = frozenset(_divisors(model)), FixedTensors.of(model, model.graph)
    carriers, readers = _masked(model, fixed)
    angles, tensors = _angles(model)
    nodes = dict.fromkeys(angles, ANGLE) | dict.fromkeys(readers, MASKED)
    logs = {made for reader, made in divisors if operator(reader) in _LOGARITHMS}
    shares = {node for node in model.graph.nodes if operator(node) == "div" and operator(source(first(node))) == "exp"}
    small = shares | _making({made for _, made in divisors}, _MAKES_DIVISORS) | _making(logs, _MAKES_ODDS)
    nodes |= dict.fromkeys(small, DIVIDES)
    nodes |= dict.fromkeys(fixed.computed, ALONE)
    nodes |= dict.fromkeys(isolated.isolated_nodes(model, nodes), isolated.REASON)
    return LeftFloat(nodes, frozenset(carriers | tensors), divisors)


def _divisors(model: GraphModule) -> Iterator[tuple[Node, Node]]:
    for node in model.graph.nodes:
        inverts = operator(node) == "pow" and isinstance(node.args[1], int | float) and node.args[1] < 0
        position = 0 if inverts else _DIVISORS.get(operator(node), len(node.args))
        divisor = node.args[position] if position < len(node.args) else None
        if isinstance(divisor, Node) and is_real(divisor):
            yield node, divisor


def _making(divisors: set[Node], through: frozenset[str]) -> set[Node]:
    """The nodes that make these and have no other purpose."""
    found, pending = set[Node](), list(divisors)
    while pending:
        node = pending.pop()
        name = operator(node)
        product = name == "mul" and len(set(node.all_input_nodes)) == 2
        if node not in found and (name in PASSES or name in through) and not product:
            found.add(node)
            pending += node.all_input_nodes
    return found


# ---- angles ----------------------------------------------------------------------------------------------------------


def _angles(model: GraphModule) -> tuple[set[Node], set[Node]]:
    """The nodes that make angles and nothing else, and all whose results are angles."""
    nodes, made = set[Node](), set[Node]()
    for node in reversed(model.graph.nodes):
        if node.users and all(user in nodes or operator(user) in _TAKES_ANGLES for user in node.users):
            made.add(node)
            if operator(node) in _LEADS_TO_ANGLES or _of_coordinates(model, node):
                nodes.add(node)
    return nodes, made


def _of_coordinates(model: GraphModule, node: Node) -> bool:
    linear = node.op == "call_module" and isinstance(model.get_submodule(str(node.target)), nn.Linear)
    value = node.all_input_nodes[0].meta.get("val") if linear or operator(node) in _PRODUCTS else None
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[-1] <= _COORDINATES


# ---- masks -----------------------------------------------------------------------------------------------------------


def _masked(model: GraphModule, fixed: FixedTensors) -> tuple[set[Node], set[Node]]:
    """The tensors that carry a mask, and the operators that put one in or read what carries one."""
    carriers, readers = set[Node](), set[Node]()
    for node in (one for one in model.graph.nodes if is_real(one) and one not in fixed.computed):
        ends = operator(node) in _ENDS or node.op != "call_function"
        if not ends and (_puts_mask(node, fixed) or carriers.intersection(node.all_input_nodes)):
            carriers.add(node)
            readers.add(node)
    return carriers, readers


def _puts_mask(node: Node, fixed: FixedTensors) -> bool:
    given = (*node.args, *node.kwargs.values())
    parts = [part for one in given for part in (one if isinstance(one, list | tuple) else (one,))]
    return operator(node) in _PUTS_IN and (any(map(_is_far, given)) or any(_is_mask(fixed.value(one)) for one in parts))


def _is_far(value: Any) -> bool:
    return isinstance(value, int | float) and not (MASK_VALUE < value < FAR_ABOVE)


def _is_mask(tensor: torch.Tensor | None) -> bool:
    if tensor is None or not tensor.is_floating_point() or not 0 < tensor.numel() <= _SIZE_LIMIT:
        return False
    return is_mask(tensor.detach().to("cpu", torch.float64).numpy())
