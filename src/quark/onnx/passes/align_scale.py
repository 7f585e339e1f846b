"""One scale for the inputs and outputs of chosen operators of a quantized graph (onnx_align_scale).

    range = union of the ranges that the codes of all of them cover

Concat, pooling, Pad, Slice, Transpose and Reshape only move values; with one scale a device moves the codes. All stages
of a node get the same scale and zero point; biases that depend on them follow. A tensor that two such nodes share joins
both.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import onnx_ir as ir

from quark.config.plan import TensorPlan
from quark.ir.surgery import label, nodes_of
from quark.onnx.graph.quantized import (
    LIMITS,
    QUANTIZE,
    QuantizedActivation,
    dequantizer,
    stage_of,
)
from quark.onnx.graph.report import PassReport
from quark.onnx.quantized_rows import QuantizedRows, alike

MOVING = ("Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Pad", "Slice", "Transpose", "Reshape")
Which = Annotated[str | list[str], f"Operator types, of {', '.join(MOVING)}."]


def run(model: ir.Model, align_scale: Which = list(MOVING)) -> PassReport:  # noqa: B006
    """Align the stages around every such node, in place; nodes that share a stage are aligned together."""
    types = [align_scale] if isinstance(align_scale, str) else align_scale
    rows, joined, fired, refused = QuantizedRows(model), dict[str, list[str]](), 0, []
    for node in nodes_of(model, *types):
        stages = around(node)
        read = [rows.of(stage.first) for stage in stages]
        found = [row for row in read if row is not None and np.asarray(row.scale).size == 1]
        if len(stages) < 2:
            continue
        if len(found) < len(stages) or len({row.spec.format for row in found}) > 1:
            refused.append(f"{label(node)}: the codes around it differ in type, or have computed parameters")
            continue
        fired += not alike(found)
        group = list(dict.fromkeys(name for row in found for name in joined.get(row.name, [row.name])))
        joined.update(dict.fromkeys(group, group))
    for group in {id(group): group for group in joined.values()}.values():
        members = [rows.plan.tensors[name] for name in group]
        if not alike(members):
            for row in members:
                rows.move(row, *_union(members))
    rows.write()
    return PassReport("align_scale", fired, tuple(refused))


def around(node: ir.Node) -> list[QuantizedActivation]:
    """The stages that feed a node and those that it feeds."""
    before = [dequantizer(value) for value in (node.inputs if node.op_type == "Concat" else node.inputs[:1])]
    makers = [dq.inputs[0].producer() for dq in before if dq is not None and dq.inputs[0] is not None]
    after = [use.node for value in node.outputs for use in value.uses() if use.node.op_type in QUANTIZE]
    found = [stage_of(maker) for maker in dict.fromkeys((*makers, *after)) if maker is not None]
    return [stage for stage in found if stage is not None and stage.first.op_type in QUANTIZE]


def _union(rows: list[TensorPlan]) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero point whose codes cover the ranges of all."""
    if len({int(np.asarray(row.zero_point).reshape(())) for row in rows}) == 1:
        return max((np.asarray(row.scale) for row in rows), key=float), np.asarray(rows[0].zero_point)
    lowest, highest = LIMITS[rows[0].spec.format.upper()]
    low, high = (
        pick(float(row.range[side]) for row in rows if row.range is not None) for side, pick in enumerate((min, max))
    )
    scale = (high - low) / (highest - lowest)
    return np.asarray(scale), np.asarray(int(np.rint(lowest - low / scale)))
