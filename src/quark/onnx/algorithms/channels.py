"""The channels of a layer's weight, whatever the operator: which axis makes them, which reads them.

A layer *makes* channels (rows of its weight by output channel) and *reads* channels (by input channel). For a depthwise
convolution both are the same axis.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.in_file import InFile
from quark.ir.surgery import (
    add_initializer,
    constant_array,
    constant_shape,
    float_attribute,
    has_array,
    in_memory,
    input_at,
    int_attribute,
    set_constant,
    set_input,
    sole_consumer,
)

#: Operators whose channels can be scaled.
LAYERS = ("Conv", "ConvTranspose", "Gemm")


@dataclass(frozen=True)
class ChannelLayer:
    """A Conv, ConvTranspose or Gemm with constant weights.

    Attributes:
        node: the operator.
        made: axis of the weight along which the output channels lie.
        read: axis along which the input channels lie; ``made`` again for a depthwise convolution.
    """

    node: ir.Node
    made: int
    read: int

    @property
    def depthwise(self) -> bool:
        """Whether channel c of the output depends on channel c of the input alone."""
        return self.made == self.read

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return constant_shape(input_at(self.node, 1)) or ()

    @property
    def weight(self) -> np.ndarray:
        """The weight; read only."""
        return np.asarray(constant_array(input_at(self.node, 1)))

    @property
    def bias(self) -> np.ndarray | None:
        """The bias; read only."""
        return constant_array(input_at(self.node, 2))

    def read_in(self) -> None:
        """Take the weight out of the model file, for who looks at it and then changes it."""
        value = input_at(self.node, 1)
        if value is not None and isinstance(value.const_value, InFile):
            value.const_value = in_memory(value.const_value, str(value.name))

    def rows(self, axis: int) -> np.ndarray:
        """[channels, n]: the weights of every channel along ``axis``."""
        weight = np.moveaxis(self.weight, axis, 0)
        return weight.reshape(weight.shape[0], -1)

    def scale_made(self, s: np.ndarray) -> None:
        """Multiply weight and bias of output channel c by s[c]."""
        _scale(self.node, 1, self.made, s)
        if self.bias is not None:
            _scale(self.node, 2, -1, s)

    def scale_weight(self, s: np.ndarray) -> None:
        """Multiply the weights of output channel c by s[c], the bias stays."""
        _scale(self.node, 1, self.made, s)

    def scale_read(self, s: np.ndarray) -> None:
        """Multiply the weights that read channel c by s[c]."""
        _scale(self.node, 1, self.read, s)


def layer_of(node: ir.Node | None) -> ChannelLayer | None:
    """The layer that a node is; ``None`` for other operators, computed weights, and grouped convolutions."""
    if node is None or node.domain not in ("", "ai.onnx") or node.op_type not in LAYERS:
        return None
    weight, bias = constant_shape(input_at(node, 1)), input_at(node, 2)
    if weight is None or len(weight) < 2 or (bias is not None and not has_array(bias)):
        return None
    if node.op_type == "Gemm":
        return _gemm(node, weight)
    groups = int_attribute(node, "group", 1)
    if groups == 1:
        return ChannelLayer(node, 1, 0) if node.op_type == "ConvTranspose" else ChannelLayer(node, 0, 1)
    return ChannelLayer(node, 0, 0) if weight[1] == 1 and weight[0] == groups else None


def _gemm(node: ir.Node, weight: tuple[int, ...]) -> ChannelLayer | None:
    transposed, bias = int_attribute(node, "transB", 0), constant_shape(input_at(node, 2))
    channels = weight[0 if transposed else 1]
    if int_attribute(node, "transA", 0) or (bias is not None and bias[-1:] != (channels,)):
        return None
    if float_attribute(node, "alpha", 1.0) != 1.0 or float_attribute(node, "beta", 1.0) != 1.0:
        return None
    return ChannelLayer(node, 0, 1) if transposed else ChannelLayer(node, 1, 0)


def _scale(node: ir.Node, position: int, axis: int, s: np.ndarray) -> None:
    array = np.asarray(constant_array(input_at(node, position)))
    shape = [1] * array.ndim
    shape[axis] = -1
    scaled = np.multiply(array, s.reshape(shape), out=np.empty(array.shape, array.dtype), casting="same_kind")
    write_operand(node, position, scaled)


def write_operand(node: ir.Node, position: int, array: np.ndarray) -> None:
    """New contents of a constant input: in place where only ``node`` reads it, as a copy of its own otherwise."""
    old = input_at(node, position)
    if old is not None and old.is_initializer() and sole_consumer(old) is node:
        set_constant(old, array)
        return
    if node.graph is None or not isinstance(node.graph, ir.Graph) or old is None:
        raise ValueError(f"the node {node.name!r} belongs to no graph")
    name, number = f"{old.name}_{node.name}", 0
    while name in node.graph.initializers:
        number += 1
        name = f"{old.name}_{node.name}_{number}"
    set_input(node, position, add_initializer(node.graph, array, name))
