"""Codes around a Resize get a power-of-two scale and a zero point of 0 (the tool convert_resize_fs_to_pof2s).

    s = 2^⌈log2(max(|min|, |max|) / 128)⌉,  int8        min, max: what the codes covered before

Values move to the new grid, which is at most four times coarser (half by the symmetry, half by the power of two).
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import label, nodes_of
from quark.onnx.graph.quantized import code_type
from quark.onnx.graph.report import PassReport
from quark.onnx.passes.align_scale import around
from quark.onnx.quantized_rows import QuantizedRows

NARROW = ("INT8", "UINT8", "INT16", "UINT16")


def run(model: ir.Model) -> PassReport:
    """Rewrite the stages around every Resize, in place."""
    rows, fired, refused = QuantizedRows(model), 0, []
    for node in nodes_of(model, "Resize"):
        for stage in around(node):
            row = rows.of(stage.first)
            kind = code_type(stage.first) if row is None else row.spec.format.upper()
            if row is None or np.asarray(row.scale).size != 1 or kind not in NARROW or stage.first.overload:
                refused.append(f"{label(node)} stays: its parameters are computed, or its codes are {kind}")
                continue
            scale, bounds = float(np.asarray(row.scale)), row.range or (0, 0)
            if kind == "INT8" and scale == 2.0 ** round(math.log2(scale)) and not np.any(row.zero_point):
                continue
            reach = max(abs(float(limit)) for limit in bounds)
            rows.move(row, 2.0 ** math.ceil(math.log2(reach / 128)), 0, "INT8")
            fired += 1
    rows.write()
    return PassReport("resize_to_power_of_two", fired, tuple(refused))
