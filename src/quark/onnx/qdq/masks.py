"""Masks: constants with one very large number (or infinity) that decide which values count, and inputs that may be so.

Whatever carries one stays float (``numerics.masks`` says why), from the node that puts it in to the one that makes
small numbers of it (a Softmax, mostly; the MaxPool behind a Pad of -infinity). Of an input the samples would tell, but
not what comes later: one that is added to the scores of a Softmax is a mask, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Container
from math import prod

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import constant_array, constant_shape, input_at, is_constant, tensor_attribute
from quark.numerics.masks import is_mask
from quark.onnx.qdq.decoding import LAYERS
from quark.onnx.qdq.op_rules import MOVES_VALUES
from quark.onnx.qdq.slots import is_float

#: Operators that may put a mask into a tensor.
_PUTS_IN = frozenset(["Add", "Concat", "Min", "Mul", "Pad", "ScatterElements", "ScatterND", "Sub", "Where"])
#: Operators whose results are small numbers again.
_ENDS = LAYERS | frozenset(["Exp", "HardSigmoid", "Sigmoid", "Softmax", "Tanh"])
#: Operators between scores that are masked and their Softmax.
_KEEPS_SCORES = MOVES_VALUES | {"Add", "Max"}
#: Operators that mask scores themselves, and the position of the mask.
_MASKED_INSIDE = {"Attention": 3, "MultiHeadAttention": 5}
_SIZE_LIMIT = 1 << 24
_NOTHING = np.zeros(0, np.float32)


def masked_tensors(model: ir.Model, apart: Container[ir.Node] = ()) -> tuple[set[ir.Node], set[ir.Value]]:
    """The nodes that read a mask or a tensor that carries one, and the tensors that carry one.

    Nodes ``apart`` read none: what is far out in their constants is the unit of a channel.
    """
    nodes, values = set[ir.Node](), added_masks(model)
    for node in model.graph:
        if (node not in apart and reads_mask(node)) or any(value in values for value in node.inputs):
            nodes.add(node)
            if node.op_type not in _ENDS and not _pools_padding(node):
                values.update(value for value in node.outputs if is_float(value))
    return nodes, values


def mask_inputs(model: ir.Model) -> set[str]:
    """The names of the float inputs that mask scores, which may be infinite."""
    inside = (input_at(node, _MASKED_INSIDE[node.op_type]) for node in model.graph if node.op_type in _MASKED_INSIDE)
    found = {*added_masks(model), *(source for value in inside if value is not None for source in _inputs(value))}
    return {str(value.name) for value in found}


def added_masks(model: ir.Model) -> set[ir.Value]:
    """Those that are added to scores in the graph."""
    scores = _scores(model)
    added = (_added(node) for node in model.graph if node.op_type == "Add" and node.outputs[0] in scores)
    return {source for value in added if value is not None for source in _inputs(value)}


def _inputs(value: ir.Value) -> set[ir.Value]:
    """The float inputs that a tensor is computed from without a layer, but for those that a layer reads, too."""
    return {source for source in _sources(value) or () if is_float(source) and not _is_multiplied(source)}


def _added(node: ir.Node) -> ir.Value | None:
    """What an Add puts into scores: the side that no layer makes, where one makes the other; else None."""
    free = [value for value in node.inputs if value is not None and _sources(value) is not None]
    return free[0] if len(free) == 1 else None


def _sources(value: ir.Value) -> set[ir.Value] | None:
    """The inputs of the graph that a tensor is computed from; None where a layer or a body of a loop is among it."""
    found, seen, ahead = set[ir.Value](), set[ir.Value](), [value]
    while ahead:
        one = ahead.pop()
        maker = one.producer()
        if one in seen or is_constant(one):
            continue
        seen.add(one)
        if maker is None:
            found.add(one)
        elif maker.op_type in LAYERS or any(
            attribute.type == ir.AttributeType.GRAPH for attribute in maker.attributes.values()
        ):
            return None
        else:
            ahead += [value for value in maker.inputs if value is not None]
    return found


def _is_multiplied(value: ir.Value) -> bool:
    """Whether a layer reads a tensor, or what it is moved to."""
    return any(
        (use.node.op_type in LAYERS and use.idx != _MASKED_INSIDE.get(use.node.op_type))
        or (use.node.op_type in MOVES_VALUES and _is_multiplied(use.node.outputs[0]))
        for use in value.uses()
    )


def _scores(model: ir.Model) -> set[ir.Value]:
    """The tensors that nothing but Softmax reads, perhaps behind operators that keep scores what they are."""
    found = set[ir.Value]()
    for value in (value for node in reversed(model.graph) for value in node.outputs[:1]):
        readers = [use.node for use in value.uses()]
        if readers and all(
            reader.op_type == "Softmax" or (reader.op_type in _KEEPS_SCORES and reader.outputs[0] in found)
            for reader in readers
        ):
            found.add(value)
    return found


def _pools_padding(node: ir.Node) -> bool:
    """Whether a MaxPool reads what a Pad has put around its input: every window holds a value of the input, too."""
    source = node.inputs[0].producer() if node.op_type == "MaxPool" and node.inputs[0] is not None else None
    return source is not None and source.op_type == "Pad"


def reads_mask(node: ir.Node) -> bool:
    """Whether a node adds, selects, joins or pads with a constant mask, or takes values out of one.

    A mask that is all one finite number keeps its values when it is only moved: one scale covers it.
    """
    if node.op_type in _PUTS_IN:
        return any(is_mask(_constant_behind(value)) for value in node.inputs)
    numbers = _constant_behind(node.inputs[0]) if node.op_type in MOVES_VALUES and node.inputs else _NOTHING
    return is_mask(numbers) and bool(numbers.min() != numbers.max() or np.isinf(numbers.max()))


def _source(value: ir.Value | None) -> ir.Value | None:
    """The tensor that another takes its values from, through operators that only move them."""
    while value is not None and not is_constant(value):
        producer = value.producer()
        if producer is None or producer.op_type not in MOVES_VALUES or not producer.inputs:
            return value
        value = producer.inputs[0]
    return value


def _constant_behind(value: ir.Value | None) -> np.ndarray:
    """The float constant that a tensor takes its values from, through operators that only move them; else nothing."""
    value = _source(value)
    producer = None if value is None else value.producer()
    if producer is not None and producer.op_type == "ConstantOfShape":
        filler = tensor_attribute(producer, "value")
        return filler.numpy() if is_float(value) and filler is not None else _NOTHING
    shape = constant_shape(value)
    numbers = constant_array(value) if shape is not None and prod(shape) <= _SIZE_LIMIT and is_float(value) else None
    return _NOTHING if numbers is None else numbers
