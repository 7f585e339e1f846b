"""Codes around a Resize get a power-of-two scale and a zero point of 0 (the tool convert_resize_fs_to_pof2s).

    s = 2^⌈log2(max(|min|, |max|) / 128)⌉,  int8        min, max: what the codes covered before

Values move to the new grid, which is at most four times coarser (half by the symmetry, half by the power of two).
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.quantized import LIMITS, Rewriter, code_type, parameters
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import label, nodes_of
from quark.onnx.passes import bias_scale
from quark.onnx.passes.align_scale import around

NARROW = ("INT8", "UINT8", "INT16", "UINT16")


def run(model: ir.Model) -> PassReport:
    """Rewrite the stages around every Resize, in place."""
    rewriter, fired, refused = Rewriter(model), 0, []
    for node in nodes_of(model, "Resize"):
        for stage in around(node):
            found, kind = parameters(stage.first), code_type(stage.first)
            if found is None or found[0].size != 1 or kind not in NARROW or stage.first.overload:
                refused.append(f"{label(node)} stays: its parameters are computed, or its codes are {kind}")
                continue
            reach = max(abs(float((limit - found[1]) * found[0])) for limit in LIMITS[kind])
            scale = 2.0 ** math.ceil(math.log2(reach / 128))
            if kind == "INT8" and float(found[0]) == 2.0 ** round(math.log2(float(found[0]))) and not found[1].any():
                continue
            rewriter.set_parameters(stage, np.asarray(scale), np.asarray(0), ir.DataType.INT8)
            fired += 1
    if fired:
        bias_scale.run(model)
    return PassReport("resize_to_power_of_two", fired, tuple(refused))
