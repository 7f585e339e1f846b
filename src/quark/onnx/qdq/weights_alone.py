"""Large weights of layers that stay float for their speed are stored as codes all the same.

A layer that the CPU runs faster in float (:mod:`quark.onnx.qdq.slower`) reads a float weight, which is a matter of the
kernel and not of the file: its codes have the configured form, and Cast and Mul turn them into float when the model is
loaded, as those of recurrent layers. They take a quarter of the bytes, and no inference takes longer.

Left as they are: weights that something else reads too, those below ``SMALLEST`` elements (depthwise ones, which the
answers depend on most and which are few of the bytes), and what 8 bits do not hold to ``FAITHFUL`` dB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from quark.config.plan import Plan
from quark.config.rules import Decision
from quark.config.tensor import TensorSpec
from quark.ir.surgery import is_constant, let_go, name_of, tensor_of
from quark.numerics.granularity import Channel
from quark.numerics.metrics import sqnr
from quark.onnx.graph.shapes import static_shape
from quark.onnx.qdq import slots, slower
from quark.onnx.qdq.dynamic import add_weight
from quark.onnx.qdq.op_rules import GENERIC, OP_RULES, OpRule
from quark.onnx.qdq.recurrent import REASON

SMALLEST = 1 << 12
#: What codes have to keep of a weight, in dB. Rows of 64 normally distributed numbers have 43 at a scale of their own.
FAITHFUL = 40.0
_FORMATS = ("int8", "uint8")


def store_weights(
    model: ir.Model,
    plan: Plan,
    decisions: Mapping[str, Decision],
    spec_of: Callable[[TensorSpec, ir.Node, OpRule, ir.Value], TensorSpec],
) -> None:
    """Add such weights to a plan of which something else is quantized, in place.

    Args:
        spec_of: the configured weight as a node has it: with the axis of its channels.
    """
    for node in list(model.graph) if plan.tensors else ():
        rule, layer = OP_RULES.get(node.op_type, GENERIC), decisions[name_of(node)].layer
        weight = slots.weight_input(node, rule)
        faster = plan.nodes[name_of(node)].reason in (slower.REASON, slower.TUNED)
        if not faster or weight is None or layer is None or layer.weight is None:
            continue
        spec = spec_of(layer.weight, node, rule, weight)
        if _is_large(weight) and spec.format in _FORMATS and _is_faithful(weight, spec):
            add_weight(node, weight, spec, f"{REASON}: {node.op_type} {node.name!r}", plan, model)


def _is_large(weight: ir.Value) -> bool:
    """Whether a weight is a large constant that one node reads alone."""
    alone = len(tuple(weight.uses())) == 1 and not weight.is_graph_output()
    return alone and is_constant(weight) and weight.dtype == ir.DataType.FLOAT and _elements(weight) >= SMALLEST


def _elements(weight: ir.Value) -> int:
    return math.prod(static_shape(weight) or (0,))


def _is_faithful(weight: ir.Value, spec: TensorSpec) -> bool:
    source = tensor_of(weight)
    kept = _kept(source.numpy(), spec)
    let_go(source)
    return kept > FAITHFUL


def _kept(values: np.ndarray, spec: TensorSpec) -> float:
    """dB that codes keep of a weight; -inf where a value is no number."""
    granularity = spec.granularity
    channel = granularity.axis % values.ndim if isinstance(granularity, Channel) else None
    others = None if channel is None else tuple(axis for axis in range(values.ndim) if axis != channel)
    low, high = values.min(axis=others), values.max(axis=others)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return -math.inf
    return sqnr(values, spec.coding.fake_quantize(values, *spec.grid.parameters(low, high)))
