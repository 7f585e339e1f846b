"""Which biases share the scales of their layer's input and weight, and which stay float or have a scale of their own.

A bias is added to sums of products of codes, so its scale is that of the input times that of the weight. There is such
a product only where the input has one scale and the weight one, or one per output channel. ``place`` asks when it
records a bias, ``refit`` when overrides and second types have had their say.

A constant that an Add puts on the sums of a MatMul is a bias too (``BiasBehindMatMul``):

    y = MatMul(x, W) + b        b, [columns of W]: 32 bits, with the scale of x times that of W

With Q and DQ between the two the sums are rounded to 8 bits before the bias comes: 0.6 dB of a transformer with scales
per tensor, 3.4 dB with scales per channel (docs/results/accuracy.md). Without them ONNX Runtime runs a QGemm, or
MatMulIntegerToFloat where sizes are free; a bias in float or 8 bits would make it a Gemm in float. Not handled: biases
of more than one axis, weights that are computed.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import LayerSpec, TensorSpec
from quark.ir.surgery import is_constant, name_of, own_copy
from quark.numerics.granularity import Channel, Group, Tensor
from quark.onnx.qdq import isolated, slower
from quark.onnx.qdq.channel_axes import has_channels, is_off_channel
from quark.onnx.qdq.node_kinds import block_size
from quark.onnx.qdq.slots import is_float

OPTION = "BiasBehindMatMul"
#: Reasons to leave an Add in float that hold for a kernel of its own only.
_OF_ITSELF = (slower.REASON, slower.TUNED, isolated.REASON)
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


def layer_of(node: ir.Node) -> ir.Node:
    """The node whose sums a bias is added to: the node that reads it, or the MatMul that alone an Add follows."""
    for value in node.inputs if node.op_type == "Add" and not node.domain else ():
        maker = value.producer() if value is not None and not value.is_graph_output() else None
        if maker is not None and maker.op_type == "MatMul" and not maker.domain and len(maker.outputs[0].uses()) == 1:
            return maker
    return node


def adders_of(node: ir.Node) -> list[ir.Node]:
    """The nodes that may add a bias to what a node sums up: itself, or the Add behind a MatMul."""
    return [node, *(use.node for use in node.outputs[0].uses() if layer_of(use.node) is node)]


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


def join_added(model: ir.Model, plan: Plan, job: Job) -> None:
    """Make the constants that are added to quantized products biases of these, in the Plan."""
    if not job.options.QuantizeBias or job.options.Int16Bias:
        return
    for node in model.graph:
        layer, line = layer_of(node), plan.nodes[name_of(node)]
        if layer is not node and (line.quantized or line.reason in _OF_ITSELF):
            _join(layer, node, model, plan, job)


def _join(layer: ir.Node, node: ir.Node, model: ir.Model, plan: Plan, job: Job) -> None:
    sums, (source, factor) = layer.outputs[0], layer.inputs[:2]
    bias = next((value for value in node.inputs if value is not None and value is not sums), None)
    if source is None or factor is None or bias is None or not _is_bias(bias, factor):
        return
    data, weight = plan.tensors.get(name_of(source)), plan.tensors.get(name_of(factor))
    if data is None or weight is None or weight.role != "weight" or data.role != "activation":
        return
    unread = any(one.readers is not None and name_of(layer) not in one.readers for one in (data, weight))
    if unread or name_of(sums) not in plan.tensors or data.spec.row.bits != 8 or like_weight(weight.spec, job):
        return
    if why_no_product(layer, bias, data.spec, weight.spec) is not None:
        return
    plan.leave(name_of(sums), f"MatMul {layer.name!r} and Add {node.name!r} are one kernel ({OPTION})")
    plan.nodes[name_of(node)] = replace(plan.nodes[name_of(node)], quantized=True, reason=f"{OPTION}: {layer.name!r}")
    _record(
        bias,
        node,
        TensorSpec(format="int32", granularity=weight.spec.granularity),
        (data.name, weight.name),
        model,
        plan,
    )


def _record(
    bias: ir.Value, node: ir.Node, spec: TensorSpec, scales: tuple[str, str], model: ir.Model, plan: Plan
) -> None:
    """The bias in the Plan; a constant that others read too is copied."""
    known, reader = plan.tensors.get(name_of(bias)), name_of(node)
    alone = len(bias.uses()) == 1
    name = name_of(bias) if alone else own_copy(node, bias, model)
    if known is not None and not alone and known.readers is not None:
        plan.put(replace(known, readers=known.readers - {reader}))
    reason = f"{OPTION}: {node.op_type} {node.name!r}"
    plan.put(TensorPlan(name, "bias", spec, reason, name, readers=frozenset([reader]), bias_of=scales))


def _is_bias(bias: ir.Value, weight: ir.Value) -> bool:
    """Whether a constant has a number for every column of a matrix."""
    shapes = [() if value.shape is None else tuple(value.shape) for value in (bias, weight)]
    return is_constant(bias) and is_float(bias) and len(shapes[1]) == 2 and shapes[0] == shapes[1][1:]


def refit(model: ir.Model, plan: Plan) -> None:
    """Leave float the biases whose layers have no product of scales any more; the others follow their weights' axes."""
    biases = plan.of_role("bias")
    readers = {name for bias in biases for name in bias.readers or ()}
    nodes = {name_of(node): node for node in model.graph if node.name in readers} if readers else {}
    for bias in biases:
        data, weight = (plan.tensors.get(name) for name in bias.bias_of or ("", ""))
        layers = [layer_of(nodes[name]) for name in bias.readers or ()]
        if data is None or weight is None or not all(_reads(data, name_of(layer)) for layer in layers):
            plan.leave(bias.name, "there is no scale to share: its layer's input stays float")
            continue
        value = model.graph.initializers[bias.name]
        why = next(filter(None, (why_no_product(layer, value, data.spec, weight.spec) for layer in layers)), None)
        if why is not None:
            plan.leave(bias.name, why)
        else:
            plan.put(replace(bias, spec=replace(bias.spec, granularity=weight.spec.granularity)))


def _reads(tensor: TensorPlan, name: str) -> bool:
    """Whether a node reads the quantized values of a tensor."""
    return tensor.readers is None or name in tensor.readers
