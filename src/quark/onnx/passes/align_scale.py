"""One scale for the inputs and outputs of chosen operators of a quantized graph (onnx_align_scale).

    range = union of the ranges that the codes of all of them cover

Concat, pooling, Pad, Slice, Transpose and Reshape only move values; with one scale a device moves the codes. All stages
of a node get the same scale and zero point; biases that depend on them follow. A tensor that two such nodes share joins
both.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.quantized import (
    LIMITS,
    QUANTIZE,
    QuantizedActivation,
    Rewriter,
    code_type,
    dequantizer,
    parameters,
    stage_of,
)
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import label, nodes_of
from quark.onnx.passes import bias_scale

Parameters: TypeAlias = "tuple[np.ndarray, np.ndarray]"
MOVING = ("Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Pad", "Slice", "Transpose", "Reshape")
Which = Annotated[str | list[str], f"Operator types, of {', '.join(MOVING)}."]


def run(model: ir.Model, align_scale: Which = list(MOVING)) -> PassReport:  # noqa: B006
    """Align the stages around every such node, in place; nodes that share a stage are aligned together."""
    types = [align_scale] if isinstance(align_scale, str) else align_scale
    fired, refused = 0, []
    joined: dict[ir.Node, list[ir.Node]] = {}
    stage_of_first: dict[ir.Node, QuantizedActivation] = {}
    for node in nodes_of(model, *types):
        found = around(node)
        if len(found) < 2:
            continue
        if len({code_type(stage.first) for stage in found}) > 1 or any(_single(stage) is None for stage in found):
            refused.append(f"{label(node)}: the codes around it differ in type, or have computed parameters")
            continue
        fired += not _alike(found)
        stage_of_first |= {stage.first: stage for stage in found}
        _join(joined, [stage.first for stage in found])
    groups = {id(group): group for group in joined.values()}
    rewriter = Rewriter(model)
    for group in groups.values():
        _align([stage_of_first[first] for first in group], rewriter)
    if fired:
        bias_scale.run(model)
    return PassReport("align_scale", fired, tuple(refused))


def _join(joined: dict[ir.Node, list[ir.Node]], firsts: list[ir.Node]) -> None:
    """Let the groups of these nodes be one; every node maps to the list of its group."""
    group = list(dict.fromkeys(one for first in firsts for one in joined.get(first, [first])))
    joined.update(dict.fromkeys(group, group))


def _single(stage: QuantizedActivation) -> Parameters | None:
    """The parameters of a stage, None where they are computed or several."""
    found = parameters(stage.first)
    return None if found is None or found[0].size != 1 else found


def _alike(group: list[QuantizedActivation]) -> bool:
    """Whether all stages have the same parameters."""
    found = [parameters(stage.first) for stage in group]
    known = [one for one in found if one is not None]
    return all(np.array_equal(one[0], known[0][0]) and np.array_equal(one[1], known[0][1]) for one in known)


def _align(group: list[QuantizedActivation], rewriter: Rewriter) -> None:
    """Give all of a group the parameters of the union of their ranges."""
    if _alike(group):
        return
    kind = code_type(group[0].first)
    scale, zero_point = _union([one for one in map(_single, group) if one is not None], kind)
    for stage in group:
        rewriter.set_parameters(stage, scale, zero_point, ir.DataType[kind])


def around(node: ir.Node) -> list[QuantizedActivation]:
    """The stages that feed a node and those that it feeds."""
    before = [dequantizer(value) for value in (node.inputs if node.op_type == "Concat" else node.inputs[:1])]
    makers = [dq.inputs[0].producer() for dq in before if dq is not None and dq.inputs[0] is not None]
    after = [use.node for value in node.outputs for use in value.uses() if use.node.op_type in QUANTIZE]
    found = [stage_of(maker) for maker in dict.fromkeys((*makers, *after)) if maker is not None]
    return [stage for stage in found if stage is not None and stage.first.op_type in QUANTIZE]


def _union(found: list[Parameters], kind: str) -> Parameters:
    lowest, highest = LIMITS[kind]
    if len({int(zero_point.reshape(())) for _, zero_point in found}) == 1:
        return max((one[0] for one in found), key=float), found[0][1]
    low = min(float((lowest - z) * s) for s, z in found)
    high = max(float((highest - z) * s) for s, z in found)
    scale = (high - low) / (highest - lowest)
    return np.asarray(scale), np.asarray(int(np.rint(lowest - low / scale)))
