"""An Einsum of two tensors becomes the MatMul that it is (ExpandFused).

    bind, bjnd -> bnij        Transpose both, MatMul
    bld, dhk -> blhk          MatMul with the weight as a matrix, Reshape
    bhlk, hkd -> bld          Transpose, Reshape, MatMul, where both are summed over two indices

Indices of both tensors and the result count batches, those of one tensor and the result rows or columns, the others are
summed over. A constant is brought into its order here, an activation by Transpose and Reshape. No quantized kernel
takes the place of an Einsum, so attention and projections that are written so would stay float.

Not handled, told as a reason: more or fewer operands, ellipses, an index twice in one operand, sums over an index of
one operand alone, products without a sum, repeated sizes, and sizes that a Reshape would need and nobody knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.surgery import Names, constant_array, has_array
from quark.ir.walk import nodes_within
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import NodeWriter, rewrite_each
from quark.onnx.qdq.slots import is_float

Groups = list[str]


def run(model: ir.Model) -> PassReport:
    """Rewrite every such Einsum, in place."""
    nodes = [one for one in nodes_within(model.graph) if one.op_type == "Einsum"]
    return rewrite_each(model, "einsum_to_matmul", nodes, _look, _write)


def terms(node: ir.Node) -> tuple[list[str], str]:
    """The indices of each operand and those of the result."""
    given, arrow, result = node.attributes.get_string("equation", "").replace(" ", "").partition("->")
    operands = given.split(",")
    letters = sorted({letter for letter in given if letter.isalpha()})
    return operands, result if arrow else "".join(letter for letter in letters if given.count(letter) == 1)


@dataclass(frozen=True)
class _Product:
    """A product of two tensors.

    Attributes:
        left, right: the operands; the constant, if one is, is on the right.
        indices: of both, as they come.
        groups: of both, as MatMul takes them: one string of indices for each axis.
        shapes: what Reshape brings both, and the result, to; None where their axes are these already.
        made: the indices of the result as MatMul leaves them.
        result: as they are wanted.
    """

    left: ir.Value
    right: ir.Value
    indices: tuple[str, str]
    groups: tuple[Groups, Groups]
    shapes: tuple[list[int] | None, list[int] | None, list[int] | None]
    made: str
    result: str


def _look(node: ir.Node) -> _Product | str:
    operands, result = terms(node)
    left, right = (*node.inputs, None, None)[:2]
    if len(node.inputs) != 2 or len(operands) != 2 or left is None or right is None:
        return "it has not two operands"
    if not all(map(is_float, (left, right))):
        return "it multiplies no floats"
    if any(not one.isalpha() or len(set(one)) != len(one) for one in operands):
        return "its equation has an ellipsis, a number, or an index twice in one operand"
    if has_array(left) and not has_array(right):
        left, right, operands = right, left, operands[::-1]
    sizes = _sizes((left, right), operands)
    return sizes if isinstance(sizes, str) else _product(left, right, (operands[0], operands[1]), result, sizes)


def _sizes(values: Sequence[ir.Value], operands: Sequence[str]) -> dict[str, int] | str:
    """The known sizes, by index."""
    sizes: dict[str, int] = {}
    for value, term in zip(values, operands, strict=True):
        if value.shape is None or len(value.shape) != len(term):
            return "the rank of an operand is not known"
        for letter, size in zip(term, value.shape, strict=True):
            if isinstance(size, int) and sizes.setdefault(letter, size) != size:
                return "sizes are repeated"
    return sizes


def _product(
    left: ir.Value, right: ir.Value, indices: tuple[str, str], result: str, sizes: dict[str, int]
) -> _Product | str:
    a, b = indices
    batch, rows, columns = (
        "".join(one for one in result if (one in a, one in b) == where)
        for where in ((True, True), (True, False), (False, True))
    )
    summed = "".join(one for one in a if one in b and one not in result)
    if not summed or not set(a + b) <= {*result, *summed}:
        return "it sums over nothing, or over an index of one operand alone"
    heads = [*batch, rows] if batch or not rows else [*rows]
    groups = ([*heads, summed], [*batch, summed, columns])
    made = [*heads, columns]
    shapes = (_merged(groups[0], sizes), _merged(groups[1], sizes), _split(made, sizes))
    if any(one == [] for one in shapes):
        return "sizes that it would need are not known"
    return _Product(left, right, indices, groups, shapes, "".join(made), result)


def _merged(groups: Groups, sizes: dict[str, int]) -> list[int] | None:
    """The shape with one axis for each group; None where that is no change, nothing where it cannot be said."""
    if all(len(group) == 1 for group in groups):
        return None
    first = next(place for place, group in enumerate(groups) if len(group) != 1)
    found = [0] * first
    for group in groups[first:]:
        found.append(prod(sizes[one] for one in group) if set(group) <= set(sizes) else -1)
    return found if found.count(-1) < 2 else []


def _split(groups: Groups, sizes: dict[str, int]) -> list[int] | None:
    """The shape with one axis for each index."""
    merged = _merged(groups, sizes)
    if not merged:
        return merged
    first = merged.count(0)
    found = [0] * first + [sizes.get(one, -1) for group in groups[first:] for one in group]
    return found if found.count(-1) < 2 else []


def _write(node: ir.Node, found: _Product, names: Names) -> None:
    writer = NodeWriter(node, "MatMul", names)
    sides = [
        _ordered(writer, value, indices, groups, shape)
        for value, indices, groups, shape in zip(
            (found.left, found.right), found.indices, found.groups, found.shapes[:2], strict=True
        )
    ]
    made = _reshaped(writer, writer.add("MatMul", sides), found.shapes[2])
    _turned(writer, made, found.made, found.result)
    writer.stand_for()


def _ordered(writer: NodeWriter, value: ir.Value, indices: str, groups: Groups, shape: list[int] | None) -> ir.Value:
    """An operand with an axis for each group."""
    wanted, array = "".join(groups), constant_array(value)
    if array is None:
        return _reshaped(writer, _turned(writer, value, indices, wanted), shape)
    turned = array.transpose([indices.index(one) for one in wanted])
    sizes = dict(zip(wanted, turned.shape, strict=True))
    return writer.constant(
        np.ascontiguousarray(turned.reshape([prod(sizes[one] for one in group) for group in groups])), str(value.name)
    )


def _turned(writer: NodeWriter, value: ir.Value, indices: str, wanted: str) -> ir.Value:
    perm = [indices.index(one) for one in wanted]
    return value if indices == wanted else writer.add("Transpose", [value], {"perm": perm})


def _reshaped(writer: NodeWriter, value: ir.Value, shape: list[int] | None) -> ir.Value:
    if shape is None:
        return value
    return writer.add("Reshape", [value, writer.constant(np.array(shape, np.int64), "shape")])
