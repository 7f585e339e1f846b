"""The scales of a quantized graph within the limits of the NPU (onnx_xint8_adjust).

The rules of :mod:`quark.onnx.npu.rules` see the graph without its Q and DQ nodes, and their scales as a Plan; what they
moved is written back. A stored constant whose position p moves is rounded again:

    q' = round((q - z) · 2**(p' - p)) + z

The flow has the float weights for that (``NPULimitationCheck``), which is exact; use this pass on files that another
tool wrote. Int32 biases follow the scales of input and weight. Scales that are not powers of two stay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import onnx_ir as ir

from quark.config.plan import Plan, TensorPlan
from quark.ir.surgery import name_nodes
from quark.onnx.graph.quantized import remove, stages
from quark.onnx.graph.report import PassReport
from quark.onnx.npu.limits import limit
from quark.onnx.npu.rules import RULES
from quark.onnx.qdq.op_rules import OP_RULES
from quark.onnx.quantized_rows import QuantizedRows, alike

Rounds = Annotated[int, "Rounds at most, while rules still move something."]
#: Codes whose scale may move; that of an int32 bias follows from others.
KINDS = ("INT8", "UINT8", "INT16", "UINT16")


def run(model: ir.Model, max_loop_num: Rounds = 5) -> PassReport:
    """Move scales in place, until every rule holds."""
    view = model.clone()
    name_nodes(view)
    rows, movable = QuantizedRows(model), Plan()
    names = {row.name: row.name for row in rows.plan.of_role("weight") if _put(movable, row)}
    for mine, stage in zip(stages(model), stages(view), strict=True):
        source, row = stage.source, rows.of(mine.first)
        readers = frozenset(str(use.node.name) for dq in stage.last for use in dq.outputs[0].uses())
        if remove(stage) is None and row is not None:  # what takes the place of an output takes its name
            name = str(source.name)
            if name not in names and _put(movable, replace(row, name=name, group=name, readers=readers)):
                names[name] = row.name
    _group(view, movable)
    report = limit(view, movable, RULES, max_loop_num)
    for name, own in names.items():
        rows.plan.put(replace(movable.tensors[name], name=own))
    return PassReport("xint8_adjust", rows.write(), report.refused)


def _put(plan: Plan, row: TensorPlan) -> bool:
    """Enter a tensor into a Plan; False where its scale has no position."""
    fits = row.spec.format.upper() in KINDS and row.spec.scale_rule == "power_of_two"
    if fits:
        plan.put(row)
    return fits


def _group(view: ir.Model, plan: Plan) -> None:
    """Tensors with the same parameters on both sides of an operator that only moves values stay together."""
    for node in view.graph:
        rule = OP_RULES.get(node.op_type)
        source = plan.tensors.get(str(node.inputs[0].name)) if node.inputs and node.inputs[0] is not None else None
        if rule is None or rule.output != "same" or source is None:
            continue
        for value in node.outputs:
            result = plan.tensors.get(str(value.name))
            if result is not None and alike([source, result]):
                plan.put(replace(result, group=source.group))
