"""Masks: constants with one very large number (or infinity) that decide which values count.

Whatever carries one stays float (``numerics.masks`` says why), from the node that puts it in to the one that makes
small numbers of it (a Softmax, mostly; the MaxPool behind a Pad of -infinity).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.numerics.masks import is_mask
from quark.onnx.graph.surgery import constant_array, is_constant, tensor_attribute
from quark.onnx.qdq.decoding import LAYERS
from quark.onnx.qdq.op_rules import MOVES_VALUES
from quark.onnx.qdq.slots import is_float

#: Operators that may put a mask into a tensor.
_PUTS_IN = frozenset(["Add", "Concat", "Min", "Mul", "Pad", "ScatterElements", "ScatterND", "Sub", "Where"])
#: Operators whose results are small numbers again.
_ENDS = LAYERS | frozenset(["Exp", "HardSigmoid", "Sigmoid", "Softmax", "Tanh"])
_SIZE_LIMIT = 1 << 24
_NOTHING = np.zeros(0, np.float32)


def masked_tensors(model: ir.Model) -> tuple[set[ir.Node], set[ir.Value]]:
    """The nodes that read a mask or a tensor that carries one, and the tensors that carry one."""
    nodes, values = set[ir.Node](), set[ir.Value]()
    for node in model.graph:
        if reads_mask(node) or any(value in values for value in node.inputs):
            nodes.add(node)
            if node.op_type not in _ENDS and not _pools_padding(node):
                values.update(value for value in node.outputs if is_float(value))
    return nodes, values


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


def _constant_behind(value: ir.Value | None) -> np.ndarray:
    """The float constant that a tensor takes its values from, through operators that only move them; else nothing."""
    while value is not None and not is_constant(value):
        producer = value.producer()
        if producer is not None and producer.op_type == "ConstantOfShape":
            filler = tensor_attribute(producer, "value")
            return filler.numpy() if is_float(value) and filler is not None else _NOTHING
        if producer is None or producer.op_type not in MOVES_VALUES or not producer.inputs:
            return _NOTHING
        value = producer.inputs[0]
    numbers = constant_array(value)
    return numbers if numbers is not None and is_float(value) and numbers.size <= _SIZE_LIMIT else _NOTHING
