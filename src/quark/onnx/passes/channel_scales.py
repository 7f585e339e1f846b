"""Scales of a weight's channels within one order of each other (onnx_constrain_per_channel_weight_scale).

    s'_c = max(s_c, least),   q'_c = round(q_c · s_c / s'_c)       where max s / min s exceeds a ratio

A channel of (almost) zeros has a scale that is (almost) zero, at which its int32 bias may overflow. Larger scales cost
such channels nothing that shows.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.quantized import Rewriter, parameters, stored
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import constant_array, int_attribute
from quark.onnx.passes import bias_scale

Least = Annotated[float, "The least scale of a channel."]
Adaptive = Annotated[bool, "Let the least scale be the largest one divided by the ratio."]
Ratio = Annotated[float, "Largest scale / smallest scale from which a weight is changed."]
Adjust = Annotated[bool, "Biases follow their weights."]


def run(
    model: ir.Model,
    min_w_scale: Least = 1e-7,
    adaptive_min_w_scale: Adaptive = False,
    maxmin_scale_ratio: Ratio = 1e6,
    adjust_bias: Adjust = True,
) -> PassReport:
    """Constrain the scales of every weight that has one per channel, in place."""
    rewriter, fired = None, 0
    for node in stored(model):
        found, codes = parameters(node), constant_array(node.inputs[0])
        if found is None or codes is None or found[0].size < 2 or codes.ndim < 2 or found[1].any():
            continue
        scale = found[0]
        least = float(scale.max()) / maxmin_scale_ratio if adaptive_min_w_scale else min_w_scale
        if scale.max() <= maxmin_scale_ratio * scale.min() or (scale >= least).all():
            continue
        raised = np.maximum(scale, least)
        shape = [-1 if axis == int_attribute(node, "axis", 1) % codes.ndim else 1 for axis in range(codes.ndim)]
        moved = np.rint(codes.astype(np.float64) * (scale / raised).reshape(shape))
        kind = node.inputs[0].dtype if node.inputs[0] is not None else None
        rewriter = rewriter or Rewriter(model)
        rewriter.set_constant(node, moved, raised, kind or ir.DataType.INT8)
        fired += 1
    if fired and adjust_bias:
        bias_scale.run(model)
    return PassReport("channel_scales", fired)
