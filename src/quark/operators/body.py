"""A function body, written node by node: the small language in which the operators of this package are stated.

``Body(21).op("Mul", "x", 2.0)`` appends a node, gives it a fresh output name and returns that name; numbers and arrays
become ``Constant`` nodes, each value once. Differences between opsets (axes as attribute or input, the range of
``Shape``) are settled here, so that a body reads the same for every opset from ``LOWEST_OPSET`` on.

Two habits of ONNX Runtime that bodies must respect: a factor within about 1e-7 of 1 is removed as if it were 1 (of
float64 too), and ``ReduceMax`` loses values beside a NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from onnx import FunctionProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper

LOWEST_OPSET = 13
_REDUCE_AXES_ARE_INPUT = 18
_SHAPE_HAS_RANGE = 15

Value: TypeAlias = "str | float | np.ndarray"
Attributes: TypeAlias = "Mapping[str, Any]"


class Body:
    """The nodes of one function (or of one branch inside it), in order.

    Attributes:
        opset: opset of the standard domain that the nodes belong to.
        nodes: what was written so far.
    """

    def __init__(self, opset: int, outer: Body | None = None) -> None:
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self._root: Body = outer._root if outer is not None else self
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._count = 0

    def op(self, op_type: str, *inputs: Value, attributes: Attributes | None = None) -> str:
        """Append a node with one output; a number is a float32 scalar, an empty name an absent input."""
        output = self._fresh()
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        self.nodes.append(helper.make_node(op_type, names, [output], **(attributes or {})))
        return output

    def constant(self, value: float | np.ndarray) -> str:
        """The name of a constant; constants live in the outermost body, where every branch sees them."""
        plain = isinstance(value, float | int) and not isinstance(value, np.generic)  # np.float64 is a float, too
        array = np.asarray(value, np.float32 if plain else None)
        key = (array.dtype.str, array.shape, array.tobytes())
        root = self._root
        if key not in root._constants:
            name = root._constants[key] = self._fresh()
            root.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        return root._constants[key]

    def cast(self, value: Value, elem_type: str) -> str:
        """``value`` in the ``TensorProto`` type named ``elem_type``."""
        return self.op("Cast", value, attributes={"to": TensorProto.DataType.Value(elem_type)})

    def ints(self, *values: int) -> str:
        """An int64 vector."""
        return self.constant(np.array(values, np.int64))

    def reduce(self, op_type: str, value: Value, axis: int) -> str:
        """``ReduceMax`` and its like along one axis, which stays with length 1."""
        if self.opset < _REDUCE_AXES_ARE_INPUT and op_type != "ReduceSum":
            return self.op(op_type, value, attributes={"axes": [axis], "keepdims": 1})
        return self.op(op_type, value, self.ints(axis), attributes={"keepdims": 1})

    def dimensions(self, value: str, start: int = 0, end: int | None = None) -> str:
        """Dimensions ``start:end`` of ``value`` as an int64 vector."""
        if self.opset >= _SHAPE_HAS_RANGE:
            ranges = {"start": start} if end is None else {"start": start, "end": end}
            return self.op("Shape", value, attributes=ranges if (start, end) != (0, None) else {})
        last = np.iinfo(np.int64).max if end is None else end
        return self.op("Slice", self.op("Shape", value), self.ints(start), self.ints(last), self.ints(0))

    def concat(self, *vectors: str) -> str:
        """Vectors one after the other."""
        return self.op("Concat", *vectors, attributes={"axis": 0})

    def branch(self, condition: str, then: Callable[[Body], str], otherwise: Callable[[Body], str]) -> str:
        """A float32 tensor: what ``then`` writes if the scalar ``condition`` holds, else what ``otherwise`` writes."""
        graphs = {"then_branch": self._graph("then", then), "else_branch": self._graph("else", otherwise)}
        return self.op("If", condition, attributes=graphs)

    def function(
        self, domain: str, name: str, overload: str, inputs: Sequence[str], outputs: Mapping[str, str]
    ) -> FunctionProto:
        """The finished function; ``outputs`` maps its output names to values of this body."""
        ends = [helper.make_node("Identity", [value], [output]) for output, value in outputs.items()]
        imports = [helper.make_opsetid("", self.opset)]
        return helper.make_function(
            domain, name, list(inputs), list(outputs), [*self.nodes, *ends], imports, overload=overload
        )

    def _graph(self, name: str, write: Callable[[Body], str]) -> GraphProto:
        inner = Body(self.opset, self)
        output = helper.make_tensor_value_info(write(inner), TensorProto.FLOAT, None)
        return helper.make_graph(inner.nodes, name, [], [output])

    def _fresh(self) -> str:
        self._root._count += 1
        return f"v{self._root._count}"
