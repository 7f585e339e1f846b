"""The operators that exporters write for layer normalization become one LayerNormalization (FuseLayerNorm).

    y = (x - mean(x)) / √(mean((x - mean(x))²) + ε) · scale + bias        means over the last axes

Source: Ba, Kiros and Hinton 2016, "Layer Normalization". Scale and bias may be absent. LayerNormalization exists from
opset 17 on; models below are lifted on request only. Outputs agree to 1e-4 of the largest: ONNX Runtime computes the
variance as mean(x²) - mean(x)².

Not handled: means over axes that are not the last ones, a scale that does not have the shape of those axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.surgery import (
    Names,
    add_initializer,
    axes_of,
    constant_array,
    int_attribute,
    label,
    nodes_of,
    opset,
    substitute,
    with_operand,
)
from quark.onnx.graph.pattern import Bound, Pattern, any_, constant, either, match, number, op, scalar
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each
from quark.onnx.passes import opset_version

OPSET = 17
Lift = Annotated[bool, "Lift a model of an older opset that has such a normalization."]


def _centered(name: str) -> Pattern:
    return op("Sub", any_("x"), op("ReduceMean", any_("x"), name=f"{name}_mean"))


def _normalized() -> Pattern:
    square = either(op("Pow", _centered("b"), number(2.0)), op("Mul", _centered("b"), _centered("c")))
    root = op("Sqrt", op("Add", op("ReduceMean", square, name="variance"), constant("epsilon")))
    return either(
        op("Div", _centered("a"), root),
        op("Mul", _centered("a"), op("Reciprocal", root)),
        op("Mul", _centered("a"), op("Div", number(1.0), root)),
    )


NORMALIZED = _normalized()


@dataclass(frozen=True)
class LayerNormMatch:
    """A layer normalization that ends in ``last``."""

    last: ir.Value
    x: ir.Value
    axis: int
    epsilon: float
    scale: ir.Value | None
    bias: ir.Value | None


def run(model: ir.Model, lift: Lift = False) -> PassReport:
    """Fuse every layer normalization, in place."""
    if lift and opset(model) < OPSET and any(isinstance(what, LayerNormMatch) for what in _found(model)):
        opset_version.run(model, OPSET)

    def look(node: ir.Node) -> LayerNormMatch | str | None:
        found = None if node.graph is None else match(NORMALIZED, node.outputs[0])
        return None if found is None else why_not(node, found) if opset(model) >= OPSET else _too_old(model)

    nodes = nodes_of(model, "Div", "Mul")
    return rewrite_each(model, "fuse_layer_norm", nodes, look, lambda _, found, names: _rewrite(found, model, names))


def _found(model: ir.Model) -> Iterator[LayerNormMatch | str]:
    """What every layer normalization would become, whatever the opset."""
    for node in nodes_of(model, "Div", "Mul"):
        found = match(NORMALIZED, node.outputs[0])
        if found is not None:
            yield why_not(node, found)


def _too_old(model: ir.Model) -> str:
    return f"LayerNormalization needs opset {OPSET} and the model has {opset(model)}; FuseLayerNorm=True lifts it"


def why_not(node: ir.Node, found: Bound) -> LayerNormMatch | str:
    """The match, or the reason why it stays."""
    epsilon, axis = scalar(found["epsilon"]), _first_axis(found)
    if epsilon is None:
        return "its epsilon is not one number"
    if isinstance(axis, str):
        return axis
    last, scale = with_operand("Mul", node.outputs[0])
    last, bias = with_operand("Add", last)
    for value in (scale, bias):
        if value is not None and not _covers(value, found["x"], axis):
            return f"{value.name!r} does not have the shape of the normalized axes"
    if scale is None and _size(found["x"], axis) is None:
        return "it has no scale, and the size of the normalized axes is not known"
    return LayerNormMatch(last, found["x"], axis, epsilon, scale, bias)


def _first_axis(found: Bound) -> int | str:
    """The first of the normalized axes, counted from the end; a reason where there is none."""
    rank = len(found["x"].shape) if found["x"].shape is not None else None
    seen = set()
    for name in ("a_mean", "b_mean", "c_mean", "variance"):
        maker = found[name].producer() if name in found else None
        if maker is None:
            continue
        axes = axes_of(maker)
        if axes is None or not int_attribute(maker, "keepdims", 1):
            return f"{label(maker)} has no constant axes, or drops them"
        if any(axis >= 0 for axis in axes) and rank is None:
            return "the rank of its input is not known"
        seen.add(tuple(sorted(axis if axis < 0 else axis - (rank or 0) for axis in axes)))
    if len(seen) != 1:
        return "its means run over different axes"
    (found_axes,) = seen
    if list(found_axes) != list(range(-len(found_axes), 0)):
        return f"its means run over the axes {list(found_axes)}, which are not the last ones"
    return -len(found_axes)


def _covers(parameter: ir.Value, x: ir.Value, axis: int) -> bool:
    """Whether a scale or bias has exactly the shape of the normalized axes; an axis of unknown size counts if it must
    be as large as the parameter's."""
    sizes: list[object] = [*(x.shape or ())][axis:] if x.shape is not None else [None] * -axis
    own = list(np.shape(np.asarray(constant_array(parameter))))
    return len(own) == -axis and all(
        mine == theirs if isinstance(theirs, int) else mine > 1 for mine, theirs in zip(own, sizes, strict=True)
    )


def _size(x: ir.Value, axis: int) -> list[int] | None:
    sizes = list(x.shape or ())[axis:]
    known = [size for size in sizes if isinstance(size, int)]
    return known if len(known) == -axis else None


def _rewrite(found: LayerNormMatch, model: ir.Model, names: Names) -> None:
    scale = found.scale
    if scale is None:
        dtype = (found.x.dtype or ir.DataType.FLOAT).numpy()
        ones = np.ones(_size(found.x, found.axis) or [1], dtype)
        scale = add_initializer(model.graph, ones, names.fresh(f"{found.last.name}_scale"))
    inputs = [found.x, scale, *([found.bias] if found.bias is not None else [])]
    maker = found.last.producer()
    attributes = {"axis": found.axis, "epsilon": found.epsilon}
    node = ir.node("LayerNormalization", inputs, attributes=attributes, name=maker.name if maker else None)
    substitute(found.last, [node])
