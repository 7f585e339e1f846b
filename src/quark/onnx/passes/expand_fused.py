"""Operators that ONNX Runtime fuses layers into become the layers again (ExpandFused).

    FusedConv, FusedGemm                  →  Conv (Add) or Gemm, then the activation function
    FusedMatMul, TransposeMatMul          →  MatMul; transposition and factor go into a constant, or stand beside it
    BiasGelu, FastGelu with a bias        →  Add, then Gelu or FastGelu
    QuickGelu                             →  x · Sigmoid(α x)
    Attention                             →  one MatMul for query, key and value, Add, Split, MultiHeadAttention
    EmbedLayerNormalization               →  Gather of each table, Add, LayerNormalization

Files that ``SessionOptions.optimized_model_filepath``, ONNX Runtime's transformer optimizer or Optimum have written
hold them. No quantized kernel takes their place, so what they hold would stay float; where it stays float anyway, ONNX
Runtime fuses it again. Source: ONNX Runtime, "Contrib operators".

Not handled, told as a reason: caches, rotary positions and masks of ends and beginnings of Attention; batch axes that
FusedMatMul transposes; operands of unknown rank that it transposes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.surgery import (
    Names,
    attribute,
    constant_array,
    float_attribute,
    floats_attribute,
    input_at,
    int_attribute,
    ints_attribute,
)
from quark.ir.walk import nodes_within
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import NodeWriter, rewrite_each

MICROSOFT = "com.microsoft"
_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_GEMM = ("alpha", "beta", "transA", "transB")
#: Activation function -> its parameters, in the order in which FusedConv lists them.
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "Clip": ("min", "max"),
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
}


def run(model: ir.Model) -> PassReport:
    """Write every fused operator out, in place."""

    def look(node: ir.Node) -> ir.Node | str:
        return ROWS[node.op_type].why_not(node) or node

    def write(node: ir.Node, _: ir.Node, names: Names) -> None:
        row = ROWS[node.op_type]
        row.expand(NodeWriter(node, row.layer, names), node)

    nodes = [node for node in nodes_within(model.graph) if _is_fused(node)]
    return rewrite_each(model, "expand_fused", nodes, look, write)


def _is_fused(node: ir.Node) -> bool:
    alone = node.op_type == "FastGelu" and input_at(node, 1) is None
    return node.domain == MICROSOFT and node.op_type in ROWS and not alone


def _kept(node: ir.Node, names: Sequence[str]) -> dict[str, Any]:
    return {name: attribute(node, name) for name in names}


def _used(node: ir.Node, position: int) -> bool:
    value = node.outputs[position] if position < len(node.outputs) else None
    return value is not None and (bool(value.uses()) or value.is_graph_output())


# ---- layers with an activation function ------------------------------------------------------------------------------


def _unknown_function(node: ir.Node) -> str | None:
    name = attribute(node, "activation", "Relu")
    return None if name in _FUNCTIONS else f"its activation function is {name}"


def _function(writer: NodeWriter, value: ir.Value, parameters: Sequence[float]) -> None:
    """The activation function of a fused layer, with its parameters in their order."""
    name = str(attribute(writer.node, "activation", "Relu"))
    given: dict[str, Any] = dict(zip(_FUNCTIONS[name], parameters, strict=False))
    if name == "Clip":
        bounds = [writer.constant(np.array(given[one], np.float32), one) for one in _FUNCTIONS[name]]
        writer.add(name, [value, *bounds])
    else:
        writer.add(name, [value], given)
    writer.stand_for()


def _conv(writer: NodeWriter, node: ir.Node) -> None:
    made = writer.add("Conv", [input_at(node, position) for position in range(3)], _kept(node, _CONV))
    if (other := input_at(node, 3)) is not None:
        made = writer.add("Add", [made, other])
    _function(writer, made, floats_attribute(node, "activation_params"))


def _gemm(writer: NodeWriter, node: ir.Node) -> None:
    made = writer.add("Gemm", node.inputs, _kept(node, _GEMM))
    names = ("activation_alpha", "activation_beta")
    _function(writer, made, [float_attribute(node, name, 0.0) for name in names if name in node.attributes])


# ---- products --------------------------------------------------------------------------------------------------------


def _no_product(node: ir.Node) -> str | None:
    if any(int_attribute(node, name, 0) for name in ("transBatchA", "transBatchB")):
        return "it transposes the axes of the batch"
    for position, name in enumerate(("transA", "transB")):
        value = node.inputs[position]
        if int_attribute(node, name, 0) and (value is None or value.shape is None):
            return "the rank of what it transposes is not known"
    return None


def _product(writer: NodeWriter, node: ir.Node) -> None:
    alpha, operands = float_attribute(node, "alpha", 1.0), list[ir.Value | None]()
    for position, name in enumerate(("transA", "transB")):
        value, turned = node.inputs[position], bool(int_attribute(node, name, 0))
        array = constant_array(value)
        if array is not None and (turned or alpha != 1.0):
            array = np.swapaxes(array, -1, -2) if turned and array.ndim > 1 else array
            scaled = (array * np.asarray(alpha, array.dtype)).astype(array.dtype)
            value, alpha = writer.constant(np.ascontiguousarray(scaled), f"operand_{position}"), 1.0
        elif turned and value is not None and value.shape is not None and len(value.shape) > 1:
            axes = list(range(len(value.shape)))
            value = writer.add("Transpose", [value], {"perm": [*axes[:-2], axes[-1], axes[-2]]})
        operands.append(value)
    made = writer.add("MatMul", operands)
    if alpha != 1.0:
        kind = ir.DataType.FLOAT if node.outputs[0].dtype is None else node.outputs[0].dtype
        writer.add("Mul", [made, writer.constant(np.array(alpha, kind.numpy()), "alpha")])
    writer.stand_for()


# ---- activation functions --------------------------------------------------------------------------------------------


def _with_bias(writer: NodeWriter, node: ir.Node) -> None:
    summed = writer.add("Add", node.inputs[:2])
    writer.add(writer.layer, [summed], domain=MICROSOFT)
    writer.stand_for()


def _quick_gelu(writer: NodeWriter, node: ir.Node) -> None:
    x, alpha = node.inputs[0], float_attribute(node, "alpha", 1.702)
    inner = x
    if alpha != 1.0 and x is not None:
        kind = x.dtype or node.outputs[0].dtype or ir.DataType.FLOAT
        inner = writer.add("Mul", [x, writer.constant(np.array(alpha, kind.numpy()), "alpha")])
    writer.add("Mul", [x, writer.add("Sigmoid", [inner])])
    writer.stand_for()


# ---- transformers ----------------------------------------------------------------------------------------------------


def _no_attention(node: ir.Node) -> str | None:
    weight, mask = constant_array(input_at(node, 1)), input_at(node, 3)
    if weight is None or weight.ndim != 2:
        return "its weights are computed"
    if input_at(node, 4) is not None or input_at(node, 6) is not None or _used(node, 1):
        return "it has a cache"
    if int_attribute(node, "do_rotary", 0):
        return "it turns positions"
    if mask is None or (mask.shape is not None and len(mask.shape) in (2, 3)):
        return None
    maker = mask.producer()
    counted = maker is not None and maker.op_type in ("ReduceSum", "EmbedLayerNormalization")
    return None if counted else "its mask has another form than one entry for each position"


def _attention(writer: NodeWriter, node: ir.Node) -> None:
    weight = constant_array(node.inputs[1])
    width = 0 if weight is None else weight.shape[1]
    made = writer.add("MatMul", node.inputs[:2])
    if (bias := input_at(node, 2)) is not None:
        made = writer.add("Add", [made, bias])
    parts = writer.split(made, ints_attribute(node, "qkv_hidden_sizes") or [width // 3] * 3)
    kept = _kept(node, ("mask_filter_value", "num_heads", "scale", "unidirectional"))
    inputs = [*parts, None, input_at(node, 3), input_at(node, 5)]
    while inputs[-1] is None:
        inputs.pop()
    writer.add("MultiHeadAttention", inputs, kept, MICROSOFT)
    writer.stand_for()


def _no_embedding(node: ir.Node) -> str | None:
    return "it counts a mask that it is not given" if _used(node, 1) and input_at(node, 7) is None else None


def _embedding(writer: NodeWriter, node: ir.Node) -> None:
    ids, segments, words, places, kinds, scale, bias = (input_at(node, position) for position in range(7))
    if _used(node, 1):
        axis = writer.constant(np.array([1], np.int64), "axis")
        one = writer.constant(np.array(1, np.int32), "valid")
        valid = writer.add("Cast", [writer.add("Equal", [input_at(node, 7), one])], {"to": int(ir.DataType.INT32)})
        writer.add("ReduceSum", [valid, axis], {"keepdims": 0})
        writer.stand_for(1)
    summed = writer.add("Gather", [words, ids])
    positions = input_at(node, 8) or _counted(writer, ids)
    summed = writer.add("Add", [summed, writer.add("Gather", [places, positions])])
    if segments is not None and kinds is not None:
        summed = writer.add("Add", [summed, writer.add("Gather", [kinds, segments])])
    if _used(node, 2):
        writer.stand_for(2)
    epsilon = float_attribute(node, "epsilon", 1e-12)
    writer.add("LayerNormalization", [summed, scale, bias], {"axis": -1, "epsilon": epsilon})
    writer.stand_for()


def _counted(writer: NodeWriter, ids: ir.Value | None) -> ir.Value:
    """0, 1, … along the second axis."""
    zero, one = (writer.constant(np.array(number, np.int64), f"number_{number}") for number in (0, 1))
    length = writer.add("Gather", [writer.add("Shape", [ids]), one])
    return writer.add("Range", [zero, length, one])


@dataclass(frozen=True)
class _Row:
    """The layer that keeps the name, the reason why a node stays, and what writes it out."""

    layer: str
    expand: Callable[[NodeWriter, ir.Node], None]
    why_not: Callable[[ir.Node], str | None] = lambda node: None


ROWS = {
    "Attention": _Row("MatMul", _attention, _no_attention),
    "BiasGelu": _Row("Gelu", _with_bias),
    "EmbedLayerNormalization": _Row("LayerNormalization", _embedding, _no_embedding),
    "FastGelu": _Row("FastGelu", _with_bias),
    "FusedConv": _Row("Conv", _conv, _unknown_function),
    "FusedGemm": _Row("Gemm", _gemm, _unknown_function),
    "FusedMatMul": _Row("MatMul", _product, _no_product),
    "QuickGelu": _Row("Sigmoid", _quick_gelu),
    "TransposeMatMul": _Row("MatMul", _product, _no_product),
}
