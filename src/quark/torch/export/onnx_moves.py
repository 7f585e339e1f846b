"""Tensors behind operators that only move values (pooling by maximum, shapes, slices) are quantized as those before.

The values lie on the grid already, so nothing changes; but ONNX Runtime and compilers want QuantizeLinear and
DequantizeLinear on both sides of an operator that is to run on integers. Where the pair behind is missing, ONNX Runtime
1.31 adds one itself, and fails to load models with int8 activations because it confuses the type.
"""

from __future__ import annotations

from typing import Any

from onnx import helper

MOVES = frozenset(
    ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "DepthToSpace", "SpaceToDepth")
)
Q, DQ = "QuantizeLinear", "DequantizeLinear"


def quantize_moved(graph: Any) -> None:
    """Add the pairs that are missing to ``graph`` (a GraphProto whose nodes are in order)."""
    makers = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    outputs = {value.name for value in graph.output}
    made = []
    for node in graph.node:
        made.append(node)
        pair = pair_before(makers, node)
        after = readers.get(node.output[0], [])
        if pair is None or node.output[0] in outputs or any(reader.op_type == Q for reader in after):
            continue
        added = pair_like(pair, node.output[0])
        made.extend(added)
        makers[added[-1].output[0]] = added[-1]
        makers[added[0].output[0]] = added[0]
        for reader in after:
            names = [added[-1].output[0] if name == node.output[0] else name for name in reader.input]
            del reader.input[:]
            reader.input.extend(names)
    del graph.node[:]
    graph.node.extend(made)


def pair_before(makers: dict[str, Any], node: Any) -> tuple[Any, Any] | None:
    """The two nodes, with one scale, that quantize what ``node`` moves."""
    after = makers.get(node.input[0]) if node.op_type in MOVES and not node.domain else None
    before = makers.get(after.input[0]) if after is not None and after.op_type == DQ else None
    if after is None or before is None or before.op_type != Q or before.input[1:] != after.input[1:]:
        return None
    per_axis = any(item.name == "axis" and item.i for item in before.attribute)
    return None if per_axis else (before, after)


def pair_like(pair: tuple[Any, Any], name: str) -> tuple[Any, Any]:
    """The same two nodes for the tensor ``name``."""
    before = helper.make_node(Q, [name, *pair[0].input[1:]], [f"{name}.codes"], f"{name}.quantize")
    after = helper.make_node(DQ, [f"{name}.codes", *pair[1].input[1:]], [f"{name}.values"], f"{name}.dequantize")
    return before, after
