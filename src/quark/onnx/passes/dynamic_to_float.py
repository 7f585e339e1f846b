"""A dynamically quantized model becomes a float one.

    x → DynamicQuantizeLinear → MatMulInteger, ConvInteger → Cast → Mul(scales)     integers, scales of every run
    x → MatMul, Conv → Mul(1 · scales of weights)                                    the same in float

The codes of a weight less their zero point become its floats; its scale stays where it was multiplied. A
DynamicQuantizeLSTM of ONNX Runtime becomes an LSTM.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import (
    Names,
    add_initializer,
    bypass,
    constant_array,
    has_array,
    input_at,
    int_attribute,
    nodes_of,
    prune,
)
from quark.ir.walk import nodes_within

#: Integer operator -> the float one.
_FLOAT = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}
#: Position of a weight of DynamicQuantizeLSTM -> that of its scale; the zero point follows it.
_SCALES = {1: 8, 2: 10}
#: How many inputs an LSTM has.
_LSTM = 8
LEFT = "its codes are no constants, or its sums are read as integers"


def run(model: ir.Model) -> tuple[int, tuple[str, ...]]:
    """Rewrite ``model`` in place.

    Returns:
        How many nodes became float, and why others did not.
    """
    integers, sources = _convertible(model)
    names, lstms = Names(model), _lstms(model)
    for node in integers:
        _become_float(node, model, names)
    for source in sources:
        _leave(source, model, names)
    for node in lstms:
        _become_lstm(node, model, names)
    return len(integers) + len(lstms), tuple(f"{node.name!r} stays: {LEFT}" for node in left(model))


def left(model: ir.Model) -> list[ir.Node]:
    """The nodes that compute with codes and that ``run`` does not make float."""
    done, kinds = {*_convertible(model)[0], *_lstms(model)}, {*_FLOAT, "DynamicQuantizeLSTM"}
    nodes = nodes_within(model.graph)
    return [node for node in nodes if node.op_type in kinds and node not in done]


def _lstms(model: ir.Model) -> list[ir.Node]:
    nodes = [node for node in nodes_within(model.graph) if node.op_type == "DynamicQuantizeLSTM"]
    parts = [position + k for position in _SCALES.values() for k in (0, 1)]
    return [one for one in nodes if all(has_array(input_at(one, k)) for k in (*_SCALES, *parts))]


def _convertible(model: ir.Model) -> tuple[list[ir.Node], set[ir.Node]]:
    """The integer nodes whose operands are all known, and the DynamicQuantizeLinear that nothing else reads."""
    integers, sources = nodes_of(model, *_FLOAT), set(nodes_of(model, "DynamicQuantizeLinear"))
    while True:
        integers = [node for node in integers if all(_known(node, slot, sources) for slot in (0, 1)) and _is_cast(node)]
        kept = {one for one in sources if all(node in integers for node in _readers(one, 0) + _readers(one, 2))}
        if kept == sources:
            return integers, sources
        sources = kept


def _readers(node: ir.Node, output: int) -> list[ir.Node]:
    return [use.node for use in node.outputs[output].uses()]


def _known(node: ir.Node, slot: int, sources: set[ir.Node]) -> bool:
    """Whether an operand is a constant, or what one of ``sources`` makes, with its own zero point."""
    value, point = input_at(node, slot), input_at(node, slot + 2)
    if value is not None and value.producer() in sources:
        return point is not None and point.producer() is value.producer()
    return has_array(value) and (point is None or has_array(point))


def _is_cast(node: ir.Node) -> bool:
    """Whether everything that reads a sum of products makes a float of it."""
    casts = _readers(node, 0)
    return not node.outputs[0].is_graph_output() and all(
        one.op_type == "Cast" and int_attribute(one, "to", 0) == ir.DataType.FLOAT for one in casts
    )


def _become_float(node: ir.Node, model: ir.Model, names: Names) -> None:
    taken = []
    for slot in (0, 1):
        value, codes = input_at(node, slot), constant_array(input_at(node, slot))
        producer = None if value is None else value.producer()
        if codes is None and producer is not None:
            taken.append(producer.inputs[0])
            continue
        floats, point = np.asarray(codes, np.float32), constant_array(input_at(node, slot + 2))
        zero = np.asarray(0 if point is None else point, np.float32)
        if node.op_type == "ConvInteger":  # one for all, or one per channel of the first axis
            zero = zero.reshape(-1, *[1] * (floats.ndim - 1))
        name = names.fresh(f"{'' if value is None else value.name}_float")
        taken.append(add_initializer(model.graph, floats - zero, name))
    node.op_type = _FLOAT[node.op_type]
    node.resize_inputs(2)
    for slot, value in enumerate(taken):
        node.replace_input_with(slot, value)
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    for cast in _readers(node, 0):
        bypass(cast, node.outputs[0])


def _leave(source: ir.Node, model: ir.Model, names: Names) -> None:
    """Nothing is quantized any more: the scale is 1."""
    one = add_initializer(model.graph, np.array(1, np.float32), names.fresh(f"{source.name}_one"))
    source.outputs[1].replace_all_uses_with(one, replace_graph_outputs=True)
    prune(source)


def _become_lstm(node: ir.Node, model: ir.Model, names: Names) -> None:
    for slot, part in _SCALES.items():
        codes, scale, point = (constant_array(input_at(node, k)) for k in (slot, part, part + 1))
        shape = (len(np.asarray(codes)), 1, -1)
        floats = np.asarray(codes, np.float32) - np.asarray(point, np.float32).reshape(shape)
        floats = (floats * np.asarray(scale, np.float32).reshape(shape)).transpose(0, 2, 1)
        name = names.fresh(f"{node.name}_{'WR'[slot - 1]}")
        node.replace_input_with(slot, add_initializer(model.graph, np.ascontiguousarray(floats), name))
    node.op_type, node.domain = "LSTM", ""
    node.resize_inputs(_LSTM)
