"""A Split becomes one Slice for each of its outputs (ConvertSplitToSlice).

    part k = x[start_k : start_k + size_k] along the axis

The sizes come from the second input, the attribute, or, for equal parts, from the length of the axis. Outputs that
nobody reads get no Slice.

Not handled: sizes that are computed; equal parts of an axis whose length is not known; models
below opset 10.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import (
    Names,
    add_initializer,
    constant_array,
    drop_if_unused,
    input_at,
    int_attribute,
    ints_attribute,
    nodes_of,
    opset,
    stand_for,
)
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each

#: From here on the bounds of a Slice are inputs.
OPSET = 10


def run(model: ir.Model) -> PassReport:
    """Rewrite ``model`` in place."""
    too_old = None if opset(model) >= OPSET else f"Slice with computed bounds needs opset {OPSET}"
    return rewrite_each(
        model,
        "split_to_slice",
        nodes_of(model, "Split"),
        lambda node: too_old or sizes_of(node),
        lambda node, sizes, names: _rewrite(node, sizes, model, names),
    )


def sizes_of(node: ir.Node) -> list[int] | str:
    """The length of every part, or the reason why they are not known."""
    given = ints_attribute(node, "split")
    if given is not None:
        return given
    sizes = input_at(node, 1)
    if sizes is not None:
        array = constant_array(sizes)
        return "its sizes are computed" if array is None else [int(size) for size in array]
    source, axis, count = node.inputs[0], int_attribute(node, "axis", 0), len(node.outputs)
    shape = list(source.shape or ()) if source is not None else []
    length = shape[axis] if -len(shape) <= axis < len(shape) else None
    if not isinstance(length, int):
        return "it makes equal parts of an axis whose length is not known"
    part = -(-length // count)
    return [min(part, length - part * k) for k in range(count)]


def _rewrite(node: ir.Node, sizes: Sequence[int], model: ir.Model, names: Names) -> None:
    source, axis, graph = node.inputs[0], int_attribute(node, "axis", 0), node.graph
    if source is None or graph is None:
        return
    ends = np.cumsum(sizes)
    axes = add_initializer(model.graph, np.array([axis], np.int64), names.fresh(f"{node.name}_axes"))
    step = add_initializer(model.graph, np.array([1], np.int64), names.fresh(f"{node.name}_steps"))
    for number, (output, end, size) in enumerate(zip(node.outputs, ends, sizes, strict=True)):
        if not output.uses() and not output.is_graph_output():
            continue
        bounds = [
            add_initializer(model.graph, np.array([bound], np.int64), names.fresh(f"{node.name}_{what}_{number}"))
            for what, bound in (("starts", int(end) - size), ("ends", int(end)))
        ]
        part = ir.Value(name=output.name, shape=output.shape, type=output.type)
        output.name = f"{output.name} (before)"
        made = ir.node("Slice", [source, *bounds, axes, step], outputs=[part], name=f"{node.name}_slice_{number}")
        stand_for([made], node)
        graph.insert_before(node, made)
        output.replace_all_uses_with(part, replace_graph_outputs=True)
    given = input_at(node, 1)
    graph.remove(node, safe=True)
    for value in (given, axes, step):
        drop_if_unused(value)
