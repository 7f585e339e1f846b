"""Tensors that stay float because the target runs the operators on both sides as one kernel.

``Conv -> Relu`` is one kernel on an NPU, and on ONNX Runtime when the codes of the Relu's output cannot be negative: a
Q/DQ pair between the two would only add an error. The options ``RemoveQDQ*`` say which pairs.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from quark.config.job import Job
from quark.config.options import Options
from quark.config.plan import Plan
from quark.ir.surgery import clip_bounds, name_of
from quark.onnx.qdq.node_kinds import block_size
from quark.onnx.qdq.op_rules import FUSED_PRODUCERS, OP_RULES

#: activation function -> the option that allows it to follow its producer without Q/DQ between.
_SWITCH = {
    "Relu": "RemoveQDQConvRelu",
    "Clip": "RemoveQDQConvClip",
    "LeakyRelu": "RemoveQDQConvLeakyRelu",
    "PRelu": "RemoveQDQConvPRelu",
    "Gelu": "RemoveQDQConvGelu",
}
_CLIPS = ("Relu", "Clip")
#: What devices clip within the layer. Where the option is written down, every Clip is taken for part of its layer.
_NPU_CLIPS = ((0.0, 6.0), (0.0, 1.0))


def drop_fused(model: ir.Model, plan: Plan, job: Job) -> None:
    """Take the tensors between fused operators out of the plan."""
    pairs = dict.fromkeys(map(tuple, job.options.RemoveQDQBetweenOps), "RemoveQDQBetweenOps")
    if job.options.RemoveQDQMulAdd:
        pairs[("Mul", "Add")] = "RemoveQDQMulAdd"
    for node in model.graph:
        for value in node.inputs:
            producer = _only_producer(value, plan)
            if value is None or producer is None:
                continue
            option = pairs.get((producer.op_type, node.op_type))
            if option is None and value is node.inputs[0] and _is_fused(producer, value, node, plan, job):
                option = _SWITCH[node.op_type]
            if option is not None:
                kernel = f"{producer.op_type} {producer.name!r} and {node.op_type} {node.name!r} are one kernel"
                plan.leave(name_of(value), f"{kernel} ({option})")


def fused_producer(node: ir.Node, plan: Plan, job: Job) -> ir.Node | None:
    """The node that an activation function makes one kernel with, or ``None``."""
    value = node.inputs[0] if node.inputs else None
    producer = _only_producer(value, plan)
    if value is None or producer is None or not _is_fused(producer, value, node, plan, job):
        return None
    return producer


def _only_producer(value: ir.Value | None, plan: Plan) -> ir.Node | None:
    """The node that makes a quantized tensor which one node alone reads."""
    if value is None or value.name not in plan.tensors or value.is_graph_output() or len(value.uses()) != 1:
        return None
    return value.producer()


def drop_before_moves(model: ir.Model, plan: Plan) -> None:
    """Take float results that are only moved or clipped, to where they are rounded to blocks, out of the plan.

    Blocks of the tensor before and behind a Reshape, Unsqueeze, Slice or Transpose hold other values: rounding in both
    places rounds twice. Before a Relu, negative values that are about to go set the scale of those that stay. A tensor
    that a quantized operator makes keeps its rounding.
    """
    for node in model.graph:
        if node.op_type in OP_RULES and any(value.name in plan.tensors for value in _operands(node)):
            continue
        for value in node.outputs:
            tensor = plan.tensors.get(name_of(value))
            if tensor is None or block_size(tensor.spec) is None or value.is_graph_output():
                continue
            if value.uses() and all(_moves(use.node, plan) for use in value.uses()):
                plan.leave(name_of(value), "it is only moved or clipped before it is rounded to blocks")


def _operands(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


def _moves(node: ir.Node, plan: Plan) -> bool:
    rule = OP_RULES.get(node.op_type)
    if rule is None or not (rule.output == "same" or node.op_type in _CLIPS):
        return False
    results = (plan.tensors.get(name_of(value)) for value in node.outputs if value.uses() or value.is_graph_output())
    return all(result is not None and block_size(result.spec) is not None for result in results)


def _is_fused(producer: ir.Node, value: ir.Value, node: ir.Node, plan: Plan, job: Job) -> bool:
    if node.op_type not in _SWITCH or not getattr(job.options, _SWITCH[node.op_type]):
        return False
    if block_size(plan.tensors[name_of(value)].spec) is not None and not job.options.RemoveFusedQDQ:
        return False
    if producer.op_type not in _producers(job.options) and job.target != "cpu":
        return False
    if job.target == "cpu":
        return _codes_do_the_clipping(node, plan, job.options.FasterForms is not False)
    if node.op_type == "Clip":
        bounds, asked = clip_bounds(node), _SWITCH["Clip"] in job.options.given
        return bounds in _NPU_CLIPS or (asked and bounds is not None)
    return True


def _producers(options: Options) -> frozenset[str]:
    return FUSED_PRODUCERS | {"InstanceNormalization"} if options.RemoveQDQInstanceNorm else FUSED_PRODUCERS


def _codes_do_the_clipping(node: ir.Node, plan: Plan, dropped: bool) -> bool:
    """Whether quantizing the output of a Relu or Clip clips just the same.

    ``dropped``: whether ``fold_relu`` drops a Clip that begins below 0; the runtime drops those that begin at 0.
    """
    output = plan.tensors.get(name_of(node.outputs[0]))
    bounds = (0.0, math.inf) if node.op_type == "Relu" else clip_bounds(node) if node.op_type == "Clip" else None
    if output is None or bounds is None or output.spec.symmetric:
        return False
    return bounds[0] == 0.0 or (dropped and bounds[0] < 0.0 <= bounds[1])
