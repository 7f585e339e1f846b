"""Along which axis a constant may have a scale per channel: the one place that knows.

A kernel sums products and multiplies the sum by one scale per output channel. So the scales of a weight must run along
the axis of the output channels, and only a weight may have several: the operand of an Add, a first operand of MatMul or
Gemm, a matrix out of a stack have one scale in every integer kernel. ONNX Runtime 1.31 fuses such a node all the same:
it takes the scales for those of the output channels, or refuses the file. A constant whose scales run otherwise is
therefore *off channel*: it is read in float (``quark.onnx.qdq.emit``), and no bias shares its scales
(``quark.onnx.qdq.biases``).
"""

from __future__ import annotations

import onnx_ir as ir

from quark.config.tensor import TensorSpec
from quark.ir.surgery import int_attribute
from quark.numerics.granularity import Channel
from quark.onnx.qdq.op_rules import GENERIC, OP_RULES, OpRule

#: Types for which ONNX Runtime makes a MatMul integer; that kernel refuses a scale per column of stacked matrices.
FUSED_INTEGERS = ("int8", "uint8")


def weight_axes(node: ir.Node, rule: OpRule) -> tuple[int, int]:
    """(channel axis, reduction axis) of the node's weight."""
    if node.op_type == "Gemm" and int_attribute(node, "transB", 0):
        return rule.reduce_axis, rule.channel_axis
    if node.op_type == "ConvTranspose" and _is_depthwise(node):
        return 0, 1  # [C, 1, …]: every channel is a group of its own, and its sum runs over that one element
    return rule.channel_axis, rule.reduce_axis


def _is_depthwise(node: ir.Node) -> bool:
    """Whether each input channel makes one output channel."""
    shape = tuple((node.inputs[1].shape if node.inputs[1] is not None else None) or ())
    return shape[1:2] == (1,) and shape[0] == int_attribute(node, "group", 1)


def is_off_channel(node: ir.Node, value: ir.Value, spec: TensorSpec) -> bool:
    """Whether no kernel of ``node`` can have the scales of the constant ``value``, one of its inputs."""
    if not isinstance(spec.granularity, Channel):
        return False
    rule = OP_RULES.get(node.op_type, GENERIC)
    positions = [position for position, operand in enumerate(node.inputs) if operand is value]
    return any(_is_off(node, rule, position, value, spec) for position in positions)


def _is_off(node: ir.Node, rule: OpRule, position: int, value: ir.Value, spec: TensorSpec) -> bool:
    if position in (*rule.parameters, rule.bias):
        return False  # nothing is fused there, or (a bias) only what is computed in 32 bits
    rank, granularity = len(value.shape or ()), spec.granularity
    if position != rule.weight or not isinstance(granularity, Channel) or rank == 0:
        return True
    if node.op_type == "MatMul" and rank != 2:
        return rank == 1 or spec.format in FUSED_INTEGERS
    return granularity.axis % rank != weight_axes(node, rule)[0] % rank


def has_channels(bias: ir.Value, weight: ir.Value, axis: int) -> bool:
    """Whether a bias holds the channels of its weight, in every group, on one axis: a scale per channel fits it."""
    shape, channels = tuple(bias.shape or ()), (weight.shape or ())[axis : axis + 1]
    if len(shape) != 1 or not channels or not isinstance(channels[0], int):
        return False
    return isinstance(shape[0], int) and shape[0] >= channels[0] and shape[0] % channels[0] == 0
