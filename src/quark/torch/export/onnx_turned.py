"""Weights that a product reads turned are stored turned.

    MatMul(x, Transpose(DequantizeLinear(codes [N, K], axis)))  →  MatMul(x, DequantizeLinear(codes^T [K, N], 1 - axis))

The values are the same. ONNX Runtime takes the second form into its kernels (MatMulNBits for groups of 4 bits,
MatMulInteger), and would else compute the float weight anew at each run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from quark.operators import stream

BELOW_A_BYTE = {TensorProto.INT4: 4, TensorProto.UINT4: 4}


def turn_weights(graph: Any) -> set[str]:
    """Store the weights of ``graph`` (a GraphProto) as they are read; names of the values that are turned now."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    outputs = {value.name for value in graph.output}
    dropped, turned_values = [], set()
    for node in graph.node:
        turn = only_reader(node, readers, outputs)
        if node.op_type != "DequantizeLinear" or turn is None or not is_plain_turn(turn):
            continue
        parts = [constants[name] for name in node.input if name in constants and len(readers[name]) == 1]
        if len(parts) < len(node.input) or len(parts[0].dims) != 2:
            continue
        for part in parts:
            if len(part.dims) == 2:
                part.CopyFrom(turned(part))
        for attribute in node.attribute:
            if attribute.name == "axis":
                attribute.i = 1 - attribute.i % 2
        for reader in readers[turn.output[0]]:
            for k, name in enumerate(reader.input):
                reader.input[k] = node.output[0] if name == turn.output[0] else name
        dropped.append(turn)
        turned_values.add(node.output[0])
    kept = [node for node in graph.node if not any(node is one for one in dropped)]
    del graph.node[:]
    graph.node.extend(kept)
    return turned_values


def only_reader(node: Any, readers: dict[str, list[Any]], outputs: set[str]) -> Any:
    """The one node that reads what ``node`` makes."""
    found = readers.get(node.output[0], []) if node.output[0] not in outputs else []
    return found[0] if len(found) == 1 and found[0].output[0] not in outputs else None


def is_plain_turn(node: Any) -> bool:
    """A transposition of a matrix."""
    permuted = next((list(item.ints) for item in node.attribute if item.name == "perm"), [1, 0])
    return node.op_type == "Transpose" and permuted == [1, 0]


def turned(tensor: Any) -> Any:
    """The transposed matrix, of the same type."""
    values = np.ascontiguousarray(numpy_helper.to_array(tensor).T)
    bits = BELOW_A_BYTE.get(tensor.data_type)
    raw = values.tobytes() if bits is None else stream(values.astype(np.int8), bits).tobytes()
    return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tuple(reversed(tensor.dims)), raw_data=raw)
