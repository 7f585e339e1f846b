"""A Relu or Clip disappears where quantization does its work (FoldRelu).

    Conv → Relu → QuantizeLinear  =  Conv → QuantizeLinear        where code 0 of the real line is the smallest code

With asymmetric codes whose smallest one stands for 0, quantizing cuts off what is below; a Clip needs its upper bound
at or above the largest code too. The operator before keeps its name and writes the tensor that the activation function
wrote. Symmetric codes have negative numbers, so nothing happens there.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each
from quark.onnx.graph.surgery import (
    clip_bounds,
    constant_array,
    drop_if_unused,
    label,
    nodes_of,
    sole_consumer,
    take_over,
)
from quark.onnx.passes.clip_to_relu import reach_of

LOWEST = {"INT8": -128, "UINT8": 0, "INT16": -32768, "UINT16": 0}
PRODUCERS = frozenset(["Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Mul", "Sub", "BatchNormalization"])


def run(model: ir.Model) -> PassReport:
    """Rewrite a quantized ``model`` in place; a float model has no place for it."""
    return rewrite_each(model, "fold_relu", nodes_of(model, "Relu", "Clip"), lambda node: why_not(node) or node, _fold)


def _fold(node: ir.Node, *_: object) -> None:
    bounds, source = list(node.inputs[1:]), node.inputs[0]
    if source is not None:
        take_over(source, node.outputs[0])
    for value in bounds:
        drop_if_unused(value)


def why_not(node: ir.Node) -> str | None:
    """The reason why an activation function has to stay, or None."""
    source = node.inputs[0]
    maker = source.producer() if source is not None else None
    if source is None or maker is None or maker.op_type not in PRODUCERS:
        return "it does not follow an operator that computes"
    if sole_consumer(source) is not node or maker.graph is not node.graph:
        return f"the result of {label(maker)} is read by others too"
    output = node.outputs[0]
    reach = reach_of(output)
    if reach is None:
        return "its output is not quantized for every reader"
    if any(not _starts_at_zero(use.node) for use in output.uses()):
        return "the codes behind it have negative numbers"
    bounds = (0.0, float("inf")) if node.op_type == "Relu" else clip_bounds(node)
    if bounds is None or bounds[0] > 0:
        return "its bounds are computed, or its lower bound is above 0"
    largest, step = reach
    return None if largest <= bounds[1] + step / 2 else f"the codes behind it reach {largest:g}, beyond {bounds[1]:g}"


def _starts_at_zero(node: ir.Node) -> bool:
    codes, zero_point = node.inputs[2], constant_array(node.inputs[2])
    name = codes.dtype.name if codes is not None and codes.dtype is not None else ""
    return zero_point is not None and name in LOWEST and int(zero_point.reshape(())) == LOWEST[name]
