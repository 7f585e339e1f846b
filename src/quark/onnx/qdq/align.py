"""Tensors that must have one scale: the members of a group take the union of their ranges.

What only moves values shares its scale anyway; here it does so even where a later entry of the configuration gives its
readers another range.

NPU flows align positions instead, among the other rules of the device (``quark.onnx.npu.rules``): what one rule moves
another may have to align again.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan

#: operator -> the option that aligns it.
_SWITCH = {
    "Concat": "AlignConcat",
    "MaxPool": "AlignPool",
    "AveragePool": "AlignPool",
    "GlobalAveragePool": "AlignPool",
    "Pad": "AlignPad",
    "Slice": "AlignSlice",
    "Transpose": "AlignTranspose",
    "Reshape": "AlignReshape",
}


def align(model: ir.Model, plan: Plan, job: Job) -> None:
    """Put the inputs and outputs of aligned operators into one group each."""
    if job.npu or not job.options.NPULimitationCheck:
        return
    for node in model.graph:
        if node.op_type not in _SWITCH or not getattr(job.options, _SWITCH[node.op_type]):
            continue
        data = node.inputs if node.op_type == "Concat" else node.inputs[:1]
        values = [value for value in (*data, *node.outputs) if value is not None and value.name in plan.tensors]
        _join(plan, [value.name or "" for value in values])


def _join(plan: Plan, names: list[str]) -> None:
    """One group for these activations and everything already grouped with them."""
    activations = [plan.tensors[name] for name in names if plan.tensors[name].role == "activation"]
    if len(activations) < 2 or len({replace(tensor.spec, method="minmax") for tensor in activations}) > 1:
        return
    groups = {tensor.group for tensor in activations}
    root = activations[0]
    for name, tensor in plan.tensors.items():
        if tensor.role == "activation" and tensor.group in groups:
            plan.tensors[name] = replace(tensor, group=root.group, spec=root.spec)
