"""Every Clip(0, 6) becomes a Relu before equalization (ReplaceClip6Relu).

    relu(s · x) = s · relu(x)  for s > 0,  while  clip(s · x, 0, 6) ≠ s · clip(x, 0, 6)

so that equalization can move scales through it. The model changes: values above 6 are no longer cut. Networks that were
trained with ReLU6 keep their accuracy only where the cut does little; measure it.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from quark.ir.surgery import clip_bounds, nodes_of
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each
from quark.onnx.passes.clip_to_relu import to_relu


def run(model: ir.Model, where: Callable[[ir.Node], bool] | None = None) -> PassReport:
    """Rewrite ``model`` in place.

    Args:
        where: which Clips are looked at; all where it is None.
    """

    def look(node: ir.Node) -> ir.Node | str:
        bounds = clip_bounds(node)
        return node if bounds == (0.0, 6.0) else f"its bounds are {bounds or 'computed'}, not (0, 6)"

    nodes = [node for node in nodes_of(model, "Clip") if where is None or where(node)]
    return rewrite_each(model, "clip6_to_relu", nodes, look, lambda node, *_: to_relu(node))
