"""``CalibPassthroughOpTypes``: operators that keep the distribution of their values need no calibration of their own.

Their outputs take the range, and with it the scale, of what they read. Following them in graph order, a chain of such
operators ends at the nearest tensor that another operator made.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from quark.config.plan import Plan, TensorPlan
from quark.ir.surgery import name_of


def pass_through(model: ir.Model, plan: Plan, op_types: list[str]) -> None:
    """Let the outputs of nodes of these types share the range of their first quantized input."""
    for node in model.graph:
        if node.op_type in op_types:
            _share(node, plan)


def _share(node: ir.Node, plan: Plan) -> None:
    sources = (plan.tensors.get(name_of(value)) for value in node.inputs if value is not None)
    source = next((tensor for tensor in sources if tensor is not None and tensor.role == "activation"), None)
    if source is None:
        return
    for value in node.outputs:
        own = plan.tensors.get(name_of(value))
        if own is not None and own.role == "activation" and own.group != source.group:
            _join(plan, own, source)


def _join(plan: Plan, own: TensorPlan, source: TensorPlan) -> None:
    """``own`` and the tensors that share its range share that of ``source``; of them none is observed any more."""
    for member in plan.groups()[own.group]:
        reason = f"{member.reason} passes on the range of {source.name!r} (CalibPassthroughOpTypes)"
        kept = member.reason if member is not own else reason
        plan.put(replace(member, group=source.group, spec=source.spec, observed=False, fixed_range=None, reason=kept))
