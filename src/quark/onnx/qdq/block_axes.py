"""Along which axis the blocks of an activation run (``RefineBlockAxis``).

A block shares its scale, so a kernel can multiply block by block only if blocks run along the axis that is summed over:
the last of MatMul's first operand, the last but one of its second; Softmax sums along its own axis. A tensor that
several operators read follows the first of them in graph order. Convolutions keep axis 1, their channels.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan
from quark.config.tensor import TensorSpec
from quark.ir.surgery import int_attribute, name_of
from quark.numerics.granularity import Group
from quark.onnx.qdq.node_kinds import block_size


def in_blocks(spec: TensorSpec, value: ir.Value) -> TensorSpec:
    """The spec of a block format with its default axis: the second one, where convolutions have their channels."""
    size = block_size(spec)
    if size is None:
        return spec
    shape = value.shape if value.const_value is None else value.const_value.shape
    vector = shape is not None and len(shape) < 2
    return replace(spec, granularity=Group(0 if vector else 1, size))


def is_scalar(value: ir.Value) -> bool:
    """Whether a constant is one number, which shares an exponent with nothing: the block operators let it through."""
    return value.const_value is not None and value.const_value.size == 1


def refine(model: ir.Model, plan: Plan, job: Job) -> None:
    """Set the block axes of the activations that MatMul, Gemm and Softmax read, and of what MatMul writes."""
    if job.options.RefineBlockAxis is False:
        return
    settled: set[str] = set()
    for node in model.graph:
        for value, axis in _axes(node):
            tensor = plan.tensors.get(name_of(value))
            if value is None or tensor is None or tensor.role != "activation" or tensor.name in settled:
                continue
            granularity, rank = tensor.spec.granularity, len(value.shape or ())
            if isinstance(granularity, Group) and rank:
                settled.add(tensor.name)
                spec = replace(tensor.spec, granularity=Group(max(axis, -rank) % rank, granularity.size))
                plan.put(replace(tensor, spec=spec))


def _axes(node: ir.Node) -> list[tuple[ir.Value | None, int]]:
    """(tensor, axis) of a node that has a say; from the back, where the rank is free."""
    if node.op_type == "MatMul":
        return [(node.inputs[0], -1), (node.inputs[1], -2), (node.outputs[0], -1)]
    if node.op_type == "Gemm":
        first = 0 if int_attribute(node, "transA", 0) else 1
        return [(node.inputs[0], first), (node.inputs[1], 1 if int_attribute(node, "transB", 0) else 0)]
    if node.op_type == "Softmax":
        axis, rank = int_attribute(node, "axis", -1), len(node.inputs[0].shape or ()) if node.inputs[0] else 0
        return [(node.inputs[0], axis - rank if axis >= 0 else axis)]
    return []
