"""A normalization behind a Concat goes in front of it where it says that the parts have unlike ranges (FoldBatchNorm).

    concat(x₁, x₂, …) · s + t  =  concat(x₁ · s₁ + t₁, x₂ · s₂ + t₂, …)

The parts of a Concat share a scale. Factors s_k that are ``APART`` times as large for one part as for another show that
the other's values are so many times as large: with one scale, or in blocks with one exponent, the small part would keep
three bits less. In front of the Concat every part has a scale of its own, and behind it their ranges are alike.

The normalization is a BatchNormalization, or a Mul or Div by a constant and the Add or Sub behind it.
A Concat that others read too, or from a body, stays for them. Not handled: parts whose sizes are not known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import (
    Names,
    add_initializer,
    constant_array,
    has_array,
    int_attribute,
    nodes_of,
    sole_consumer,
    stand_for,
    substitute,
)
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each
from quark.onnx.passes.fold_batch_norm import in_training, parameters_of

#: How many times as large the factors of one part are as those of another, from where they do not share a scale well.
APART = 8.0


def run(model: ir.Model) -> PassReport:
    """Move every such normalization, in place."""

    def look(reader: ir.Node) -> ir.Node | str | None:
        concat = _concat(reader)
        factors = None if concat is None else _factors(reader, concat.outputs[0])
        if concat is None or factors is None:
            return None
        parts = _parts(concat, factors)
        if isinstance(parts, str):
            return parts
        sizes = [size for size in (float(np.abs(part).max()) for part in parts) if size > 0]
        return concat if sizes and max(sizes) >= APART * min(sizes) else None

    return rewrite_each(
        model,
        "norm_before_concat",
        nodes_of(model, "Mul", "Div", "BatchNormalization"),
        look,
        lambda reader, concat, names: _move(reader, concat, model, names),
    )


def _concat(reader: ir.Node) -> ir.Node | None:
    """The Concat that makes what a node reads."""
    made = (value.producer() for value in reader.inputs[:2] if value is not None)
    return next((node for node in made if node is not None and node.op_type == "Concat" and not node.domain), None)


def _factors(node: ir.Node, data: ir.Value) -> np.ndarray | None:
    """What ``data`` is multiplied by, in the axes of ``data``; None where that is not known."""
    if node.op_type == "BatchNormalization":
        found = None if in_training(node) else parameters_of(node)
        rank = len(data.shape or ())
        return None if found is None or isinstance(found, str) else found[0].reshape(-1, *[1] * (rank - 2))
    constant = _constant(node)
    array = None if constant is None else constant_array(node.inputs[constant])
    if array is None or array.dtype.kind != "f":
        return None
    with np.errstate(divide="ignore"):
        factors = np.asarray(array, np.float64) ** (1 if node.op_type == "Mul" else -1)
    return factors if np.isfinite(factors).all() else None


def _constant(node: ir.Node) -> int | None:
    """Which of the two operands is a constant; the second one of Div and Sub."""
    at = next((k for k, value in enumerate(node.inputs) if has_array(value)), None)
    return at if at or node.op_type in ("Mul", "Add") else None


def _parts(concat: ir.Node, constant: np.ndarray) -> list[np.ndarray] | str:
    """What of a constant meets each part of the Concat, or the reason why that is not known."""
    shapes = [list(value.shape or ()) if value is not None else [] for value in concat.inputs]
    rank = len(shapes[0])
    axis = int_attribute(concat, "axis", 0)
    if not all(len(shape) == rank and rank > 0 for shape in shapes):
        return "the rank of a part is not known"
    axis %= rank
    lengths = [shape[axis] for shape in shapes]
    if not all(isinstance(length, int) for length in lengths):
        return "the size of a part is not known"
    own, whole = axis - (rank - constant.ndim), [*shapes[0]]
    whole[axis] = sum(lengths)
    met = whole[rank - constant.ndim :]
    if constant.ndim > rank or any(size not in (1, length) for size, length in zip(constant.shape, met, strict=True)):
        return "the constant may make the parts larger"
    if own < 0 or constant.shape[own] == 1:
        return [constant] * len(lengths)
    return list(np.split(constant, np.cumsum(np.array(lengths, int))[:-1], axis=own))


def _move(reader: ir.Node, concat: ir.Node, model: ir.Model, names: Names) -> None:
    """Put copies of the normalization behind every part, and a Concat of theirs in its place."""
    norms, parts = [reader, *_shift(reader, concat)], list(concat.inputs)
    nodes: list[ir.Node] = []
    for norm in norms:
        nodes += _copies(norm, parts, concat, model, names)
        parts = [node.outputs[0] for node in nodes[-len(parts) :]]
    alone = sole_consumer(concat.outputs[0]) is not None
    output = ir.Value(name=names.fresh(f"{norms[-1].outputs[0].name}_parts"))
    name = concat.name if alone else f"{concat.name}_{reader.name}"
    joined = ir.node("Concat", parts, attributes=dict(concat.attributes), outputs=[output], name=name)
    stand_for([joined], concat)
    substitute(norms[-1].outputs[0], [*nodes, joined])


def _shift(reader: ir.Node, concat: ir.Node) -> list[ir.Node]:
    """The Add or Sub of a constant that alone reads the products and can go in front of the Concat too."""
    node = sole_consumer(reader.outputs[0]) if reader.op_type != "BatchNormalization" else None
    if node is None or node.op_type not in ("Add", "Sub") or node.domain != "" or node.graph is not reader.graph:
        return []
    at = _constant(node)
    array = None if at is None else constant_array(node.inputs[at])
    return [] if array is None or isinstance(_parts(concat, array), str) else [node]


def _copies(
    reader: ir.Node, parts: Sequence[ir.Value | None], concat: ir.Node, model: ir.Model, names: Names
) -> list[ir.Node]:
    """A copy of ``reader`` for every part, with its part of the constants."""
    given = {k: value for k, value in enumerate(reader.inputs) if value is not None}
    constants = {k: value for k, value in given.items() if has_array(value)}
    pieces = {k: _pieces(concat, reader, value) for k, value in constants.items()}
    made = []
    for number, part in enumerate(parts):
        inputs: list[ir.Value | None] = [part] * len(reader.inputs)
        for k, value in constants.items():
            inputs[k] = add_initializer(model.graph, pieces[k][number], names.fresh(f"{value.name}_{number}"))
        output = ir.Value(name=names.fresh(f"{reader.outputs[0].name}_{number}"))
        if part is not None:
            output.type, output.shape = part.type, part.shape
        name = f"{reader.name}_{number}"
        made.append(ir.node(reader.op_type, inputs, dict(reader.attributes), outputs=[output], name=name))
        stand_for(made[-1:], reader)
    return made


def _pieces(concat: ir.Node, reader: ir.Node, value: ir.Value | None) -> Sequence[np.ndarray]:
    """The parts of one constant; those of a BatchNormalization lie along the channels."""
    array = constant_array(value)
    if array is None:
        raise ValueError(f"{reader.name!r} has an operand that is not constant")
    rank = len(concat.outputs[0].shape or ())
    norm = reader.op_type == "BatchNormalization"
    found = _parts(concat, array.reshape(-1, *[1] * (rank - 2)) if norm else array)
    if isinstance(found, str):
        raise ValueError(found)
    return [np.ascontiguousarray(piece.reshape(-1) if norm else piece) for piece in found]
