"""LSTM, GRU and RNN: weights in 8 bits; arithmetic in float, or an LSTM's in integers where the CPU is faster so.

ONNX Runtime has no integer kernel for them but DynamicQuantizeLSTM, which finds a scale for the input and for the state
of every step. The CPU target uses it where the table of kernel times says that it is faster (``DynamicLSTM``). Fixed
codes of inputs and results would cost accuracy and win nothing. Elsewhere the weights, which are most of a speech
model's bytes, are stored as codes with a scale for every row of a gate, which Cast and Mul turn into float when the
model is loaded. Behind a DequantizeLinear, ONNX Runtime 1.31 would dequantize and repack them at every run, which
doubles the time of a streaming step (measured: 32 instead of 16 us for an LSTM of 128, 25 instead of 12 for a GRU).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan, TensorPlan
from quark.config.rules import Decision
from quark.config.tensor import TensorSpec
from quark.ir.surgery import input_at, int_attribute, is_constant, let_go, name_of, operand, tensor_of
from quark.numerics.formats import Int
from quark.numerics.granularity import Channel, Tensor
from quark.onnx.qdq import slots, slower
from quark.onnx.qdq.activation_nodes import QuantizedTensor
from quark.onnx.qdq.dynamic import add_weight, kept_attributes
from quark.onnx.qdq.store import codes_of

RECURRENT = ("LSTM", "GRU", "RNN")
REASON = "weights alone: it computes in float"
#: The same of an LSTM that could have been one of integers: its codes are laid out as that reads them, so that branches
#: of an If that read one weight in both forms have the codes once.
TURNED = f"{REASON}, from codes as DynamicQuantizeLSTM reads them"
DYNAMIC = "weights as codes, inputs and states with a scale of every step: DynamicQuantizeLSTM"
MICROSOFT = "com.microsoft"
#: Positions of the weights of the input and of the state; their rows are the gates'.
_WEIGHTS, _ROWS = (1, 2), 1
_FORMATS = ("int8", "uint8", "int16", "uint16")


def store_weights(
    model: ir.Model, plan: Plan, job: Job, decisions: Mapping[str, Decision], fastest: bool = False
) -> None:
    """Add the weights of recurrent layers that are not quantized as a whole, in place.

    Args:
        fastest: whether an LSTM computes in integers where that is faster.
    """
    if job.options.OpTypesToQuantize or job.options.NodesToQuantize:
        return
    for node in model.graph:
        name = name_of(node)
        layer = decisions[name].layer
        if node.op_type not in RECURRENT or layer is None or layer.weight is None or plan.nodes[name].quantized:
            continue
        values = [input_at(node, position) for position in _WEIGHTS]
        if slots.STAYS_FLOAT in node.meta or layer.weight.format not in _FORMATS:
            continue
        if all(slots.is_float(value) and is_constant(value) for value in values):
            spec = _for_rows(layer.weight)
            reason = DYNAMIC if fastest and _is_faster(node, spec) else REASON
            plan.nodes[name] = replace(plan.nodes[name], quantized=True, reason=reason)
            because = f"{reason}: {node.op_type} {node.name!r}"
            for position in _WEIGHTS:
                add_weight(node, operand(node, position), spec, because, plan, model)


def is_alone(tensor: TensorPlan) -> bool:
    """Whether a tensor is a weight of a recurrent layer that computes in float."""
    return tensor.role == "weight" and tensor.reason.startswith((REASON, DYNAMIC))


def is_turned(tensor: TensorPlan) -> bool:
    """Whether the codes of such a weight are laid out [directions, inputs, 4 hidden]."""
    return tensor.role == "weight" and tensor.reason.startswith(TURNED)


def _for_rows(spec: TensorSpec) -> TensorSpec:
    """A scale for every row, where scales are free: no kernel has to know them."""
    return replace(spec, granularity=Tensor() if spec.scale_rule == "power_of_two" else Channel(_ROWS))


# ---- DynamicQuantizeLSTM ---------------------------------------------------------------------------------------------


def _is_faster(node: ir.Node, spec: TensorSpec) -> bool:
    """Whether ONNX Runtime has the integer form of a node, nothing else reads its weights, and it is faster."""
    values = [value for value in (input_at(node, position) for position in _WEIGHTS) if value is not None]
    alone = all(len(tuple(value.uses())) == 1 and value.dtype == ir.DataType.FLOAT for value in values)
    plain = node.op_type == "LSTM" and not int_attribute(node, "layout", 0)
    return plain and alone and _is_byte(spec) and slower.dynamic_is_faster(node)


def dynamic_nodes(model: ir.Model, plan: Plan) -> list[ir.Node]:
    """The LSTMs of a plan that compute in integers."""
    found = []
    for node in model.graph:
        tensors = [plan.tensors.get(name_of(input_at(node, position))) for position in _WEIGHTS]
        if node.op_type == "LSTM" and all(one is not None and _suits(one, node) for one in tensors):
            found.append(node)
    return found


def _suits(tensor: TensorPlan, node: ir.Node) -> bool:
    """Whether the codes of a weight are those that the operator reads, for this node alone."""
    alone = tensor.readers == frozenset([name_of(node)])
    return alone and tensor.reason.startswith(DYNAMIC) and _is_byte(tensor.spec) and _symmetric(tensor)


def _is_byte(spec: TensorSpec) -> bool:
    return isinstance(spec.row, Int) and spec.row.signed and spec.row.bits == 8


def _symmetric(tensor: TensorPlan) -> bool:
    return not np.any(np.asarray(tensor.zero_point)) and np.ndim(np.asarray(tensor.scale)) <= 1


def write_dynamic(node: ir.Node, weights: Sequence[QuantizedTensor]) -> None:
    """com.microsoft DynamicQuantizeLSTM in the place of an LSTM: weights [directions, inputs, 4 hidden]."""
    inputs: list[ir.Value | None] = [input_at(node, position) for position in range(8)]
    beside: list[ir.Value | None] = []
    for position, item in zip(_WEIGHTS, weights, strict=True):
        tensor, add, source = item.tensor, item.parameters.add, tensor_of(item.value)
        codes = codes_of(source.numpy(), tensor).transpose(0, 2, 1)
        let_go(source)
        scales = np.broadcast_to(np.asarray(tensor.scale, np.float32), (codes.shape[0], codes.shape[2]))
        inputs[position] = add(np.ascontiguousarray(codes, np.int8), f"{tensor.name}_quantized")
        beside += [
            add(np.ascontiguousarray(scales), f"{item.name}_scale"),
            add(np.zeros(scales.shape, np.int8), f"{item.name}_zero_point"),
        ]
    put_dynamic(node, [*inputs, *beside])


def put_dynamic(node: ir.Node, inputs: Sequence[ir.Value | None]) -> None:
    """The operator in the place of an LSTM."""
    outputs = [ir.Value(name=value.name, shape=value.shape, type=value.type) for value in node.outputs]
    attributes, graph = kept_attributes(node, ("layout",)), node.graph
    made = ir.Node(MICROSOFT, "DynamicQuantizeLSTM", inputs, attributes, outputs=outputs, name=node.name)
    if graph is None:
        return
    graph.insert_before(node, made)
    for old, value in zip(node.outputs, outputs, strict=True):
        old.replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    graph.opset_imports.setdefault(MICROSOFT, 1)
