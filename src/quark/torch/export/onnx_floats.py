"""Copies in front of layers that ONNX Runtime has to leave in float.

    Conv(Q/DQ(x), W, b)   →   Conv(Max(Q/DQ(x)), W, b)

Of a Conv, ConvTranspose or Gemm behind quantized activations ONNX Runtime (1.31) changes, when it opens the model,

* a float weight, or one that is decoded by other operators than DequantizeLinear: int8 with one scale,
* a float bias: int32 at scale input x weight, cut off where that does not fit, as in a channel whose weights are all
  but zero (a batch norm that let it die, folded),
* an int32 bias: taken for codes at that scale, whatever its own is,
* scales of a weight: taken for those of the outputs, along whatever axis they lie.

A ``Max`` of one tensor, a copy that it neither removes nor looks through, stops it, as it does faults that both flows
meet (``quark.ir.runtime_faults``; how biases came about the ONNX flow knows when it chooses their scales). A MatMul
becomes a Gemm with the Add behind it: the copy stands between the two, since one in front would let ONNX Runtime
round the inputs by its own choice (MatMulNBits).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from quark.ir.runtime_faults import MOVERS
from quark.numerics.affine import LARGEST_BIAS

LAYERS = ("Conv", "ConvTranspose", "Gemm")


class Graph:
    """Constants of a GraphProto by name, and the node that makes each other value."""

    def __init__(self, graph: Any) -> None:
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.makers = {name: node for node in graph.node for name in node.output}

    def scale(self, name: str) -> np.ndarray | None:
        """The scale, float64, of what a DequantizeLinear makes; None of other values."""
        node = self.makers.get(name)
        if node is None or node.op_type != "DequantizeLinear" or node.input[1] not in self.constants:
            return None
        return np.asarray(numpy_helper.to_array(self.constants[node.input[1]]), np.float64)

    def origin(self, name: str) -> str:
        """What ONNX Runtime carries a DequantizeLinear forward from, over operators that only move values."""
        while (node := self.makers.get(name)) is not None and node.op_type in MOVERS:
            name = node.input[0]
        return name

    def is_constant(self, name: str) -> bool:
        """Whether ONNX Runtime can compute a value when it opens the model."""
        waiting, seen = [name], set()
        while waiting:
            one = waiting.pop()
            if not one or one in self.constants or one in seen:
                continue
            if one not in self.makers:
                return False
            seen.add(one)
            waiting += self.makers[one].input
        return True

    def value(self, name: str) -> np.ndarray | None:
        """Of a constant, or of codes that are one; None of what is computed from constants."""
        scale = self.scale(name)
        held = self.constants.get(name if scale is None else self.makers[name].input[0])
        return None if held is None else np.asarray(numpy_helper.to_array(held) * (1 if scale is None else scale))


def keep_floats(graph: Any) -> None:
    """Put the copies into ``graph``, a GraphProto."""
    known, copies = Graph(graph), dict[str, str]()
    for node in graph.node:
        layer, bias = layer_of(node, known)
        if layer is not None and is_changed(layer, bias, known):
            place = 0 if layer is node else list(node.input).index(layer.output[0])
            node.input[place] = copies.setdefault(node.input[place], f"{node.input[place]}.copy")
    nodes = []
    for node in graph.node:
        nodes.append(node)
        nodes += [helper.make_node("Max", [one], [copies[one]], copies[one]) for one in node.output if one in copies]
    del graph.node[:]
    graph.node.extend(nodes)


def layer_of(node: Any, known: Graph) -> tuple[Any, str]:
    """The layer whose bias a node adds, and its name: a layer itself, or an Add behind a MatMul with a constant."""
    if node.op_type in LAYERS:
        return node, next(iter(node.input[2:3]), "")
    made = [known.makers[name] for name in node.input if name in known.makers] if node.op_type == "Add" else []
    layer = next((one for one in made if one.op_type == "MatMul" and known.is_constant(one.input[1])), None)
    others = [name for name in node.input if layer is not None and name not in layer.output]
    return layer, next((name for name in others if known.is_constant(name)), "")


def is_changed(layer: Any, bias: str, known: Graph) -> bool:
    """Whether ONNX Runtime would change a layer whose bias has the name ``bias``, if it has one."""
    data, weight = known.scale(known.origin(layer.input[0])), known.scale(layer.input[1])
    if data is None or not known.is_constant(layer.input[1]):
        return False
    if weight is None or (weight.ndim == 1 and not lies_along_outputs(layer, known)):
        return True
    if not bias or not known.is_constant(bias):
        return False
    product, own, value = data.max() * weight, known.scale(bias), known.value(bias)
    return value is None or (own is not None and not alike(own, product)) or not fits(value, product)


def lies_along_outputs(layer: Any, known: Graph) -> bool:
    """Whether the scales of a weight lie along the axis of the outputs."""
    maker = known.makers[layer.input[1]]
    rank = len(known.constants[maker.input[0]].dims)
    return layer.op_type == "MatMul" or number(maker, "axis", 1) % rank == axis_of(layer)


def axis_of(layer: Any) -> int:
    """Along which the outputs of a layer lie in its weight."""
    if layer.op_type == "Gemm":
        return 1 - number(layer, "transB", 0)
    return int(layer.op_type == "ConvTranspose")


def number(node: Any, name: str, default: int) -> int:
    """An attribute of a node."""
    return next((int(one.i) for one in node.attribute if one.name == name), default)


def alike(scale: np.ndarray, product: np.ndarray) -> bool:
    """Whether codes at ``scale`` are those at the product of scales, for which a kernel takes them."""
    sizes = {scale.size, product.size} - {1}
    return len(sizes) < 2 and bool(np.allclose(scale, product, rtol=1e-5, atol=0))


def fits(bias: np.ndarray, scale: np.ndarray) -> bool:
    """Whether each channel of a bias fits its scale; where they do not belong together, whether all fit the least."""
    channels = scale.reshape(-1)
    least = channels if channels.size == bias.size else channels.min(initial=np.inf)
    return bool((np.abs(bias.reshape(-1).astype(np.float64)) <= LARGEST_BIAS * least).all())
