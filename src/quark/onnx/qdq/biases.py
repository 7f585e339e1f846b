"""Which biases share the scales of their layer's input and weight, and which stay float or have a scale of their own.

A bias is added to sums of products of codes, so its scale is that of the input times that of the weight. There is such
a product only where the input has one scale and the weight one, or one per output channel. ``place`` asks when it
records a bias, ``refit`` when overrides and second types have had their say.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import LayerSpec, TensorSpec
from quark.numerics.granularity import Channel, Group, Tensor
from quark.onnx.graph.surgery import name_of
from quark.onnx.qdq.channel_axes import has_channels, is_off_channel
from quark.onnx.qdq.node_kinds import block_size

#: Bits of the widest codes whose product of scales can be a bias's.
WIDEST_WITH_BIAS = 16


def why_no_product(node: ir.Node, bias: ir.Value, data: TensorSpec, weight: TensorSpec) -> str | None:
    """Why the scales of a node's input and weight make none for its bias, or ``None``.

    Args:
        node: a node with (input, weight, bias), or the like.
        data, weight: how its first two inputs are quantized.
    """
    source, factor = node.inputs[0], node.inputs[1]
    rows = data.row, weight.row
    if source is None or factor is None or not all(row.has_zero_point for row in rows):
        return "a product of scales is a scale for integers only"
    if max(row.bits for row in rows) > WIDEST_WITH_BIAS:
        return "no bias fits 32 bits at so fine a scale, and no integer kernel asks for it"
    if isinstance(weight.granularity, Group):
        return "a sum over groups has no single scale for the bias to share"
    if not isinstance(data.granularity, Tensor) or is_off_channel(node, factor, weight):
        return "a sum over channels that each have a scale has no single one for the bias to share"
    if isinstance(weight.granularity, Channel) and not has_channels(bias, factor, weight.granularity.axis):
        return "it broadcasts, and has no element for each channel's scale"
    return None


def shared_scale(node: ir.Node, layer: LayerSpec, bias: ir.Value, plan: Plan) -> ir.Value | None:
    """The tensor whose scale times the input's is that of the bias; ``None`` where there is no such product."""
    scaled = node.inputs[1]
    if layer.inputs is None or layer.weight is None or scaled is None or name_of(scaled) not in plan.tensors:
        return None
    granularity = plan.tensors[name_of(scaled)].spec.granularity
    return None if why_no_product(node, bias, layer.inputs, replace(layer.weight, granularity=granularity)) else scaled


def like_weight(weight: TensorSpec, job: Job) -> bool:
    """Whether biases have the weight's type and a scale of their own instead of 32 bits."""
    if job.options.Int16Bias:
        return False
    if job.options.Int32Bias is not None:
        return not job.options.Int32Bias
    if block_size(weight) is not None:
        return False  # blocks serve sums of products; a bias is added to the sum, and neighbours would only blur it
    return job.npu or weight.row.unit_scale


def refit(model: ir.Model, plan: Plan) -> None:
    """Leave float the biases whose layers have no product of scales any more; the others follow their weights' axes."""
    biases = plan.of_role("bias")
    readers = {name for bias in biases for name in bias.readers or ()}
    nodes = {name_of(node): node for node in model.graph if node.name in readers} if readers else {}
    for bias in biases:
        data, weight = (plan.tensors.get(name) for name in bias.bias_of or ("", ""))
        if data is None or weight is None or not all(_reads(data, name) for name in bias.readers or ()):
            plan.leave(bias.name, "there is no scale to share: its layer's input stays float")
            continue
        why = next(filter(None, (_why_not(nodes[name], bias, data, weight) for name in bias.readers or ())), None)
        if why is not None:
            plan.leave(bias.name, why)
        else:
            plan.put(replace(bias, spec=replace(bias.spec, granularity=weight.spec.granularity)))


def _reads(tensor: TensorPlan, name: str) -> bool:
    """Whether a node reads the quantized values of a tensor."""
    return tensor.readers is None or name in tensor.readers


def _why_not(node: ir.Node, bias: TensorPlan, data: TensorPlan, weight: TensorPlan) -> str | None:
    value = next(operand for operand in node.inputs if operand is not None and operand.name == bias.name)
    return why_no_product(node, value, data.spec, weight.spec)
