"""Quantized biases of 32 bits become 16 bits (Int16Bias, the tool convert_bias_int32_to_int16).

    s' = s · max(1, max|q| / 32767)  per scale,     q' = round(q · s / s')

Values that fit keep their codes; larger ones get a coarser scale instead of being cut off. DequantizeLinear reads int16
from opset 21 on, so the model is lifted there.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.quantized import Rewriter, code_type, dequantizer, parameters
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import constant_array, input_at, nodes_of
from quark.onnx.passes import opset_version
from quark.onnx.passes.bias_scale import BIASED

LARGEST = 32767


def run(model: ir.Model) -> PassReport:
    """Narrow every int32 bias, in place."""
    nodes = [dequantizer(input_at(node, 2)) for node in nodes_of(model, *BIASED)]
    biases = [node for node in dict.fromkeys(nodes) if node is not None and code_type(node) == "INT32"]
    if not biases:
        return PassReport("bias_to_int16")
    opset_version.run(model, 21)
    rewriter, fired, refused = Rewriter(model), 0, []
    for node in biases:
        found, codes = parameters(node), constant_array(node.inputs[0])
        if found is None or codes is None:
            refused.append(f"{node.name!r} stays: its parameters are computed")
            continue
        scale, offset = found
        values = codes.astype(np.float64) - offset
        largest = np.abs(values) if scale.size == codes.size else np.abs(values).max(initial=0)
        ratio = np.maximum(1.0, largest / LARGEST).reshape(scale.shape)
        rewriter.set_constant(node, np.rint(values / ratio), scale * ratio, ir.DataType.INT16)
        fired += 1
    return PassReport("bias_to_int16", fired, tuple(refused))
