"""A division (or product) by one constant goes into the weights before it.

    (x W + b) / c  =  x (W / c) + b / c            (Q Kᵀ) / c  =  (Q / c) Kᵀ

Attention divides its scores by √d; in the query's projection the division costs nothing. The way back leads through
Reshape, Transpose, Squeeze and Unsqueeze, a bias that is added, and the first operand of a product of two activations.
Outputs agree to 1e-6 of the largest. Weights that others read are copied.

Not handled: a tensor on the way that others read too, Split, weights that are computed.
"""

from __future__ import annotations

from dataclasses import field

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.surgery import (
    Names,
    add_initializer,
    constant_array,
    has_array,
    input_at,
    label,
    nodes_of,
    set_constant,
    sole_consumer,
    take_over,
)
from quark.onnx.graph.pattern import scalar
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each

MOVES = frozenset(["Reshape", "Transpose", "Squeeze", "Unsqueeze"])


@dataclass
class Rescaling:
    """The way back from a division: (node, position) of every constant that has to be scaled."""

    constants: list[tuple[ir.Node, int]] = field(default_factory=list)
    matmuls: int = 0


def run(model: ir.Model) -> PassReport:
    """Fold every such division, in place."""

    def look(node: ir.Node) -> tuple[ir.Value, float, Rescaling] | str | None:
        source, factor = _scaled(node)
        way = Rescaling()
        return None if source is None or factor is None else _walk(source, node, way) or (source, factor, way)

    def fold(node: ir.Node, found: tuple[ir.Value, float, Rescaling], names: Names) -> None:
        source, factor, way = found
        for reader, position in way.constants:
            _scale(reader, position, factor, model, names)
        take_over(source, node.outputs[0])

    return rewrite_each(model, "fold_div_into_matmul", nodes_of(model, "Div", "Mul"), look, fold)


def _scaled(node: ir.Node) -> tuple[ir.Value | None, float | None]:
    """(tensor, factor) of a division or product by one number; a factor of None where it is none."""
    if len(node.inputs) != 2 or None in node.inputs:
        return None, None
    pairs = [tuple(node.inputs), tuple(node.inputs[::-1])][: 2 if node.op_type == "Mul" else 1]
    for source, other in pairs:
        number = None if other is None else scalar(other)
        if source is None or other is None or not number or not np.isfinite(number):
            continue
        if not has_array(source) and len(other.shape or ()) <= 1:  # more axes would add some to the result
            return source, number if node.op_type == "Mul" else 1 / number
    return None, None


def _walk(value: ir.Value, reader: ir.Node, way: Rescaling) -> str | None:
    """Collect the constants behind ``value``; the reason why it cannot be scaled, or None."""
    while True:
        node = value.producer()
        if node is None or node.domain != "" or node.graph is not reader.graph:
            return "it does not lead back to weights"
        if sole_consumer(value) is not reader:
            return f"the result of {label(node)} is read by others too"
        if node.op_type == "MatMul" and has_array(input_at(node, 1)):
            way.constants.append((node, 1))
            return None
        reader = node
        if node.op_type == "Add":
            position = next((k for k in (0, 1) if has_array(node.inputs[k])), None)
            if position is None:
                return f"{label(node)} adds two activations"
            way.constants.append((node, position))
            following = node.inputs[1 - position]
        elif node.op_type in MOVES or (node.op_type == "MatMul" and not way.matmuls):
            way.matmuls += node.op_type == "MatMul"
            following = node.inputs[0]
        else:
            return f"{label(node)} is on the way to the weights"
        if following is None:
            return "it does not lead back to weights"
        value = following


def _scale(node: ir.Node, position: int, factor: float, model: ir.Model, names: Names) -> None:
    value = node.inputs[position]
    array = constant_array(value)
    if value is None or array is None:
        return
    scaled = (array * np.asarray(factor, array.dtype)).astype(array.dtype)
    if value.is_initializer() and sole_consumer(value) is node:
        set_constant(value, scaled)
    else:
        node.replace_input_with(position, add_initializer(model.graph, scaled, names.fresh(f"{value.name}_scaled")))
