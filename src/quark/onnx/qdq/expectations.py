"""Expectations: probabilities that are weighed with constants and summed up, a place between bins.

    scores → Softmax → Mul(0, 1, 2, …) → ReduceSum              disparities, soft arg-max, values of a distribution
    scores → Softmax → ReduceSum(rows) → Mul(0 … 1) → ReduceSum the same, of one axis
    scores → Softmax → Conv or MatMul(0, 1, 2, …)               distances of a box (one to four results)

Each of many bins has next to no codes on a scale from 0 to 1, and what is lost of them all adds up in one number. There
is next to nothing to compute: it stays float from the Softmax to the sum.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import constant_array, int_attribute
from quark.onnx.qdq.op_rules import MOVES_VALUES

REASON = "an expectation is taken of its probabilities: what each bin loses adds up"
#: Layers with more results make features of probabilities.
_RESULTS = 4
#: Operator -> axis of its weight that counts results.
_LAYERS = {"Conv": 0, "MatMul": -1, "Gemm": -1}


def takes_expectations(model: ir.Model) -> set[ir.Node]:
    """The nodes from a Softmax to the expectation."""
    return {one for node in model.graph if node.op_type == "Softmax" for one in _to_sum(node, frozenset(), False)}


def _to_sum(node: ir.Node, path: frozenset[ir.Node], weighed: bool) -> set[ir.Node]:
    """The nodes on the ways from one to sums of what is weighed; nothing where there is none."""
    path |= {node}
    found = set[ir.Node]()
    for reader in (use.node for use in node.outputs[0].uses()):
        numbers = next((array for value in reader.inputs[:2] if (array := constant_array(value)) is not None), None)
        if reader.op_type in _LAYERS and numbers is not None and _places(reader, numbers):
            found |= path | {reader}
        elif reader.op_type == "ReduceSum":
            found |= path | {reader} if weighed else _to_sum(reader, path, weighed)
        elif reader.op_type == "Mul" and numbers is not None and numbers.size and np.ptp(numbers):
            found |= _to_sum(reader, path, True)
        elif reader.op_type in MOVES_VALUES:
            found |= _to_sum(reader, path, weighed)
    return found


def _places(layer: ir.Node, weight: np.ndarray) -> bool:
    """Whether a layer weighs with places of bins: rising or falling, or evenly spaced, as trained weights are not."""
    transposed = layer.op_type == "Gemm" and int_attribute(layer, "transB", 0)
    rows = np.moveaxis(weight, 0 if transposed else _LAYERS[layer.op_type], 0)
    rows = rows.reshape(len(rows), -1)
    return len(rows) <= _RESULTS and rows.shape[1] > 2 and all(map(_is_ruler, rows))


def _is_ruler(row: np.ndarray) -> bool:
    steps, places = np.diff(row), np.diff(np.unique(row))
    even = places.size > 1 and bool(np.allclose(places, places[0], rtol=1e-3))
    return even or bool((steps > 0).all() or (steps < 0).all())
