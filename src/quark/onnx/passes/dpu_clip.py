"""Clip as the device computes it: whole bounds within eight bits (ConvertClipToDPUVersion).

Clip(x, lo, hi)   becomes   Clip(x, round(lo), round(hi)), each limited to -128..127; an absent bound is one of them
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each
from quark.onnx.graph.surgery import Names, add_initializer, constant_array, drop_if_unused, input_at, set_input

LOWEST, HIGHEST = -128, 127


def run(model: ir.Model, wanted: Callable[[ir.Node], bool]) -> PassReport:
    """Rewrite the wanted nodes of ``model`` in place."""

    def look(node: ir.Node) -> list[ir.Value | None] | str:
        given = [input_at(node, 1), input_at(node, 2)]
        computed = any(value is not None and constant_array(value) is None for value in given)
        return "its bounds are not constant" if computed else given

    nodes = [node for node in model.graph if node.op_type == "Clip" and wanted(node)]
    return rewrite_each(
        model, "dpu_clip", nodes, look, lambda node, given, names: _rewrite(model.graph, node, given, names)
    )


def _rewrite(graph: ir.Graph, node: ir.Node, given: list[ir.Value | None], names: Names) -> bool:
    changed = False
    dtype = np.float16 if node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT16 else np.float32
    for slot, (value, absent, side) in enumerate(zip(given, (LOWEST, HIGHEST), ("min", "max"), strict=True), start=1):
        array = constant_array(value)
        bound = absent if array is None else float(np.clip(np.rint(array.reshape(-1)[0]), LOWEST, HIGHEST))
        if array is None or bound != array.reshape(-1)[0]:
            fresh = add_initializer(graph, np.asarray(bound, dtype), names.fresh(f"{node.outputs[0].name}_{side}"))
            set_input(node, slot, fresh)
            drop_if_unused(value)
            changed = True
    return changed
