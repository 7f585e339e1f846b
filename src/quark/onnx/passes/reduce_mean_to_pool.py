"""A mean over the spatial axes becomes GlobalAveragePool (ConvertReduceMeanToGlobalAvgPool).

    ReduceMean(x, axes = [2, .., rank - 1], keepdims = 1)  =  GlobalAveragePool(x)

With ``keepdims = 0`` a Flatten follows. Runtimes and NPU compilers have an integer kernel for the pool and none for the
mean. With ``keep_norms`` the means of a normalization (of squares, or subtracted from what they are of) stay: ONNX
Runtime makes one kernel of RMSNorm and LayerNorm, and finds them by their ReduceMean. Not handled: other axes, inputs
of unknown rank or below three axes, integers and float64 (the pool has no kernel for them).
"""

from __future__ import annotations

from typing import Annotated

import onnx_ir as ir

from quark.ir.surgery import axes_of, int_attribute, nodes_of, not_single, substitute
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each

KeepNorms = Annotated[bool, "The means of RMSNorm and LayerNorm stay what ONNX Runtime finds these by."]


def run(model: ir.Model, keep_norms: KeepNorms = False) -> PassReport:
    """Rewrite ``model`` in place."""

    def look(node: ir.Node) -> ir.Node | str:
        return why_not(node) or ("it is of a normalization" if keep_norms and of_a_norm(node) else node)

    return rewrite_each(
        model, "reduce_mean_to_pool", nodes_of(model, "ReduceMean"), look, lambda node, *_: _rewrite(node)
    )


def why_not(node: ir.Node) -> str | None:
    """The reason why a ReduceMean is not a global average pool, or None."""
    source = node.inputs[0]
    if source is None or source.shape is None or len(source.shape) < 3:
        return "its input has fewer than three axes, or an unknown number"
    axes, rank = axes_of(node), len(source.shape)
    if axes is None:
        return "its axes are not constant"
    if sorted(axis % rank for axis in axes) != list(range(2, rank)):
        return f"it reduces the axes {axes}, not the spatial ones"
    return not_single(source)


def of_a_norm(node: ir.Node) -> bool:
    """Whether a mean is of squares, or subtracted from what it is the mean of."""
    source = node.inputs[0]
    square = None if source is None else source.producer()
    if square is not None and square.op_type in ("Pow", "Mul"):
        return square.op_type == "Pow" or square.inputs[0] is square.inputs[1]
    return any(use.node.op_type == "Sub" and source in use.node.inputs for use in node.outputs[0].uses())


def _rewrite(node: ir.Node) -> None:
    source, output = node.inputs[0], node.outputs[0]
    shape = None if source is None or source.shape is None else (*source.shape[:2], *[1] * (len(source.shape) - 2))
    pooled = ir.Value(name=f"{output.name}_pooled", shape=None if shape is None else ir.Shape(shape), type=output.type)
    nodes = [ir.node("GlobalAveragePool", [source], outputs=[pooled], name=node.name)]
    if not int_attribute(node, "keepdims", 1):
        nodes.append(ir.node("Flatten", [pooled], attributes={"axis": 1}, name=f"{node.name}_flatten"))
    substitute(output, nodes)
