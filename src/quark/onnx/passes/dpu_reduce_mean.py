"""ReduceMean as the device computes it: division as a multiplication and a shift (ConvertReduceMeanToDPUVersion).

See ``dpu_factor``. Not handled: axes that are not constant or sizes that are not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import axes_of, constant_array, input_at
from quark.onnx.passes.dpu_factor import correct, mean_factor


def run(model: ir.Model, wanted: Callable[[ir.Node], bool]) -> PassReport:
    """Rewrite the wanted nodes of ``model`` in place."""

    def look(node: ir.Node) -> float | str:
        count = reduced(node)
        return "the number of values that it averages is not known" if count is None else mean_factor(count)

    return correct(model, "dpu_reduce_mean", ("ReduceMean",), wanted, look)


def reduced(node: ir.Node) -> int | None:
    """How many values one result is the mean of; ``None`` where that is not known."""
    source, second = node.inputs[0], input_at(node, 1)
    if source is None or source.shape is None or (second is not None and constant_array(second) is None):
        return None
    sizes = [source.shape[axis] for axis in axes_of(node) or range(len(source.shape))]
    known = [size for size in sizes if isinstance(size, int)]
    return math.prod(known) if len(known) == len(sizes) and math.prod(known) > 0 else None
