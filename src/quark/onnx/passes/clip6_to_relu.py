"""Every Clip(0, 6) becomes a Relu before equalization (ReplaceClip6Relu).

    relu(s · x) = s · relu(x)  for s > 0,  while  clip(s · x, 0, 6) ≠ s · clip(x, 0, 6)

so that equalization can move scales through it. The model changes: values above 6 are no longer cut. Networks that were
trained with ReLU6 keep their accuracy only where the cut does little; measure it.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import clip_bounds, label, nodes_of
from quark.onnx.passes.clip_to_relu import to_relu


def run(model: ir.Model, where: Callable[[ir.Node], bool] | None = None) -> PassReport:
    """Rewrite ``model`` in place.

    Args:
        where: which Clips are looked at; all where it is None.
    """
    fired, refused = 0, []
    for node in nodes_of(model, "Clip"):
        if where is not None and not where(node):
            continue
        bounds = clip_bounds(node)
        if bounds == (0.0, 6.0):
            to_relu(node)
            fired += 1
        else:
            refused.append(f"{label(node)} stays: its bounds are {bounds or 'computed'}, not (0, 6)")
    return PassReport("clip6_to_relu", fired, tuple(refused))
