"""What small values must survive: statistics that something is divided by, and what a logarithm is taken of.

A scale in steps of the largest value rounds small ones to 0, where a division or a logarithm makes infinity of them, or
an error as large as the signal. Such tensors stay float, and so does the *front end* of a model that reads sound: the
transforms (Fourier, mel) between its inputs and a logarithm are linear layers, whose small results count as well.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from quark.ir.surgery import constant_array, is_constant
from quark.ir.walk import bodies, nodes_within
from quark.onnx.qdq.decoding import LAYERS
from quark.onnx.qdq.op_rules import ACTIVATES, DIVISORS, MAKES_DIVISORS, MOVES_VALUES

#: Operators before a logarithm that keep small values: the odds of a probability, log(p / (1 - p)), too.
_MAKES_ODDS = MAKES_DIVISORS | frozenset(["Div", "Sub"])


def makes_divisors(model: ir.Model) -> set[ir.Node]:
    """Nodes whose results end in a division, a reciprocal or a logarithm: a small one rounded to 0 becomes infinite.

    So do divisions of exponentials, a Softmax written out: one row's may be all small beside another's.

    These are the statistics of normalizations (square, mean, epsilon, root), found by walking back from the divisors
    through operators that have no other purpose there; the walk ends at every other operator. Before a logarithm that
    operator belongs to them; a layer only as part of a front end: all that is before the logarithm, where no activation
    function, normalization, recurrence or pool is between the inputs of the model and it.
    """
    read = {node: value for node in nodes_within(model.graph) if (value := _divisor(node)) is not None}
    found, _ = _walked(read.values())
    odds, ends = _walked((value for node, value in read.items() if node.op_type == "Log"), _MAKES_ODDS)
    found |= odds | {node for node in read if _of_exponentials(node)}
    found |= {node for node in ends if node.op_type not in LAYERS}  # a Softmax, say; what it reads need not stay float
    return found | _with_makers(ends & _front(model))


def _divisor(node: ir.Node) -> ir.Value | None:
    """What a node divides by, takes the logarithm of, or raises to a negative power."""
    if node.op_type == "Pow":
        exponents = constant_array(node.inputs[1])
        return None if exponents is None or not (exponents < 0).any() else node.inputs[0]
    return node.inputs[DIVISORS[node.op_type]] if node.op_type in DIVISORS else None


def _walked(
    divisors: Iterable[ir.Value], through: frozenset[str] = MAKES_DIVISORS
) -> tuple[set[ir.Node], set[ir.Node]]:
    """The nodes that make these, and those at which the walk back ends."""
    found, ends = set[ir.Node](), set[ir.Node]()
    pending: list[ir.Value | None] = list(divisors)
    while pending:
        value = pending.pop()
        node = None if value is None else value.producer()
        if node is None or node in found:
            continue
        if node.op_type not in through | MOVES_VALUES or _is_product(node):
            ends.add(node)
            continue
        found.add(node)
        pending += list(node.inputs)
    return found, ends


def _of_exponentials(node: ir.Node) -> bool:
    """Whether a division divides what Exp makes."""
    value = node.inputs[0] if node.op_type == "Div" else None
    maker = None if value is None else value.producer()
    while maker is not None and maker.op_type in MOVES_VALUES and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    return maker is not None and maker.op_type == "Exp"


def _is_product(node: ir.Node) -> bool:
    """Whether it multiplies two tensors: a result of its own, which a square or a factor is not."""
    if node.op_type != "Mul" or node.inputs[0] is node.inputs[1]:
        return False
    return not any(is_constant(value) for value in node.inputs)


def _front(model: ir.Model) -> set[ir.Node]:
    """The nodes that are computed from the inputs of the model without what makes a network of layers."""
    found: set[ir.Node] = set()
    for node in model.graph:
        makers = (value.producer() for value in node.inputs if value is not None)
        if not _activates(node) and all(maker is None or maker in found for maker in makers):
            found.add(node)
    return found


def _activates(node: ir.Node) -> bool:
    """Whether a node, or one of its bodies, makes a network; so does a Clip from above, which is no floor of a Log."""
    if node.op_type == "Clip" and len(node.inputs) > 2 and node.inputs[2] is not None:
        return True
    inside = (one for body in bodies(node) for one in nodes_within(body))
    return node.op_type in ACTIVATES or node.domain not in ("", "ai.onnx") or any(_activates(one) for one in inside)


def _with_makers(nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """The nodes and what they are computed from."""
    pending = list(nodes)
    found = set(pending)
    while pending:
        for value in pending.pop().inputs:
            maker = None if value is None else value.producer()
            if maker is not None and maker not in found:
                found.add(maker)
                pending.append(maker)
    return found
