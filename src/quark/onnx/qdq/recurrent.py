"""LSTM, GRU and RNN: weights in 8 bits, arithmetic in float.

ONNX Runtime has no integer kernel for them (but for the LSTM of dynamic quantization), and codes of their inputs and
results would cost accuracy and win nothing. Their weights are most of a speech model's bytes: they are stored as codes
with a scale for every row of a gate, which Cast and Mul turn into float when the model is loaded. Behind a
DequantizeLinear, ONNX Runtime 1.31 would dequantize and repack them at every run, which doubles the time of a streaming
step (measured: 32 instead of 16 us for an LSTM of 128, 25 instead of 12 for a GRU).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan, TensorPlan
from quark.config.rules import Decision
from quark.config.tensor import TensorSpec
from quark.numerics.granularity import Channel, Tensor
from quark.onnx.graph.surgery import input_at, is_constant
from quark.onnx.qdq import slots

RECURRENT = ("LSTM", "GRU", "RNN")
REASON = "weights alone: it computes in float"
#: Positions of the weights of the input and of the state; their rows are the gates'.
_WEIGHTS, _ROWS = (1, 2), 1
_FORMATS = ("int8", "uint8", "int16", "uint16")


def store_weights(model: ir.Model, plan: Plan, job: Job, decisions: Mapping[str, Decision]) -> None:
    """Add the weights of recurrent layers that are not quantized as a whole, in place."""
    if job.options.OpTypesToQuantize or job.options.NodesToQuantize:
        return
    for node in model.graph:
        name = node.name or ""
        layer = decisions[name].layer
        if node.op_type not in RECURRENT or layer is None or layer.weight is None or plan.nodes[name].quantized:
            continue
        values = [input_at(node, position) for position in _WEIGHTS]
        if slots.STAYS_FLOAT in node.meta or layer.weight.format not in _FORMATS:
            continue
        if all(slots.is_float(value) and is_constant(value) for value in values):
            plan.nodes[name] = replace(plan.nodes[name], quantized=True, reason=REASON)
            for value in values:
                _add(node, value, _for_rows(layer.weight), plan)


def is_alone(tensor: TensorPlan) -> bool:
    """Whether a tensor is a weight of a recurrent layer that computes in float."""
    return tensor.role == "weight" and tensor.reason.startswith(REASON)


def _for_rows(spec: TensorSpec) -> TensorSpec:
    """A scale for every row, where scales are free: no kernel has to know them."""
    return replace(spec, granularity=Tensor() if spec.scale_rule == "power_of_two" else Channel(_ROWS))


def _add(node: ir.Node, value: ir.Value | None, spec: TensorSpec, plan: Plan) -> None:
    name = "" if value is None else value.name or ""
    known = plan.tensors.get(name)
    readers = (known.readers if known and known.readers else frozenset()) | {node.name or ""}
    plan.put(TensorPlan(name, "weight", spec, f"{REASON}: {node.op_type} {node.name!r}", name, readers=readers))
