"""Copies that make ONNX Runtime compute what the file says.

    Conv(Q/DQ(x), W, b)   →   Conv(Max(Q/DQ(x)), W, b)

Of a Conv, ConvTranspose or Gemm between quantized activations ONNX Runtime (1.31) changes, when it opens the model,

* a float weight, or one that is decoded by other operators than DequantizeLinear: int8 with one scale,
* a float bias: int32 at scale input x weight, cut off where that does not fit, as in a channel whose weights are all
  but zero (a batch norm that let it die, folded),
* an int32 bias: taken for codes at that scale, whatever its own is,
* scales of a weight: taken for those of the outputs, along whatever axis they lie.

A ``Max`` of one tensor, a copy that it neither removes nor looks through, stops it, as in the ONNX flow
(``quark.onnx.qdq.runtime_faults``, which works on the graphs of that flow and knows how their biases came about). A
MatMul becomes a Gemm with the Add behind it: the copy stands between the two, since one in front would let ONNX Runtime
round the inputs by its own choice (MatMulNBits).

It also drops a Clip whose bounds are that of the codes behind it but for 1.2e-7, which is more than a step of tiny
activations: a copy between the two stops that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from quark.numerics.affine import LARGEST_BIAS, loses_clip

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
        elif is_dropped(known.makers.get(node.input[0]) if node.input else None, node, known):
            node.input[0] = copies.setdefault(node.input[0], f"{node.input[0]}.copy")
    nodes = []
    for node in graph.node:
        nodes.append(node)
        nodes += [helper.make_node("Max", [one], [copies[one]], copies[one]) for one in node.output if one in copies]
    del graph.node[:]
    graph.node.extend(nodes)


def is_dropped(clip: Any, node: Any, known: Graph) -> bool:
    """Whether ONNX Runtime drops the Clip in front of a QuantizeLinear, and with it what it does."""
    if clip is None or clip.op_type != "Clip" or node.op_type != "QuantizeLinear":
        return False
    given = [known.value(name) if name else None for name in (*clip.input[1:], "", "")]
    bounds = -np.inf if given[0] is None else given[0].min(), np.inf if given[1] is None else given[1].max()
    scale, zero = ([*map(known.value, node.input[1:3]), None])[:2]
    return loses_clip((float(bounds[0]), float(bounds[1])), scale, zero)


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
    data, weight = (known.scale(name) for name in layer.input[:2])
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
