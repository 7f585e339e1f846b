"""Divide the channels of a tensor, so that the linear layers that read it can be multiplied: the ground of SmoothQuant
and AWQ in a graph.

The division is free where it goes into what makes the tensor: the scale and bias of a norm, the constant of a product,
the columns of a linear layer (one in front of a product, too: the "up" layer of a gated network). Otherwise one Mul has
to stand in front of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import Names, add_initializer, constant_array, input_at, int_attribute, sole_consumer
from quark.onnx.algorithms.channels import write_operand
from quark.onnx.algorithms.linear import Linear, linear_of

#: (domain, operator) -> the inputs that hold a value per channel of the first output.
NORMS = {
    ("", "LayerNormalization"): (1, 2),
    ("", "RMSNormalization"): (1,),
    ("", "SimplifiedLayerNormalization"): (1,),
    ("com.microsoft", "SkipLayerNormalization"): (2, 3),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): (2,),
}
#: Divides by s [channels], in place.
Divide = Callable[[np.ndarray], None]


def divider(value: ir.Value, layers: Sequence[Linear]) -> Divide | None:
    """What divides the channels of ``value`` in its maker; None: something else reads it, or the maker cannot."""
    node, readers = value.producer(), {layer.node for layer in layers}
    if node is None or value.is_graph_output() or any(use.node not in readers for use in value.uses()):
        return None
    channels = layers[0].weight.shape[1]
    norm = NORMS.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))
    if norm is not None:
        first = node.outputs[0] is value and int_attribute(node, "axis", -1) == -1
        return _constants(node, norm, channels) if first else None
    if (node.domain, node.op_type) == ("", "Mul"):
        found = (_constants(node, (at,), channels) or _maker(node, at, channels) for at in (0, 1))
        return next((one for one in found if one is not None), None)
    return _linear(node, channels)


def _maker(node: ir.Node, position: int, channels: int) -> Divide | None:
    """Divides the linear layer that makes a factor of a product."""
    factor = input_at(node, position)
    maker = None if factor is None or sole_consumer(factor) is not node else factor.producer()
    return None if maker is None else _linear(maker, channels)


def _linear(node: ir.Node, channels: int) -> Divide | None:
    """Divides the columns of a linear layer and its bias."""
    linear, bias = linear_of(node), _constants(node, (2,), channels)
    if linear is None or linear.weight.shape[0] != channels or bias is None:
        return None

    def divide(s: np.ndarray) -> None:
        linear.write(linear.weight / s[:, None])
        bias(s)

    return divide


def _constants(node: ir.Node, positions: tuple[int, ...], channels: int) -> Divide | None:
    """Divides the inputs that are there, if all are constants with an element for every channel on their last axis."""
    there = [position for position in positions if input_at(node, position) is not None]
    arrays = [constant_array(input_at(node, position)) for position in there]
    if any(array is None or array.shape[-1:] != (channels,) for array in arrays):
        return None
    return partial(_divide_constants, node, there)


def _divide_constants(node: ir.Node, positions: Sequence[int], s: np.ndarray) -> None:
    for position in positions:
        array = np.asarray(constant_array(input_at(node, position)))
        write_operand(node, position, (array / s).astype(array.dtype))


def put_in_front(model: ir.Model, names: Names, value: ir.Value, layers: Sequence[Linear], s: np.ndarray) -> ir.Node:
    """One Mul by 1 / s in front of all layers; the node."""
    base = f"{value.name}_smooth"
    scale = add_initializer(model.graph, (1 / s).astype(layers[0].weight.dtype), names.fresh(f"{base}_scale"))
    product = ir.Value(name=names.fresh(base), shape=value.shape, type=value.type)
    node = ir.Node("", "Mul", [value, scale], outputs=[product], name=names.fresh(f"{base}_mul"))
    model.graph.insert_before(layers[0].node, node)
    for layer in layers:
        layer.node.replace_input_with(0, product)
    return node
