"""A Relu or Clip disappears where quantization does its work (FoldRelu).

    Conv → Relu → QuantizeLinear  =  Conv → QuantizeLinear        where code 0 of the real line is the smallest code

With asymmetric codes whose smallest one stands for 0, quantizing cuts off what is below; of a Clip no code may lie
beyond its bounds by more than half a step. The operator before keeps its name and writes the tensor that the activation
function wrote. Symmetric codes have negative numbers, so nothing happens there to a Relu.

ONNX Runtime does the same itself where the lower bound is 0, and at other bounds of a Clip computes in float. It also
does where codes reach beyond a bound, as those of power-of-two scales and of tensors that share a scale do. There the
result before is rounded to the same codes first, which changes nothing behind them (two convolutions of 64 channels
665 µs to 161),

    Conv → Clip → QuantizeLinear  =  Conv → QuantizeLinear → DequantizeLinear → Clip → QuantizeLinear

as rounding is monotonic: q(clip(q(x))) is q(x), but between q of one bound and q of the other, and so is q(clip(x)).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import (
    Names,
    clip_bounds,
    constant_array,
    drop_if_unused,
    input_at,
    label,
    nodes_of,
    sole_consumer,
    take_over,
)
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import NodeWriter, rewrite_each
from quark.onnx.passes.clip_to_relu import reach_of

Below = Annotated[bool, "Only each Clip with a lower bound below 0, and integers before what has to stay."]
LOWEST = {"INT8": -128, "UINT8": 0, "INT16": -32768, "UINT16": 0}
#: Those that ONNX Runtime computes in integers, between DequantizeLinear and QuantizeLinear of 8 bits.
_INTEGER = frozenset(["Conv", "Gemm", "MatMul", "Add", "Mul"])
_EIGHT_BITS = (ir.DataType.INT8, ir.DataType.UINT8)
PRODUCERS = frozenset(["Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Mul", "Sub", "BatchNormalization", "Clip"])


def run(model: ir.Model, below: Below = False) -> PassReport:
    """Rewrite a quantized ``model`` in place; a float model has no place for it."""
    all_of = reversed(list(nodes_of(model, "Relu", "Clip")))  # of two in a row the second goes first
    nodes = (node for node in all_of if not below or _bounds(node)[0] < 0 or _is_behind_clip(node))
    report = rewrite_each(model, "fold_relu", nodes, lambda node: why_not(node) or node, _fold)
    rest = nodes_of(model, "Relu", "Clip") if below else []
    return report + rewrite_each(model, "fold_relu", rest, _codes_behind, _round_before)


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
    low, high = _bounds(node)
    if np.isnan(low):
        return "its bounds are computed"
    largest, step = reach
    smallest = min(_smallest(use.node) for use in output.uses())
    for end, bound, beyond in ((smallest, low, low - smallest), (largest, high, largest - high)):
        if beyond > 0.501 * step:  # a range of which 0 is the middle ends half a step beyond its end
            return f"the codes behind it reach {end:g}, beyond {bound:g}"
    return None


def _is_behind_clip(node: ir.Node) -> bool:
    maker = None if node.inputs[0] is None else node.inputs[0].producer()
    return maker is not None and maker.op_type == "Clip"


def _bounds(node: ir.Node) -> tuple[float, float]:
    """What a Relu or Clip lets through; NaN where that is computed."""
    return (0.0, np.inf) if node.op_type == "Relu" else clip_bounds(node) or (np.nan, np.nan)


def _smallest(node: ir.Node) -> float:
    """The value of the smallest code of a QuantizeLinear of one scale; minus infinity of codes of another type."""
    codes, scale, zero_point = node.inputs[2], constant_array(node.inputs[1]), constant_array(node.inputs[2])
    name = codes.dtype.name if codes is not None and codes.dtype is not None else ""
    if scale is None or zero_point is None or name not in LOWEST:
        return -np.inf
    return float((LOWEST[name] - int(zero_point.reshape(()))) * scale.reshape(()))


# ---- codes that reach beyond a bound ---------------------------------------------------------------------------------


def _codes_behind(node: ir.Node) -> ir.Node | None:
    """The QuantizeLinear behind an activation function that has to stay, where an integer kernel could be before it."""
    source, reader = node.inputs[0], sole_consumer(node.outputs[0])
    maker = None if source is None or sole_consumer(source) is not node else source.producer()
    if maker is None or reader is None or maker.op_type not in _INTEGER or why_not(node) is None:
        return None
    before = [None if value is None else value.producer() for value in maker.inputs[:2]]
    codes = input_at(reader, 2)
    reads_codes = all(one is not None and one.op_type == "DequantizeLinear" for one in before)
    eight = reach_of(node.outputs[0]) is not None and codes is not None and codes.dtype in _EIGHT_BITS
    return reader if reads_codes and eight else None


def _round_before(node: ir.Node, reader: ir.Node, names: Names) -> None:
    writer, parameters = NodeWriter(node, "", names), reader.inputs[1:]
    codes = writer.add("QuantizeLinear", [node.inputs[0], *parameters])
    writer.add(node.op_type, [writer.add("DequantizeLinear", [codes, *parameters]), *node.inputs[1:]])
    writer.stand_for()
