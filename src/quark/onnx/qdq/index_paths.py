"""What computes a shape, an index or a coordinate: a rounded one would change which values the model reads.

    Shape → Gather → Mul → Cast → Resize(sizes)                         arithmetic on sizes
    scores → TopK → Unsqueeze → Expand → GatherElements(indices)        a choice
    layer → Mul → Add → Floor → Cast → Gather(indices)                  a place that a layer computes
    layer → Mul → Sub → GridSample(grid)                                the same, between the pixels
    points → MatMul(camera) → Div → GridSample(grid)                    a product of coordinates, a few numbers each
    grid → Add(layer) → Sub(grid) → y                                   a place that is moved, and how far
    lengths → Unsqueeze → Less(0, 1, 2, …)                              how much of a sample counts

Found by walking back from the inputs that take such numbers. The walk ends where values become discrete: what leads to
a TopK, an ArgMax or a comparison (but with successive numbers) is data, and a query-based detector is nothing else but
data that leads to a TopK.
Among floats it goes on through arithmetic alone, and everywhere it ends at a layer, whose result is data by definition,
but for products of coordinates. What a float is added to, or taken from, that is a place is one, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import constant_array, input_at, is_constant
from quark.ir.walk import bodies, nodes_within
from quark.onnx.qdq.decoding import LAYERS
from quark.onnx.qdq.op_rules import MOVES_VALUES

#: Operator -> position of its first input that holds a shape, a size or an index.
SHAPE_INPUTS_FROM = {
    "ConstantOfShape": 0,
    "Expand": 1,
    "Gather": 1,
    "GatherElements": 1,
    "GatherND": 1,
    "OneHot": 0,
    "Pad": 1,
    "Range": 0,
    "Reshape": 1,
    "Resize": 1,
    "Slice": 1,
    "Split": 1,
    "Squeeze": 1,
    "Tile": 1,
    "TopK": 1,
    "Unsqueeze": 1,
    "Upsample": 1,
}
#: Operator -> positions of inputs among others that are data: indices, coordinates of pixels, boxes to cut out.
PLACE_INPUTS = {
    "GridSample": (1,),
    "MaxRoiAlign": (1,),
    "RoiAlign": (1, 2),
    "ScatterElements": (1,),
    "ScatterND": (1,),
}
#: Operators that make a size out of a tensor or a choice out of its values.
MAKES_DISCRETE = frozenset(
    [
        "ArgMax",
        "ArgMin",
        "Bernoulli",
        "Equal",
        "Greater",
        "GreaterOrEqual",
        "IsInf",
        "IsNaN",
        "Less",
        "LessOrEqual",
        "Multinomial",
        "NonMaxSuppression",
        "NonZero",
        "Shape",
        "Size",
        "TopK",
        "Unique",
    ]
)
COMPARES = frozenset(["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"])
#: Operators that float numbers of shapes and places go through.
ARITHMETIC = MOVES_VALUES | frozenset(
    [
        "Abs",
        "Add",
        "Ceil",
        "Clip",
        "Concat",
        "Div",
        "Floor",
        "Max",
        "Min",
        "Mod",
        "Mul",
        "Neg",
        "Pow",
        "Range",
        "Reciprocal",
        "Round",
        "Sqrt",
        "Sub",
        "Where",
    ]
)
_PRODUCTS = frozenset(["MatMul", "Gemm"])
#: Products over so few numbers are of coordinates, not of features.
_COORDINATES = 4
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def computes_shapes(model: ir.Model) -> set[ir.Node]:
    """Nodes whose results end in a shape, a size, an index or a coordinate and that are no data before."""
    known = _from_sizes(model)
    found: set[ir.Node] = set()
    pending = [value.producer() for value in _places(model)]
    while pending:
        node = pending.pop()
        if node is None or node in found or _is_data(node, known):
            continue
        found.add(node)
        pending += [value.producer() for value in node.inputs if value is not None]
    return found | _moved(model, found)


def _moved(model: ir.Model, places: set[ir.Node]) -> set[ir.Node]:
    """Sums and differences with places between pixels."""
    between = {value for node in places for value in node.outputs if value.dtype in _FLOATS}
    found: set[ir.Node] = set()
    for node in model.graph:
        if node.op_type in ("Add", "Sub") and node not in places and any(one in between for one in node.inputs):
            found.add(node)
            between.update(node.outputs)
    return found


def of_coordinates(node: ir.Node) -> bool:
    """Whether it is a product over a few numbers each."""
    first = node.inputs[0] if node.op_type in _PRODUCTS else None
    axes = () if first is None or first.shape is None else tuple(first.shape)
    return bool(axes) and isinstance(axes[-1], int) and axes[-1] <= _COORDINATES


def _places(model: ir.Model) -> Iterator[ir.Value]:
    """The values that are read as shapes, sizes, indices or coordinates."""
    for node in nodes_within(model.graph):
        found = [input_at(node, position) for position in place_positions(node)]
        if node.op_type in COMPARES and any(_counts(value) for value in node.inputs):
            found += node.inputs
        yield from (value for value in found if value is not None)


def _counts(value: ir.Value | None) -> bool:
    """Whether a tensor, or what it is moved from, is a row of successive numbers, with which lengths are compared."""
    while value is not None and not is_constant(value):
        maker = value.producer()
        if maker is None or maker.op_type not in MOVES_VALUES:
            return maker is not None and maker.op_type == "Range"
        value = maker.inputs[0]
    numbers = constant_array(value)
    return (
        numbers is not None
        and numbers.dtype.kind in "iuf"
        and numbers.size > 1
        and bool((np.diff(numbers.ravel()) == 1).all())
    )


def place_positions(node: ir.Node) -> tuple[int, ...]:
    """Which inputs of a node hold shapes, sizes, indices or coordinates."""
    first = SHAPE_INPUTS_FROM.get(node.op_type, len(node.inputs))
    return (*range(first, len(node.inputs)), *PLACE_INPUTS.get(node.op_type, ()))


def _is_data(node: ir.Node, known: set[ir.Node]) -> bool:
    """Whether the walk ends before a node.

    Args:
        known: nodes whose results follow from sizes alone.
    """
    arithmetic = node.op_type in ARITHMETIC or of_coordinates(node)
    if node.op_type in MAKES_DISCRETE or (node.op_type in LAYERS and node not in known and not arithmetic):
        return True
    kinds = {value.dtype for value in node.outputs}
    return (kinds == {None} or not kinds.isdisjoint(_FLOATS)) and node not in known and not arithmetic


def _from_sizes(model: ir.Model) -> set[ir.Node]:
    """Nodes that read nothing but constants and sizes, directly or through each other."""
    found: set[ir.Node] = set()
    for node in nodes_within(model.graph):
        if bodies(node):
            continue  # they read other values too
        given = [value for value in node.inputs if value is not None and not is_constant(value)]
        if node.op_type in ("Shape", "Size") or all(value.producer() in found for value in given):
            found.add(node)
    return found
