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

import numpy as np
import onnx_ir as ir

from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import TensorSpec
from quark.onnx.graph.quantized import (
    DEQUANTIZE,
    LIMITS,
    QuantizedActivation,
    Rewriter,
    code_type,
    parameters,
    remove,
    stages,
    stored,
)
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import constant_array, name_nodes
from quark.onnx.npu.limits import limit
from quark.onnx.npu.rules import RULES
from quark.onnx.passes import bias_scale
from quark.onnx.qdq.op_rules import OP_RULES

Rounds = Annotated[int, "Rounds at most, while rules still move something."]
#: Codes whose scale may move; that of an int32 bias follows from others.
KINDS = ("INT8", "UINT8", "INT16", "UINT16")


def run(model: ir.Model, max_loop_num: Rounds = 5) -> PassReport:
    """Move scales in place, until every rule holds."""
    view, plan = model.clone(), Plan()
    name_nodes(view)
    made: dict[str, QuantizedActivation | ir.Node] = {}
    for original, node in zip(stored(model), stored(view), strict=True):
        if node.op_type in DEQUANTIZE and _put(plan, str(node.outputs[0].name), "weight", node, None):
            made[str(node.outputs[0].name)] = original
    for mine, stage in zip(stages(model), stages(view), strict=True):
        source = stage.source
        readers = frozenset(str(use.node.name) for dq in stage.last for use in dq.outputs[0].uses())
        if remove(stage) is None and _put(plan, str(source.name), "activation", mine.first, readers):
            made[str(source.name)] = mine
    _group(view, plan)
    before = {name: tensor.scale for name, tensor in plan.tensors.items()}
    report = limit(view, plan, RULES, max_loop_num)
    rewriter = Rewriter(model)
    moved = [name for name in made if not _same(plan.tensors[name].scale, before[name])]
    for name in moved:
        _write(rewriter, made[name], plan.tensors[name])
    if moved:
        bias_scale.run(model)
    return PassReport("xint8_adjust", len(moved), report.refused)


def _put(plan: Plan, name: str, role: str, node: ir.Node, readers: frozenset[str] | None) -> bool:
    """Enter a tensor into the Plan; False where its scale has no position, or it is there already."""
    found, kind = parameters(node), code_type(node)
    if found is None or kind not in KINDS or name in plan.tensors:
        return False
    scale, zero_point = found
    if not (np.frexp(scale)[0] == 0.5).all():
        return False
    lowest, highest = LIMITS[kind]
    symmetric = bool((zero_point == (0 if lowest else (highest + 1) // 2)).all())
    spec = TensorSpec(kind.lower(), symmetric=symmetric, scale_rule="power_of_two")
    bounds = ((lowest - zero_point) * scale, (highest - zero_point) * scale)
    entry = TensorPlan(name, "weight", spec, "it is quantized", name, readers=readers)
    if role == "activation":
        entry = replace(entry, role="activation")
    plan.put(replace(entry, range=bounds, scale=scale.astype(np.float32), zero_point=zero_point))
    return True


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _group(view: ir.Model, plan: Plan) -> None:
    """Tensors with the same parameters on both sides of an operator that only moves values stay together."""
    for node in view.graph:
        rule = OP_RULES.get(node.op_type)
        source = plan.tensors.get(str(node.inputs[0].name)) if node.inputs and node.inputs[0] is not None else None
        if rule is None or rule.output != "same" or source is None:
            continue
        for value in node.outputs:
            result = plan.tensors.get(str(value.name))
            if result is not None and _alike(source, result):
                plan.put(replace(result, group=source.group))


def _alike(one: TensorPlan, other: TensorPlan) -> bool:
    same = np.array_equal(np.asarray(one.scale), np.asarray(other.scale)) and one.spec == other.spec
    return same and np.array_equal(np.asarray(one.zero_point), np.asarray(other.zero_point))


def _write(rewriter: Rewriter, target: QuantizedActivation | ir.Node, tensor: TensorPlan) -> None:
    """Give Q and DQ nodes, or a stored constant, the parameters of the Plan."""
    scale, zero_point = np.asarray(tensor.scale), np.asarray(tensor.zero_point)
    dtype = ir.DataType[tensor.spec.format.upper()]
    if isinstance(target, QuantizedActivation):
        rewriter.set_parameters(target, scale, zero_point, dtype)
        return
    found, codes = parameters(target), constant_array(target.inputs[0])
    if found is None or codes is None:
        raise ValueError(f"{target.name!r} dequantizes no constant")
    factor = _beside(found[0] / scale, codes, target)
    zero = _beside(found[1], codes, target)
    moved = np.clip(np.rint((codes.astype(np.float64) - zero) * factor) + zero, *LIMITS[dtype.name])
    rewriter.set_constant(target, moved, scale, dtype, found[1])


def _beside(values: np.ndarray, codes: np.ndarray, node: ir.Node) -> np.ndarray:
    """One value, or one per channel along the axis of a DQ, in a shape that broadcasts to the codes."""
    if values.size == 1:
        return values.reshape(())
    given = node.attributes.get("axis")
    shape = [1] * codes.ndim
    shape[1 if given is None else int(given.value)] = -1
    return values.reshape(shape)
