"""The operators that exporters write for instance normalization become one InstanceNormalization (FuseInstanceNorm).

    y = (x - μ) / √(σ² + ε) · scale + bias          μ, σ² over the spatial axes, scale and bias per channel

or, with r = scale / √(σ² + ε):  y = x · r + (bias - μ · r).  The means are GlobalAveragePool or ReduceMean.

Source: Ulyanov, Vedaldi and Lempitsky 2016, "Instance Normalization". The scale and bias [1, C, 1, …] are copied to the
[C] of the operator, so whoever shares them keeps them. Outputs agree to 1e-4 of the largest.

Not handled: a rank that is not known, scales without one element per channel, float64.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.surgery import (
    Names,
    add_initializer,
    axes_of,
    constant_array,
    int_attribute,
    nodes_of,
    not_single,
    substitute,
    with_operand,
)
from quark.onnx.graph.pattern import Bound, Pattern, any_, constant, either, match, number, op, scalar
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each


def _mean(source: Pattern, name: str) -> Pattern:
    return either(op("GlobalAveragePool", source, name=name), op("ReduceMean", source, name=name))


def _centered(name: str) -> Pattern:
    return op("Sub", any_("x"), _mean(any_("x"), name))


def _root() -> Pattern:
    """√(σ² + ε)."""
    square = either(op("Mul", _centered("b"), _centered("c")), op("Pow", _centered("b"), number(2.0)))
    return op("Sqrt", op("Add", _mean(square, "variance"), constant("epsilon")))


def _inverse() -> Pattern:
    return either(op("Reciprocal", _root()), op("Div", number(1.0), _root()))


_RATIO = op("Mul", _inverse(), constant("scale"), name="ratio")
#: y = x · r + (bias - μ · r): complete, with its scale and bias.
SHIFTED = op(
    "Add",
    op("Mul", any_("x"), _RATIO),
    op("Sub", constant("bias"), op("Mul", _mean(any_("x"), "a"), _RATIO)),
)
#: (x - μ) / √(σ² + ε); scale and bias may follow.
PLAIN = either(op("Div", _centered("a"), _root()), op("Mul", _centered("a"), _inverse()))
#: (x - μ) · r; the bias may follow.
SCALED = op("Mul", _centered("a"), _RATIO)


@dataclass(frozen=True)
class InstanceNormMatch:
    """An instance normalization that ends in ``last``."""

    last: ir.Value
    x: ir.Value
    epsilon: float
    scale: np.ndarray
    bias: np.ndarray


def run(model: ir.Model) -> PassReport:
    """Fuse every instance normalization, in place."""
    return rewrite_each(
        model,
        "fuse_instance_norm",
        nodes_of(model, "Div", "Mul", "Add"),
        lambda node: None if node.graph is None else _find(node.outputs[0]),
        lambda _, found, names: _rewrite(found, model, names),
    )


def _find(value: ir.Value) -> InstanceNormMatch | str | None:
    found = match(SHIFTED, value) or match(SCALED, value) or match(PLAIN, value)
    if found is None:
        return None
    reason = _not_spatial(found)
    if reason is not None:
        return reason or None
    last, scale, bias = value, found.get("scale"), found.get("bias")
    if scale is None:
        last, scale = with_operand("Mul", last)
    if bias is None:
        last, bias = with_operand("Add", last)
    epsilon, channels = scalar(found["epsilon"]), _channels(found["x"], scale, bias)
    if epsilon is None or channels is None:
        return "its epsilon is not one number, or the number of channels is not known"
    rank = len(found["x"].shape or ())
    scales, biases = _per_channel(scale, 1.0, channels, rank), _per_channel(bias, 0.0, channels, rank)
    if scales is None or biases is None:
        return "its scale or bias does not hold one number per channel"
    return InstanceNormMatch(last, found["x"], epsilon, scales, biases)


def _not_spatial(found: Bound) -> str | None:
    """Why this is not an instance normalization; empty where it is a normalization of another kind."""
    if found["x"].shape is None or len(found["x"].shape) < 3:
        return ""
    for name in ("a", "b", "c", "variance"):
        maker = found[name].producer() if name in found else None
        if maker is None or maker.op_type == "GlobalAveragePool":
            continue
        axes, rank = axes_of(maker), len(found["x"].shape)
        if axes is None or sorted(axis % rank for axis in axes) != list(range(2, rank)):
            return ""
        if not int_attribute(maker, "keepdims", 1):
            return "its means drop the axes that they run over"
    return not_single(found["x"])


def _channels(x: ir.Value, scale: ir.Value | None, bias: ir.Value | None) -> int | None:
    size = (x.shape or [None, None])[1]
    if isinstance(size, int):
        return size
    arrays = [constant_array(value) for value in (scale, bias)]
    return max((array.size for array in arrays if array is not None), default=None)


def _per_channel(value: ir.Value | None, default: float, channels: int, rank: int) -> np.ndarray | None:
    """[C] from [C, 1, …], [1, C, 1, …] or one number."""
    if value is None:
        return np.full(channels, default, np.float32)
    array = np.asarray(constant_array(value))
    if array.size == 1:
        return np.full(channels, array.reshape(()), array.dtype)
    shape = (1,) * (rank - array.ndim) + array.shape
    return array.reshape(-1) if shape == (1, channels, *[1] * (rank - 2)) else None


def _rewrite(found: InstanceNormMatch, model: ir.Model, names: Names) -> None:
    dtype = (found.x.dtype or ir.DataType.FLOAT).numpy()
    scale = add_initializer(model.graph, found.scale.astype(dtype), names.fresh(f"{found.last.name}_scale"))
    bias = add_initializer(model.graph, found.bias.astype(dtype), names.fresh(f"{found.last.name}_bias"))
    maker = found.last.producer()
    node = ir.node(
        "InstanceNormalization",
        [found.x, scale, bias],
        attributes={"epsilon": found.epsilon},
        name=maker.name if maker else None,
    )
    substitute(found.last, [node])
