"""A normalization behind a Concat goes in front of it where it says that the parts have unlike ranges (FoldBatchNorm).

    concat(x₁, x₂, …) · s + t  =  concat(x₁ · s₁ + t₁, x₂ · s₂ + t₂, …)

The parts of a Concat share a scale. Factors s_k that are ``APART`` times as large for one part as for another show that
the other's values are so many times as large: with one scale, or in blocks with one exponent, the small part would keep
three bits less. In front of the Concat every part has a scale of its own, and behind it their ranges are alike.

The normalization is a BatchNormalization, or a Mul or Div by a constant and the Add or Sub behind it.
Not handled: a Concat that others read too, or outside of a body whose output is made; parts whose sizes are not known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import STANDS_FOR, rewrite_each
from quark.onnx.graph.surgery import (
    Names,
    add_initializer,
    constant_array,
    drop_if_unused,
    ends_body,
    int_attribute,
    nodes_of,
    sole_consumer,
    take_over,
)
from quark.onnx.passes.fold_batch_norm import in_training, parameters_of

#: How many times as large the factors of one part are as those of another, from where they do not share a scale well.
APART = 8.0


def run(model: ir.Model) -> PassReport:
    """Move every such normalization, in place."""

    def look(concat: ir.Node) -> ir.Node | str | None:
        reader = sole_consumer(concat.outputs[0])
        if reader is None or reader.op_type not in ("Mul", "Div", "BatchNormalization") or reader.domain != "":
            return None
        if ends_body(reader, concat):
            return "it makes an output of a body"
        factors = _factors(reader, concat.outputs[0])
        if factors is None:
            return None
        parts = _parts(concat, factors)
        if isinstance(parts, str):
            return parts
        sizes = [size for size in (float(np.abs(part).max()) for part in parts) if size > 0]
        return reader if sizes and max(sizes) >= APART * min(sizes) else None

    return rewrite_each(
        model,
        "norm_before_concat",
        nodes_of(model, "Concat"),
        look,
        lambda concat, reader, names: _move(concat, reader, model, names),
    )


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
    at = next((k for k, value in enumerate(node.inputs) if constant_array(value) is not None), None)
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
    own, ends = axis - (rank - constant.ndim), np.cumsum(np.array(lengths, int))
    if constant.size == 1 and constant.ndim <= rank:
        return [constant] * len(lengths)
    if constant.ndim > rank or own < 0 or constant.shape[own] != constant.size or constant.size != ends[-1]:
        return "the constant is none for every place along the axis of the Concat"
    return list(np.split(constant, ends[:-1], axis=own))


def _move(concat: ir.Node, reader: ir.Node, model: ir.Model, names: Names) -> None:
    shifted = sole_consumer(reader.outputs[0]) if reader.op_type != "BatchNormalization" else None
    _move_one(concat, reader, model, names)
    if shifted is None or shifted.op_type not in ("Add", "Sub") or shifted.domain != "" or ends_body(shifted, concat):
        return
    at = _constant(shifted)
    array = None if at is None else constant_array(shifted.inputs[at])
    if array is not None and not isinstance(_parts(concat, array), str):
        _move_one(concat, shifted, model, names)


def _move_one(concat: ir.Node, reader: ir.Node, model: ir.Model, names: Names) -> None:
    """Let every part have a copy of ``reader`` with its part of the constants; ``reader`` goes."""
    data, graph = concat.outputs[0], concat.graph
    constants = {k: value for k, value in enumerate(reader.inputs) if value is not None and value is not data}
    pieces = {k: _pieces(concat, reader, value) for k, value in constants.items()}
    if graph is None:
        return
    for number, part in enumerate(list(concat.inputs)):
        inputs: list[ir.Value | None] = [part if value is data else value for value in reader.inputs]
        for k, value in constants.items():
            inputs[k] = add_initializer(model.graph, pieces[k][number], names.fresh(f"{value.name}_{number}"))
        output = ir.Value(name=names.fresh(f"{reader.outputs[0].name}_{number}"))
        if part is not None:
            output.type, output.shape = part.type, part.shape
        name, attributes = f"{reader.name}_{number}", dict(reader.attributes)
        made = ir.node(reader.op_type, inputs, attributes=attributes, outputs=[output], name=name)
        made.meta[STANDS_FOR] = (*reader.meta.get(STANDS_FOR, ()), reader.name)
        graph.insert_before(concat, made)
        concat.replace_input_with(number, output)
    take_over(data, reader.outputs[0])
    for value in constants.values():
        drop_if_unused(value)


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
