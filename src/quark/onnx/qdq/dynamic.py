"""Dynamic quantization: weights become 8-bit integers now, activations at run time, each with a range of its own.

    X (float32) -> DynamicQuantizeLinear -> codes, scale, zero point
    codes, W codes -> MatMulInteger or ConvInteger (int32) -> Cast -> Mul(X scale x W scale) -> Add bias

ONNX Runtime fuses this pattern into DynamicQuantizeMatMul; LSTM becomes com.microsoft DynamicQuantizeLSTM, and a Gather
of rows of a constant table gathers 8-bit codes and the scales of their rows. No calibration data is needed.

Activations are uint8 with a zero point (DynamicQuantizeLinear knows nothing else), weights int8 or uint8; a scale per
channel where the specs ask for it (Conv then has symmetric codes, because its kernel takes one zero point). A table
entry per operator says what has to hold and how the node is rewritten.

Not handled: float16 models (the operators are float32), nodes inside If and Loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import NodePlan, Plan, TensorPlan
from quark.config.rules import NodeInfo
from quark.config.tensor import LayerSpec, TensorSpec
from quark.dataclass import dataclass
from quark.ir.surgery import (
    attribute,
    float_attribute,
    input_at,
    int_attribute,
    is_constant,
    name_of,
    operand,
    own_copy,
)
from quark.numerics.granularity import Channel, Tensor
from quark.onnx.qdq import slots
from quark.onnx.qdq.angles import NoData
from quark.onnx.qdq.masks import reads_mask
from quark.onnx.qdq.selection import bound, passed_over

Reason = str | None


@dataclass(frozen=True)
class DynamicRule:
    """How one operator is quantized dynamically.

    Attributes:
        data: positions of the activations; of those that are constant nothing is done.
        weights: positions of the constant weights.
        why_not: the reason why a node of this type stays float, or ``None``.
        channel: the axis of its weights that may have a scale each, or ``None``.
    """

    data: tuple[int, ...]
    weights: tuple[int, ...]
    why_not: Callable[[ir.Node, TensorSpec], Reason]
    channel: Callable[[ir.Node, TensorSpec], int | None]


def _constant(node: ir.Node, position: int) -> bool:
    return is_constant(input_at(node, position))


def _rank(node: ir.Node, position: int) -> int:
    value = input_at(node, position)
    return len(value.shape) if value is not None and value.shape is not None else 0


def _matmul(node: ir.Node, _: TensorSpec) -> Reason:
    return "its second input has fewer than two axes" if _constant(node, 1) and _rank(node, 1) < 2 else None


def _gemm(node: ir.Node, _: TensorSpec) -> Reason:
    if not _constant(node, 1):
        return "its second input is not constant"
    if int_attribute(node, "transA", 0):
        return "it transposes its first input"
    bias = input_at(node, 2)
    if bias is not None and not is_constant(bias) and float_attribute(node, "beta", 1.0) != 1.0:
        return "it scales a computed bias"
    return None


def _conv(node: ir.Node, _: TensorSpec) -> Reason:
    bias = input_at(node, 2)
    if not _constant(node, 1) or not (bias is None or is_constant(bias)):
        return "its weight or bias is not constant"
    return None


def _gather(node: ir.Node, _: TensorSpec) -> Reason:
    if reads_mask(node):
        return "it takes values out of a mask, which no scale covers"
    table = _constant(node, 0) and _rank(node, 0) > 1 and int_attribute(node, "axis", 0) == 0
    return None if table else "it reads no rows of a constant table"


def _lstm(node: ir.Node, spec: TensorSpec) -> Reason:
    if not (_constant(node, 1) and _constant(node, 2)):
        return "its weights are not constant"
    if int_attribute(node, "layout", 0):
        return "ONNX Runtime has no dynamic LSTM of this layout"
    return None


def _last(node: ir.Node, _: TensorSpec) -> int | None:
    return -1 if _rank(node, 1) == 2 else None  # the kernel takes one zero point for stacked matrices


def _rows(node: ir.Node, _: TensorSpec) -> int | None:
    return 0 if int_attribute(node, "transB", 0) else 1


def _first(node: ir.Node, spec: TensorSpec) -> int | None:
    return 0


DYNAMIC_RULES: dict[str, DynamicRule] = {
    "MatMul": DynamicRule((0, 1), (1,), _matmul, _last),
    "Gemm": DynamicRule((0,), (1,), _gemm, _rows),
    "Conv": DynamicRule((0,), (1,), _conv, _first),
    "Gather": DynamicRule((), (0,), _gather, _first),
    "LSTM": DynamicRule((), (1, 2), _lstm, _first),
}
#: Operators whose weights have several scales in any case: per direction (the kernel wants it), per row (it is free).
_ALWAYS = ("LSTM", "Gather")
#: Operators whose weights share one zero point, so that a scale per channel needs symmetric codes.
_ONE_ZERO_POINT = ("Conv", "Gather")


def place_dynamic(model: ir.Model, job: Job, before: Sequence[NodeInfo] = ()) -> Plan:
    """The Plan of a dynamic quantization: weights, and activations whose range is found at run time.

    Args:
        before: the nodes before the graph passes, whose names the user may know.

    Raises:
        ConfigError: a name or pattern of the configuration matches nothing.
    """
    plan, decisions, left = Plan(), bound(model, job, before), NoData.of(model).nodes
    for node in list(model.graph):
        decision = decisions[name_of(node)]
        why = decision.reason if decision.layer is None else _why_float(node, decision.layer, job, left.get(node))
        reason = why or decision.reason
        plan.nodes[name_of(node)] = NodePlan(name_of(node), node.op_type, why is None, reason)
        if why is None and decision.layer is not None:
            _add(node, decision.layer, reason, plan, model)
    return plan


def _why_float(node: ir.Node, layer: LayerSpec, job: Job, no_data: Reason) -> Reason:
    rule = DYNAMIC_RULES.get(node.op_type)
    if slots.STAYS_FLOAT not in node.meta and (node.domain not in ("", "ai.onnx") or rule is None):
        return "ONNX Runtime has no dynamic kernel for it"
    if (listed := passed_over(node, job.options)) is not None or rule is None:
        return listed
    if no_data is not None:
        return no_data
    read = [input_at(node, position) for position in {*rule.data, *rule.weights}]
    if layer.weight is None or any(value is None or value.dtype != ir.DataType.FLOAT for value in read):
        return slots.in_float64(node) or "it computes on other types than float32"
    if node.op_type == "MatMul" and job.options.MatMulConstBOnly is not False and not _constant(node, 1):
        return "MatMulConstBOnly: its second input is not constant"
    if node.op_type == "MatMul" and _constant(node, 0):
        return "its first input is constant"
    return rule.why_not(node, layer.weight)


def _add(node: ir.Node, layer: LayerSpec, reason: str, plan: Plan, model: ir.Model) -> None:
    """Record what one node reads."""
    rule, because = DYNAMIC_RULES[node.op_type], f"{reason}: {node.op_type} {node.name!r}"
    for position in rule.weights:
        if _constant(node, position) and layer.weight is not None:
            spec = _for_node(layer.weight, node, rule, position)
            add_weight(node, operand(node, position), spec, because, plan, model)
    for position in rule.data:
        value = node.inputs[position]
        if value is not None and not is_constant(value):
            name = name_of(value)
            plan.read_by(name_of(node), TensorPlan(name, "activation", ACTIVATION, because, name, observed=False))


#: What DynamicQuantizeLinear makes.
ACTIVATION = TensorSpec("uint8", symmetric=False, dynamic=True)


def _for_node(spec: TensorSpec, node: ir.Node, rule: DynamicRule, position: int) -> TensorSpec:
    axis = rule.channel(node, spec)
    per_channel = isinstance(spec.granularity, Channel) or node.op_type in _ALWAYS
    granularity = Channel(axis % _rank(node, position)) if axis is not None and per_channel else Tensor()
    symmetric = spec.symmetric or (isinstance(granularity, Channel) and node.op_type in _ONE_ZERO_POINT)
    return replace(spec, granularity=granularity, symmetric=symmetric)


def add_weight(node: ir.Node, value: ir.Value, spec: TensorSpec, reason: str, plan: Plan, model: ir.Model) -> None:
    """Record a constant that a node reads; where another reader has it quantized otherwise, it gets a copy."""
    name = name_of(value)
    known = plan.tensors.get(name)
    if known is not None and known.spec != spec:
        name = own_copy(node, value, model)
    plan.read_by(name_of(node), TensorPlan(name, "weight", spec, reason, name))


def gemm_factors(node: ir.Node) -> tuple[float, float]:
    """(alpha, beta) of a Gemm."""
    return float_attribute(node, "alpha", 1.0), float_attribute(node, "beta", 1.0)


def kept_attributes(node: ir.Node, dropped: tuple[str, ...] = ()) -> list[ir.Attr]:
    """The attributes that a rewritten node keeps."""
    return [attr for name, attr in node.attributes.items() if name not in dropped and attribute(node, name) is not None]
