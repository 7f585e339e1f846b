"""A factor behind a node: how a fixed-point result differs from the exact one.

    y = f(x)   becomes   y_Mul = f(x),  y = y_Mul * y_Scale

The device divides by n as a multiplication and a shift: 1/n is replaced by K / 2**s with K = round(2**s / n) and the s
of least error up to 6 + ceil(log2 n); the exact mean of n values is then off by n K / 2**s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each
from quark.onnx.graph.surgery import Names, add_initializer

#: Bits of the multiplier beyond those of the divisor.
PRECISION = 7


def mean_factor(count: int) -> float:
    """n K / 2**s for a mean of ``count`` values."""
    shifts = np.arange(PRECISION + math.ceil(math.log2(count))) if count > 1 else np.zeros(1)
    powers = np.exp2(shifts)
    found = np.rint(powers / count) / powers
    return float(count * found[np.argmin(np.abs(found - 1 / count))])


def put_behind(model: ir.Model, node: ir.Node, factor: float, names: Names) -> None:
    """Multiply the first output of ``node`` by ``factor``; readers and graph outputs see the product under its name."""
    source = node.outputs[0]
    name = str(source.name)
    dtype = np.float16 if source.dtype == ir.DataType.FLOAT16 else np.float32
    scale = add_initializer(model.graph, np.asarray(factor, dtype), names.fresh(f"{name}_Scale"))
    product = ir.Value(shape=source.shape, type=source.type)
    mul = ir.node("Mul", [source, scale], outputs=[product], name=f"{name}_Mul")
    source.replace_all_uses_with(product, replace_graph_outputs=True)
    mul.replace_input_with(0, source)
    model.graph.insert_after(node, mul)
    source.name, product.name = names.fresh(f"{name}_Mul"), name


def correct(
    model: ir.Model,
    name: str,
    types: Collection[str],
    wanted: Callable[[ir.Node], bool],
    factor_of: Callable[[ir.Node], float | str],
) -> PassReport:
    """Put its factor behind every wanted node of these types; one of 1, and a node with a reason, stay."""

    def put(node: ir.Node, factor: float, names: Names) -> bool:
        if factor != 1.0:
            put_behind(model, node, factor, names)
        return factor != 1.0

    nodes = [node for node in model.graph if node.op_type in types and wanted(node)]
    return rewrite_each(model, name, nodes, factor_of, put)
