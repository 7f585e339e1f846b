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

from quark.onnx.graph.quantized import LIMITS, QUANTIZE, Rewriter, Stage, code_type, dequantizer, parameters, stage_of
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import label, nodes_of
from quark.onnx.passes import bias_scale

MOVING = ("Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Pad", "Slice", "Transpose", "Reshape")
Which = Annotated[str | list[str], f"Operator types, of {', '.join(MOVING)}."]


def run(model: ir.Model, align_scale: Which = list(MOVING)) -> PassReport:  # noqa: B006
    """Align the stages around every such node, in place; repeats until nothing changes."""
    types = [align_scale] if isinstance(align_scale, str) else align_scale
    rewriter, fired, refused = Rewriter(model), 0, []
    for node in nodes_of(model, *types):
        found_stages = around(node)
        if len(found_stages) < 2:
            continue
        kinds = {code_type(stage.first) for stage in found_stages}
        found = [parameters(stage.first) for stage in found_stages]
        if len(kinds) > 1 or any(one is None or one[0].size != 1 for one in found):
            refused.append(f"{label(node)}: the codes around it differ in type, or have computed parameters")
            continue
        known = [one for one in found if one is not None]
        if all(np.array_equal(one[0], known[0][0]) and np.array_equal(one[1], known[0][1]) for one in known):
            continue
        scale, zero_point = _union(known, next(iter(kinds)))
        for stage in found_stages:
            rewriter.set_parameters(stage, scale, zero_point, ir.DataType[next(iter(kinds))])
        fired += 1
    if fired:
        bias_scale.run(model)
    return PassReport("align_scale", fired, tuple(refused))


def around(node: ir.Node) -> list[Stage]:
    """The stages that feed a node and those that it feeds."""
    before = [dequantizer(value) for value in (node.inputs if node.op_type == "Concat" else node.inputs[:1])]
    makers = [dq.inputs[0].producer() for dq in before if dq is not None and dq.inputs[0] is not None]
    after = [use.node for value in node.outputs for use in value.uses() if use.node.op_type in QUANTIZE]
    found = [stage_of(maker) for maker in dict.fromkeys((*makers, *after)) if maker is not None]
    return [stage for stage in found if stage is not None and stage.first.op_type in QUANTIZE]


def _union(found: list[tuple[np.ndarray, np.ndarray]], kind: str) -> tuple[np.ndarray, np.ndarray]:
    lowest, highest = LIMITS[kind]
    if len({int(zero_point.reshape(())) for _, zero_point in found}) == 1:
        return max((one[0] for one in found), key=float), found[0][1]
    low = min(float((lowest - z) * s) for s, z in found)
    high = max(float((highest - z) * s) for s, z in found)
    scale = (high - low) / (highest - lowest)
    return np.asarray(scale), np.asarray(int(np.rint(lowest - low / scale)))
