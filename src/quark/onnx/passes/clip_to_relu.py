"""A Clip from 0 becomes a Relu where quantization cuts off the rest (ConvertClipToRelu).

A quantized tensor cannot be larger than its largest code, so behind  Clip(0, b) → QuantizeLinear  with

    (q_max - zero point) · scale  ≤  b + scale / 2          the upper bound b does nothing,

and many devices run a Relu with the operator before it. Where the codes reach beyond b (power-of-two scales do) the
Relu changes values between the two: only ``loose`` allows that, and the report names each place.

On a float model only a Clip without an upper bound is a Relu. Not handled: a lower bound other than 0, bounds that are
computed.
"""

from __future__ import annotations

import logging
from typing import Annotated

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import (
    clip_bounds,
    constant_array,
    drop_if_unused,
    nodes_of,
)
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each

_log = logging.getLogger(__name__)
LIMITS = {"INT4": 7, "UINT4": 15, "INT8": 127, "UINT8": 255, "INT16": 32767, "UINT16": 65535}
Loose = Annotated[bool, "Also where the codes reach beyond the upper bound; the log names each place."]


def run(model: ir.Model, loose: Loose = False) -> PassReport:
    """Rewrite ``model`` in place."""
    nodes = nodes_of(model, "Clip")
    return rewrite_each(
        model, "clip_to_relu", nodes, lambda node: why_not(node, loose) or node, lambda node, *_: to_relu(node)
    )


def to_relu(node: ir.Node) -> None:
    """Make a Clip a Relu, under its own name, with the output that it has."""
    bounds = [value for value in node.inputs[1:] if value is not None]
    node.resize_inputs(1)
    node.op_type = "Relu"
    for value in bounds:
        drop_if_unused(value)


def why_not(node: ir.Node, loose: bool) -> str | None:
    """The reason why a Clip is not a Relu, or None."""
    bounds = clip_bounds(node)
    if bounds is None:
        return "its bounds are computed"
    low, high = bounds
    if low != 0:
        return f"its lower bound is {low}, not 0"
    if high == np.inf:
        return None
    reach = reach_of(node.outputs[0])
    if reach is None:
        return f"nothing behind it cuts off at its upper bound {high:g}"
    largest, step = reach
    if largest <= high + step / 2:
        return None
    if not loose:
        return f"the codes behind it reach {largest:g}, beyond its upper bound {high:g}"
    _log.warning("%s becomes a Relu, but the codes behind it reach %g, beyond its bound %g", node.name, largest, high)
    return None


def reach_of(value: ir.Value) -> tuple[float, float] | None:
    """(largest value, step) of the codes that every reader of ``value`` gets; None where one reads it in float."""
    if value.is_graph_output() or not value.uses():
        return None
    found = [_largest(use.node) for use in value.uses() if use.idx == 0]
    if len(found) < len(value.uses()) or any(one is None for one in found):
        return None
    return max(one for one in found if one is not None)


def _largest(node: ir.Node) -> tuple[float, float] | None:
    if node.op_type != "QuantizeLinear" or len(node.inputs) < 3:
        return None
    scale, zero_point = constant_array(node.inputs[1]), constant_array(node.inputs[2])
    codes = node.inputs[2].dtype if node.inputs[2] is not None else None
    if scale is None or zero_point is None or scale.size != 1 or codes is None or codes.name not in LIMITS:
        return None
    step = float(scale.reshape(()))
    return (LIMITS[codes.name] - int(zero_point.reshape(()))) * step, step
