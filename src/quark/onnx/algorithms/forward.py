"""Layers of a graph as functions of torch tensors: the operator and the activation function that follows it.

One row per operator. A row returns a function of (input, weight, bias), or ``None`` where an attribute is beyond it;
such a layer is left as it is, with the reason in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.algorithms.reconstruction import Forward, Tensor
from quark.ir.surgery import (
    clip_bounds,
    constant_array,
    float_attribute,
    input_at,
    int_attribute,
    ints_attribute,
)

Function = Callable[[Tensor], Tensor]


def forward_of(node: ir.Node, activation: ir.Node | None, torch: Any) -> Forward | None:
    """The layer and its activation function; ``None`` where one of them is not known."""
    layer = LAYERS[node.op_type](node, torch) if node.op_type in LAYERS else None
    function = (lambda x: x) if activation is None else activation_of(activation, torch)
    if layer is None or function is None:
        return None
    return lambda x, weight, bias: function(layer(x, weight, bias))


def activation_of(node: ir.Node, torch: Any) -> Function | None:
    """An activation function; ``None`` where it is not known."""
    return ACTIVATIONS[node.op_type](node, torch) if node.op_type in ACTIVATIONS else None


# ---- layers ----------------------------------------------------------------------------------------------------------


def _ints(node: ir.Node, name: str, default: Sequence[int]) -> list[int]:
    found = ints_attribute(node, name)
    return list(default) if found is None else found


def _padding(node: ir.Node, weight: Tensor, x: Tensor) -> list[int] | None:
    """(begin…, end…) of every spatial axis under ``auto_pad``."""
    rank, mode = weight.ndim - 2, node.attributes.get_string("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        return _ints(node, "pads", [0] * (2 * rank))
    if mode == "VALID":
        return [0] * (2 * rank)
    strides, dilations = (_ints(node, name, [1] * rank) for name in ("strides", "dilations"))
    begin, end = [], []
    for size, kernel, stride, dilation in zip(x.shape[2:], weight.shape[2:], strides, dilations, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size)
        small, large = total // 2, total - total // 2
        begin.append(large if mode == "SAME_LOWER" else small)
        end.append(small if mode == "SAME_LOWER" else large)
    return begin + end


def _conv(node: ir.Node, torch: Any) -> Forward:
    function, groups = torch.nn.functional, int_attribute(node, "group", 1)
    convolutions = {1: function.conv1d, 2: function.conv2d, 3: function.conv3d}

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rank = weight.ndim - 2
        strides, dilations = (_ints(node, name, [1] * rank) for name in ("strides", "dilations"))
        pads = _padding(node, weight, x) or [0] * (2 * rank)
        begin, end = pads[:rank], pads[rank:]
        if begin != end:
            x, begin = function.pad(x, [side for k in reversed(range(rank)) for side in (begin[k], end[k])]), [0] * rank
        return convolutions[rank](x, weight, bias, strides, begin, dilations, groups)

    return run


def _conv_transpose(node: ir.Node, torch: Any) -> Forward | None:
    if (
        node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "", "VALID")
        or "output_shape" in node.attributes
    ):
        return None
    function, groups = torch.nn.functional, int_attribute(node, "group", 1)
    table = {1: function.conv_transpose1d, 2: function.conv_transpose2d, 3: function.conv_transpose3d}

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rank = weight.ndim - 2
        strides, dilations = (_ints(node, name, [1] * rank) for name in ("strides", "dilations"))
        pads, extra = _ints(node, "pads", [0] * (2 * rank)), _ints(node, "output_padding", [0] * rank)
        # torch takes one padding per axis: what the end has more is cut off
        whole = table[rank](x, weight, bias, strides, 0, extra, groups, dilations)
        cut = [slice(pads[k], whole.shape[k + 2] - pads[k + rank]) for k in range(rank)]
        everywhere = (slice(None), slice(None), *cut)
        return whole[everywhere]

    return run


def _gemm(node: ir.Node, torch: Any) -> Forward:
    alpha, beta = float_attribute(node, "alpha", 1.0), float_attribute(node, "beta", 1.0)
    trans_a, trans_b = int_attribute(node, "transA", 0), int_attribute(node, "transB", 0)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = (x.T if trans_a else x) @ (weight.T if trans_b else weight)
        product = product if alpha == 1.0 else product * alpha
        return product if bias is None else product + (bias if beta == 1.0 else bias * beta)

    return run


def _matmul(node: ir.Node, torch: Any) -> Forward:
    return lambda x, weight, bias: x @ weight


def _instance_norm(node: ir.Node, torch: Any) -> Forward:
    epsilon = float_attribute(node, "epsilon", 1e-5)
    return lambda x, weight, bias: torch.nn.functional.instance_norm(x, weight=weight, bias=bias, eps=epsilon)


def _layer_norm(node: ir.Node, torch: Any) -> Forward:
    epsilon, axis = float_attribute(node, "epsilon", 1e-5), int_attribute(node, "axis", -1)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shape = x.shape[axis % x.ndim :]
        bias = None if bias is None else bias.expand(shape)
        return torch.nn.functional.layer_norm(x, shape, weight.expand(shape), bias, epsilon)

    return run


LAYERS: dict[str, Callable[[ir.Node, Any], Forward | None]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
}
#: Those that are linear in their weight, each of which multiplies an input of its own.
LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")
#: Axis of the output that holds the channels.
CHANNEL_AXIS = {"MatMul": -1, "Gemm": -1, "LayerNormalization": -1}


# ---- activation functions --------------------------------------------------------------------------------------------


def _clip(node: ir.Node, torch: Any) -> Function | None:
    bounds = clip_bounds(node)
    if bounds is None:
        return None
    low, high = (None if np.isinf(side) else float(side) for side in bounds)
    return (lambda x: x) if low is None and high is None else lambda x: torch.clamp(x, low, high)


def _prelu(node: ir.Node, torch: Any) -> Function | None:
    slope = constant_array(input_at(node, 1))
    if slope is None:
        return None
    values = torch.from_numpy(np.array(slope, np.float32))
    return lambda x: torch.where(x >= 0, x, x * values.to(x.device))


def _softmax(node: ir.Node, torch: Any) -> Function:
    axis = int_attribute(node, "axis", -1)
    return lambda x: torch.softmax(x, axis)


def _leaky(node: ir.Node, torch: Any) -> Function:
    alpha = float_attribute(node, "alpha", 0.01)
    return lambda x: torch.nn.functional.leaky_relu(x, alpha)


def _gelu(node: ir.Node, torch: Any) -> Function:
    kind = node.attributes.get_string("approximate", "none")
    return lambda x: torch.nn.functional.gelu(x, approximate=kind)


ACTIVATIONS: dict[str, Callable[[ir.Node, Any], Function | None]] = {
    "Relu": lambda node, torch: torch.relu,
    "Sigmoid": lambda node, torch: torch.sigmoid,
    "Tanh": lambda node, torch: torch.tanh,
    "LeakyRelu": _leaky,
    "PRelu": _prelu,
    "Clip": _clip,
    "Gelu": _gelu,
    "Softmax": _softmax,
}
