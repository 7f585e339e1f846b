"""Quantized biases of 32 bits become 16 bits (Int16Bias, the tool convert_bias_int32_to_int16).

    s' = s · max(1, max|q| / 32767)  per scale,     q' = round(q · s / s')

Values that fit keep their codes; larger ones get a coarser scale instead of being cut off. DequantizeLinear reads int16
from opset 21 on, so the model is lifted there.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import has_array, input_at, nodes_of
from quark.onnx.graph.quantized import code_type, dequantizer
from quark.onnx.graph.report import PassReport
from quark.onnx.passes import opset_version
from quark.onnx.passes.bias_scale import BIASED
from quark.onnx.quantized_rows import QuantizedRows

LARGEST = 32767


def run(model: ir.Model) -> PassReport:
    """Narrow every int32 bias, in place."""
    nodes = [dequantizer(input_at(node, 2)) for node in nodes_of(model, *BIASED)]
    biases = [node for node in dict.fromkeys(nodes) if node is not None and code_type(node) == "INT32"]
    if not biases:
        return PassReport("bias_to_int16")
    opset_version.run(model, 21)
    rows, fired, refused = QuantizedRows(model), 0, []
    for node in biases:
        row = rows.of(node)
        if row is None or not has_array(node.inputs[0]):
            refused.append(f"{node.name!r} stays: its parameters are computed")
            continue
        scale, values = np.asarray(row.scale), np.abs(rows.codes(row).astype(np.float64) - np.asarray(row.zero_point))
        largest = values if scale.size == values.size else values.max(initial=0)
        ratio = np.maximum(1.0, largest / LARGEST).reshape(scale.shape)
        rows.move(row, scale * ratio, np.zeros_like(scale, np.int64), "INT16")
        fired += 1
    rows.write(biases=False)
    return PassReport("bias_to_int16", fired, tuple(refused))
