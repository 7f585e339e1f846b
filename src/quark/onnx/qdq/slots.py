"""Questions placement asks of a graph: what is a float tensor, a constant."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import constant_array, input_at, is_constant
from quark.onnx.qdq.index_paths import place_positions
from quark.onnx.qdq.op_rules import OpRule

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)

#: Key of ``ir.Value.meta`` for a range (lo, hi) beyond which the reader of a tensor does not care.
KNOWN_RANGE = "known_range"
#: Key of ``ir.Node.meta`` for the reason why a node that an algorithm has added stays float.
STAYS_FLOAT = "stays_float"


def is_float(value: ir.Value | None) -> bool:
    """Whether a value is a tensor of a type that models compute in, with elements, and no weight that a feed may
    override."""
    if value is None or (value.is_graph_input() and value.is_initializer()):
        return False
    if value.shape is not None and 0 in value.shape:
        return False
    return value.dtype in _FLOATS and isinstance(value.type, ir.TensorType)


def in_float64(node: ir.Node) -> str | None:
    """Why a node that reads float64 stays as it is."""
    wide = any(value is not None and value.dtype == ir.DataType.DOUBLE for value in node.inputs)
    return "it computes in float64: export it in float32" if wide else None


def data_inputs(node: ir.Node, rule: OpRule) -> list[ir.Value]:
    """The float inputs that are activations by the rule; constants among them included."""
    positions: Iterable[int] = rule.data if rule.data is not None else _all_but_places(node)
    chosen = [input_at(node, position) for position in positions]
    weight = weight_input(node, rule)
    if rule.weight is not None and weight is None:
        chosen.append(input_at(node, rule.weight))  # MatMul of two activations
    return [value for value in chosen if value is not None and is_float(value) and value is not weight]


def _all_but_places(node: ir.Node) -> list[int]:
    places = place_positions(node)
    return [position for position in range(len(node.inputs)) if position not in places]


def weight_input(node: ir.Node, rule: OpRule) -> ir.Value | None:
    """The constant weight of a node, if it has one."""
    value = None if rule.weight is None else input_at(node, rule.weight)
    return value if is_float(value) and is_constant(value) else None


def bias_input(node: ir.Node, rule: OpRule) -> ir.Value | None:
    """The constant bias of a node, if it has one."""
    value = None if rule.bias is None else input_at(node, rule.bias)
    return value if is_float(value) and is_constant(value) else None


def leaves_range(node: ir.Node) -> str | None:
    """Why a layout operator may write values beyond those it reads; ``None`` for one that only moves or mixes them."""
    if node.op_type == "Pad" and not pads_with_zero(node):
        return "it pads with a value other than 0"
    if node.op_type != "Resize":
        return None
    if node.attributes.get_string("mode", "nearest") == "cubic":
        return "cubic interpolation overshoots the range of its input"
    if node.attributes.get_string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        return "it extrapolates with a value of its own"
    return None


def pads_with_zero(node: ir.Node) -> bool:
    """Whether a Pad adds nothing but zeros or values that its input already has."""
    value = input_at(node, 2)
    if node.attributes.get_string("mode", "constant") != "constant" or value is None:
        return True
    array = constant_array(value)
    return array is not None and not np.any(array)
