"""Give each node its own copy of an initializer that several nodes share (CopySharedInit, CopyBiasInit).

A quantized bias has the scale input scale × weight scale, so two nodes cannot share one; equalization and fine-tuning
change a weight for one node. The first reader keeps the initializer, the others get copies. The copies are of the
initializer, not of its data, which all of them share until somebody replaces it.

Main graph only.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from quark.ir.surgery import Names, add_initializer, is_constant, tensor_alias, tensor_of
from quark.onnx.graph.report import PassReport


def run(model: ir.Model, op_types: Collection[str] = (), positions: Collection[int] | None = None) -> PassReport:
    """Copy shared initializers, in place.

    Args:
        model: Edited in place.
        op_types: Operators whose nodes get copies; empty for all. Readers of other types keep what they read.
        positions: Input numbers that count, such as ``(2,)`` for biases; None for all.
    """
    fired, names, seen = 0, None, set[ir.Value]()
    for node in model.graph:
        if op_types and node.op_type not in op_types:
            continue
        for position, value in enumerate(node.inputs):
            if not is_constant(value) or value is None or (positions is not None and position not in positions):
                continue
            if value not in seen:
                seen.add(value)
                continue
            names = names or Names(model)
            node.replace_input_with(position, _copy(value, model.graph, names))
            fired += 1
    return PassReport("unshare", fired)


def _copy(value: ir.Value, graph: ir.Graph, names: Names) -> ir.Value:
    name = names.fresh(f"{value.name}_copy")
    return add_initializer(graph, tensor_alias(tensor_of(value), name), name)
