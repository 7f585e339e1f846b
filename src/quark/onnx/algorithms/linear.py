"""The linear layers of a graph: MatMul and Gemm that multiply a constant matrix from the left.

Not handled: stacked matrices, Gemm that transposes its first input or scales its product.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.surgery import constant_array, float_attribute, input_at, int_attribute, name_of
from quark.onnx.algorithms.channels import write_operand


@dataclass(frozen=True)
class Linear:
    """y = x W (+ b), W [in, out], or its transpose in the file."""

    node: ir.Node
    transposed: bool

    @property
    def name(self) -> str:
        """The node's name."""
        return name_of(self.node)

    @property
    def weight(self) -> np.ndarray:
        """[out, in]; read only."""
        array = np.asarray(constant_array(input_at(self.node, 1)))
        return array if self.transposed else array.T

    def write(self, weight: np.ndarray) -> None:
        """Give the layer a new weight, [out, in]; a shared one becomes its own."""
        array = weight if self.transposed else weight.T
        write_operand(self.node, 1, np.ascontiguousarray(array, dtype=self.weight.dtype))


def linear_of(node: ir.Node) -> Linear | None:
    """The linear layer that a node is, or ``None``."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm") or node.inputs[0] is None:
        return None
    weight = constant_array(input_at(node, 1))
    if weight is None or weight.ndim != 2 or weight.dtype.kind != "f":
        return None
    plain = float_attribute(node, "alpha", 1.0) == 1.0 and not int_attribute(node, "transA", 0)
    if node.op_type == "Gemm" and not plain:
        return None
    return Linear(node, bool(int_attribute(node, "transB", 0)))


def by_input(model: ir.Model) -> dict[ir.Value, list[Linear]]:
    """The linear layers of the main graph, by the tensor that they read."""
    found: dict[ir.Value, list[Linear]] = {}
    for node in model.graph:
        layer = linear_of(node)
        if layer is not None and node.inputs[0] is not None:
            found.setdefault(node.inputs[0], []).append(layer)
    return found
