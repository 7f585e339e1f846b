"""Powers within a function that saturates: a GELU that is written out, before Gelu is an operator.

    x → Pow(3) → Mul(0.044715) → Add(x) → Mul(0.8) → Tanh        x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) / 2

The function tells small numbers apart, and the power of the largest one takes the scale: of |x| up to 30, x³ has steps
of 200, with which all below 6 is 0. Nothing is to be won by integers there, and runtimes know the float operators as
one kernel: what lies between x and the function, and the function, stay float.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.ir.surgery import constant_array, is_constant

REASON = "a function that saturates is taken of a power: on one scale with the largest one, small numbers are zeros"
_SATURATE = frozenset(["Tanh", "Sigmoid", "HardSigmoid", "Erf"])
_POLYNOMIAL = frozenset(["Add", "Div", "Mul", "Neg", "Pow", "Sub"])
#: Nodes of a polynomial that is looked at, at most.
_NODES = 12


def saturating_powers(model: ir.Model) -> set[ir.Node]:
    """The nodes from behind x to the function, of every function of a polynomial of one tensor x."""
    order = {node: place for place, node in enumerate(model.graph)}
    return {one for node in order if node.op_type in _SATURATE for one in _polynomial(node, order)}


def _polynomial(function: ir.Node, order: dict[ir.Node, int]) -> set[ir.Node]:
    """The function and the nodes before it, back to where all come from one tensor; nothing without a power of it."""
    found, ends, power = {function}, {function.inputs[0]}, False
    while not (power and len(ends) == 1) and len(found) < _NODES:
        makers = [made for value in ends if value is not None and (made := value.producer()) in order]
        last = max(makers, key=lambda one: order[one], default=None)
        if last is None or last.op_type not in _POLYNOMIAL:
            return set()
        found.add(last)
        power |= _is_power(last)
        ends = (ends - {last.outputs[0]}) | {value for value in last.inputs if not is_constant(value)}
    return found if power and len(ends) == 1 else set()


def _is_power(node: ir.Node) -> bool:
    """Whether a node multiplies what comes from one tensor by itself."""
    if node.op_type == "Mul":
        return not any(map(is_constant, node.inputs))
    exponent = constant_array(node.inputs[1]) if node.op_type == "Pow" else None
    return exponent is not None and exponent.size == 1 and float(exponent.reshape(-1)[0]) > 1
