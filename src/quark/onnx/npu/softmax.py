"""Softmax as the device computes it: in bfloat16, by a polynomial, without subtracting the maximum
(ConvertSoftmaxToDPUVersion).

    n = floor(x log2 e)      r = x - n ln 2      p = ((0.21875 r + 0.486328125) r + 1) r + 1
    e = 2**n p               y = e / sum(e)

Every step is rounded to bfloat16, which here is a Cast there and back: the nodes run on any runtime. As on the device,
a logit beyond 88 overflows.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.surgery import Names, add_initializer, int_attribute, substitute

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
POLYNOMIAL = (0.21875, 0.486328125, 1.0, 1.0)


@dataclass
class Steps:
    """The nodes that replace one Softmax, in order."""

    graph: ir.Graph
    names: Names
    prefix: str
    nodes: list[ir.Node]

    def constant(self, number: float | list[int], name: str) -> ir.Value:
        """A constant of its own: a number in the type of the data, or axes."""
        kind = np.int64 if isinstance(number, list) else np.float32
        return add_initializer(self.graph, np.asarray(number, kind), self.names.fresh(f"{self.prefix}_{name}"))

    def add(self, op_type: str, inputs: list[ir.Value], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        """The result of one more node; of a Cast to ``dtype``."""
        name = self.names.fresh(f"{self.prefix}_{op_type}")
        output = ir.Value(name=name, type=ir.TensorType(dtype))
        attributes = {"to": int(dtype)} if op_type == "Cast" else {}
        self.nodes.append(ir.node(op_type, inputs, attributes=attributes, outputs=[output], name=name))
        return output

    def rounded(self, op_type: str, inputs: list[ir.Value]) -> ir.Value:
        """The same, rounded to bfloat16."""
        return self.to_bfloat16(self.add(op_type, inputs))

    def to_bfloat16(self, value: ir.Value) -> ir.Value:
        """A Cast to bfloat16 and one back."""
        return self.add("Cast", [self.add("Cast", [value], ir.DataType.BFLOAT16)])


def rewrite(node: ir.Node, _: ir.Node, names: Names) -> bool:
    """The steps in the place of a Softmax."""
    source, output, graph = node.inputs[0], node.outputs[0], node.graph
    if source is None or not isinstance(graph, ir.Graph):
        return False
    dtype = source.dtype or ir.DataType.FLOAT
    steps = Steps(graph, names, str(output.name), [])
    steps.add("Cast", [_softmax(steps, source, int_attribute(node, "axis", -1))], dtype)
    substitute(output, steps.nodes)
    return True


def _softmax(steps: Steps, source: ir.Value, axis: int) -> ir.Value:
    x = steps.to_bfloat16(source)
    n = steps.rounded("Floor", [steps.rounded("Mul", [x, steps.constant(LOG2_E, "log2_e")])])
    r = steps.rounded("Sub", [x, steps.rounded("Mul", [n, steps.constant(LN_2, "ln_2")])])
    p = steps.constant(POLYNOMIAL[0], "p0")
    for order, coefficient in enumerate(POLYNOMIAL[1:], start=1):
        p = steps.rounded("Mul", [p, r])
        p = steps.rounded("Add", [p, steps.constant(coefficient, f"p{order}")])
    power = steps.add("Pow", [steps.constant(2.0, "two"), n])
    e = steps.rounded("Mul", [power, p])
    total = steps.rounded("ReduceSum", [e, steps.constant([axis], "axis")])
    return steps.rounded("Div", [e, total])
