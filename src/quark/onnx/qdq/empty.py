"""Nodes that may compute on nothing: how many elements there are depends on values.

    NonZero → Gather → [Q/DQ] Add    of a detector that finds nothing

ONNX Runtime's integer kernels of three operators do not bear tensors without elements (1.31, 2026-11): QLinearAdd and
QLinearMul end the process where a session has two threads or more, QLinearSoftmax makes no result. Layers, moves and
pooling bear them. Sizes that whoever runs the model chooses (a batch of 0) are not looked at.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.ir.walk import nodes_within

#: Operators of which values decide how many elements they make.
SIZED = frozenset(["Compress", "NonMaxSuppression", "NonZero", "Unique"])
#: Operators whose integer kernels fail on tensors without elements.
FAIL = frozenset(["Add", "Mul", "Softmax"])
#: Operators whose results are as large as their first input.
AS_FIRST = frozenset(["ScatterElements", "ScatterND", "TensorScatter"])
REASON = "how many elements it has depends on values: ONNX Runtime's integer kernel fails where there are none"


def may_be_empty(model: ir.Model) -> set[ir.Node]:
    """Nodes of these operators after one that makes as many elements as values decide."""
    after: set[ir.Node] = set()
    for node in nodes_within(model.graph):
        given = node.inputs[:1] if node.op_type in AS_FIRST else node.inputs
        if node.op_type in SIZED or any(value is not None and value.producer() in after for value in given):
            after.add(node)
    return {node for node in after if node.op_type in FAIL}
