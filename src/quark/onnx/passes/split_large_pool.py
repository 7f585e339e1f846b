"""A global average over many pixels becomes two averages (SplitLargeKernelPool).

    GlobalAveragePool over H × W > 512  =  GlobalAveragePool ∘ AveragePool(kernel = stride = [h, w])

with h the largest divisor of H up to √H, w of W. An NPU sums at most 512 pixels in one kernel. Splits once.

Not handled: sizes that are not known; sizes of which no split has both parts at or below 512 pixels (a prime H, say).
"""

from __future__ import annotations

import math

import onnx_ir as ir

from quark.ir.surgery import Names, nodes_of
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each
from quark.onnx.graph.shapes import static_shape

LARGEST = 512


def run(model: ir.Model) -> PassReport:
    """Rewrite ``model`` in place."""
    nodes = nodes_of(model, "GlobalAveragePool")
    return rewrite_each(model, "split_large_pool", nodes, kernel_of, _rewrite)


def kernel_of(node: ir.Node) -> tuple[int, int] | str | None:
    """The kernel of the first average; None where one average is enough, or the reason why it cannot be split."""
    source = node.inputs[0]
    sizes = list(source.shape or ()) if source is not None else []
    known = [size for size in sizes[2:] if isinstance(size, int)]
    if len(sizes) != 4 or len(known) != 2:
        return "the height and width of its input are not known"
    height, width = known
    if height * width <= LARGEST:
        return None
    h, w = _divisor(height), _divisor(width)
    if h * w > LARGEST or (height // h) * (width // w) > LARGEST:
        return f"{height} x {width} has no split into two averages of at most {LARGEST} pixels"
    return h, w


def _divisor(size: int) -> int:
    """The largest divisor of ``size`` up to its square root."""
    return next(candidate for candidate in range(math.isqrt(size), 0, -1) if size % candidate == 0)


def _rewrite(node: ir.Node, kernel: tuple[int, int], names: Names) -> None:
    source = node.inputs[0]
    if source is None or node.graph is None:
        return
    shape = static_shape(source)
    between = ir.Value(
        name=names.fresh(f"{source.name}_Split"),
        type=source.type,
        shape=None if shape is None else ir.Shape([*shape[:2], shape[2] // kernel[0], shape[3] // kernel[1]]),
    )
    attributes = {"kernel_shape": kernel, "strides": kernel}
    first = ir.node("AveragePool", [source], attributes=attributes, outputs=[between], name=f"{node.name}_Split")
    node.graph.insert_before(node, first)
    node.replace_input_with(0, between)
