"""Scales of a weight's channels within one order of each other (onnx_constrain_per_channel_weight_scale).

    s'_c = max(s_c, least),   q'_c = round(q_c · s_c / s'_c)       where max s / min s exceeds a ratio

A channel of (almost) zeros has a scale that is (almost) zero, at which its int32 bias may overflow. Larger scales cost
such channels nothing that shows.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.quantized_rows import QuantizedRows

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
    rows, fired = QuantizedRows(model), 0
    for row in rows.plan.of_role("weight"):
        scale, codes = np.asarray(row.scale), rows.codes(row)
        if scale.size < 2 or codes.ndim < 2 or np.any(row.zero_point):
            continue
        least = float(scale.max()) / maxmin_scale_ratio if adaptive_min_w_scale else min_w_scale
        if scale.max() <= maxmin_scale_ratio * scale.min() or (scale >= least).all():
            continue
        rows.move(row, np.maximum(scale, least), row.zero_point)
        fired += 1
    rows.write(biases=adjust_bias)
    return PassReport("channel_scales", fired)
