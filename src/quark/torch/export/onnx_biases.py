"""Biases that keep ONNX Runtime from quantizing what the model computes in float.

    Conv(Q/DQ(x), W, bias)   →   Conv(Q/DQ(x), W, Mul(DequantizeLinear(mantissas), powers of two))

Where a Conv, ConvTranspose or Gemm stands between quantized activations, ONNX Runtime (WeightBiasQuantization, 1.31)
quantizes what is float there when it opens the model: a float weight, or one that is decoded by other operators than
DequantizeLinear, becomes int8 with one scale; a bias becomes int32 at scale input x weight, and is cut off where that
does not fit, as in a channel whose weights are all but zero (a batch norm that let it die, folded). An int32 bias is
taken for codes at that scale, whatever its own is. Without a bias, the scales of a weight are taken for those of the
outputs, along whatever axis they lie. It leaves layers alone whose bias is neither a constant nor codes. So the bias is
computed: from its 24 bits and its exponents, which gives the same value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from quark.dataclass import dataclass
from quark.numerics.affine import LARGEST_BIAS

LAYERS = ("Conv", "ConvTranspose", "Gemm")
MANTISSA = 24


@dataclass(frozen=True)
class Sum:
    """A layer and the node that adds its bias: itself, or an Add behind a MatMul.

    Attributes:
        layer, node: the two.
        place: of the bias among the inputs of ``node``.
        bias: its values; None: it has none.
        scale: of its codes; None: it is a constant.
    """

    layer: Any
    node: Any
    place: int
    bias: np.ndarray | None
    scale: np.ndarray | None = None


def keep_biases(graph: Any) -> None:
    """Let the biases of ``graph`` (a GraphProto) be computed where ONNX Runtime would change them or the weights."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    made: dict[str, Any] = {}
    for one in sums_of(graph, makers, constants):
        if is_changed(one, makers, constants):
            bias = np.zeros(width_of(one.layer, graph), np.float32) if one.bias is None else one.bias
            if bias.size and np.isfinite(bias).all():
                name = f"{one.layer.output[0]}.bias" if one.bias is None else one.node.input[one.place]
                nodes = made.setdefault(name, computed(bias, f"{name}.computed", graph))
                one.node.input.extend([""] * (one.place + 1 - len(one.node.input)))
                one.node.input[one.place] = nodes[-1].output[0]
    nodes = [node for group in made.values() for node in group]
    nodes += graph.node
    del graph.node[:]
    graph.node.extend(nodes)


def sums_of(graph: Any, makers: dict[str, Any], constants: dict[str, Any]) -> Iterator[Sum]:
    """All layers whose bias is a constant, kept as codes, or missing."""
    for node in graph.node:
        layer, places = node, range(2, 3)
        if node.op_type == "Add":
            products = [makers[name] for name in node.input if name in makers and makers[name].op_type == "MatMul"]
            layer, places = next(iter(products), None), range(2)
        elif node.op_type not in LAYERS:
            continue
        values = {k: value_of(node.input[k], makers, constants) for k in places if k < len(node.input)}
        kept = [Sum(layer, node, k, *value) for k, value in values.items() if value is not None]
        if layer is not None and (kept or (layer is node and not any(node.input[2:3]))):
            yield kept[0] if kept else Sum(layer, node, 2, None)


def value_of(
    name: str, makers: dict[str, Any], constants: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray | None] | None:
    """A constant, and the scale where it is kept as codes; None for what is computed."""
    if name in constants:
        return numpy_helper.to_array(constants[name]), None
    scale = scale_of(makers.get(name), constants)
    if scale is None or makers[name].input[0] not in constants:
        return None
    return numpy_helper.to_array(constants[makers[name].input[0]]).astype(np.float32) * scale.astype(np.float32), scale


def is_changed(one: Sum, makers: dict[str, Any], constants: dict[str, Any]) -> bool:
    """Whether ONNX Runtime would quantize the weight of a layer, read its scales wrongly, or change its bias."""
    data, weight = (makers.get(name) for name in one.layer.input[:2])
    factor, scales = scale_of(data, constants), scale_of(weight, constants)
    if factor is None:
        return False
    if scales is None:
        return one.layer.input[1] in constants or depends_on_constants(weight, makers, constants)
    product = factor.max() * scales
    read_wrongly = (
        scales.ndim == 1 and one.layer.op_type != "MatMul" and number(weight, "axis", 1) != axis_of(one.layer)
    )
    return read_wrongly or (one.scale is not None and not alike(one.scale, product)) or not fits(one.bias, product)


def axis_of(layer: Any) -> int:
    """Along which the outputs of a layer lie in its weight."""
    if layer.op_type == "Gemm":
        return 1 - number(layer, "transB", 0)
    return int(layer.op_type == "ConvTranspose")


def alike(scale: np.ndarray, product: np.ndarray) -> bool:
    """Whether codes at ``scale`` are those at the product of scales, for which a kernel takes them."""
    sizes = {scale.size, product.size} - {1}
    return len(sizes) < 2 and bool(np.allclose(scale, product, rtol=1e-5, atol=0))


def number(node: Any, name: str, default: int) -> int:
    """An attribute of a node."""
    return next((int(one.i) for one in node.attribute if one.name == name), default)


def scale_of(node: Any, constants: dict[str, Any]) -> np.ndarray | None:
    """The scale of a DequantizeLinear; None for other nodes."""
    if node is None or node.op_type != "DequantizeLinear" or node.input[1] not in constants:
        return None
    return np.asarray(numpy_helper.to_array(constants[node.input[1]]), np.float64)


def fits(bias: np.ndarray | None, scale: np.ndarray) -> bool:
    """Whether each channel of a bias fits its scale; where they do not belong together, whether all fit the least."""
    if bias is None:
        return True
    channels = scale.reshape(-1)
    least = channels if channels.size == bias.size else channels.min(initial=np.inf)
    return bool((np.abs(bias.reshape(-1).astype(np.float64)) <= LARGEST_BIAS * least).all())


def depends_on_constants(node: Any, makers: dict[str, Any], constants: dict[str, Any]) -> bool:
    """Whether ONNX Runtime can compute a node when it opens the model."""
    if node is None:
        return False
    return all(
        name in constants or depends_on_constants(makers.get(name), makers, constants) for name in node.input if name
    )


def computed(bias: np.ndarray, name: str, graph: Any) -> list[Any]:
    """Nodes that give ``bias``; the last one has its value."""
    _, exponents = np.frexp(bias.astype(np.float64))
    powers = exponents - MANTISSA
    codes = np.rint(np.ldexp(bias.astype(np.float64), -powers)).astype(np.int32)
    scale, whole = np.asarray(1, np.float32), np.exp2(powers).astype(np.float32)
    for kind, value in (("codes", codes), ("scale", scale), ("powers", whole)):
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), f"{name}.{kind}"))
    read = helper.make_node("DequantizeLinear", [f"{name}.codes", f"{name}.scale"], [f"{name}.read"], f"{name}.read")
    return [read, helper.make_node("Mul", [f"{name}.read", f"{name}.powers"], [name], name)]


def width_of(layer: Any, graph: Any) -> int:
    """How many values the bias of a layer without one would have; 0 where the graph does not say it."""
    axis = -1 if layer.op_type == "Gemm" else 1
    for value in (*graph.value_info, *graph.output):
        dims = value.type.tensor_type.shape.dim
        if value.name == layer.output[0] and len(dims) > 1:
            return int(dims[axis].dim_value)
    return 0
