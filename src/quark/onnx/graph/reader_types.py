"""Types of tensors that shape inference does not know, from the nodes that read them.

What an operator of a user's own makes has no type for ONNX. A Conv that reads it beside a float32 weight says it: both
are ``T`` in the operator's schema. Not handled: shapes, and readers whose other inputs are unknown too.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir


def learn_from_readers(graph: ir.Graph) -> int:
    """Fill in what the nodes of a graph say about the types of their inputs, in place; how many were learnt."""
    version, learnt = graph.opset_imports.get("", 0), 0
    for node in reversed(graph):
        unknown = [k for k, value in enumerate(node.inputs) if value is not None and value.type is None]
        if not unknown or node.domain or not onnx.defs.has(node.op_type, version, ""):
            continue
        schema = onnx.defs.get_schema(node.op_type, version, "")
        read, made = _letters(schema.inputs, len(node.inputs)), _letters(schema.outputs, len(node.outputs))
        given = zip([*read, *made], [*node.inputs, *node.outputs], strict=True)
        known = {letter: value.type for letter, value in given if value is not None and value.type is not None}
        for position in unknown:
            found, value = known.get(read[position]), node.inputs[position]
            if value is not None and isinstance(found, ir.TensorType):
                value.type = ir.TensorType(found.dtype)
                learnt += 1
    return learnt


def _letters(formal: Sequence[onnx.defs.OpSchema.FormalParameter], count: int) -> list[str]:
    """What a schema calls the type of each of ``count`` inputs or outputs; the last one may repeat."""
    return [formal[min(position, len(formal) - 1)].type_str for position in range(count)]
