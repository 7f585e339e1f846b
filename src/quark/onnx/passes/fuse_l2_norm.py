"""A vector divided by its length, written out, becomes LpNormalization (FuseL2Norm).

    y = x / √max(Σ x², ε)     or     y = x / max(‖x‖₂, ε)         over one axis     ⇒     LpNormalization(p = 2)

Vectors shorter than ε come out longer than before: LpNormalization has no ε. So only an ε of at most 1e-5 counts as
one (√ε where it stands under the root); outputs agree to 1e-5 for every vector that is longer than it, and for zero.

Not handled: lengths over several axes.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.ir.surgery import axes_of, int_attribute, nodes_of, substitute
from quark.onnx.graph.pattern import Bound, Pattern, any_, constant, either, match, number, op, scalar
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each

LARGEST_EPSILON = 1e-5


def _at_least(length: Pattern, name: str) -> Pattern:
    return either(op("Max", length, constant(name)), op("Clip", length, constant(name), only=True))


def _lengths() -> Pattern:
    x = any_("x")
    square = either(op("Mul", x, x), op("Pow", x, number(2.0)))
    total = either(op("ReduceSum", square, name="sum"), op("ReduceSumSquare", x, name="sum"))
    length = either(op("ReduceL2", x, name="sum"), op("Sqrt", total))
    return either(op("Sqrt", _at_least(total, "inner")), _at_least(length, "outer"))


def _divided() -> Pattern:
    x, length = any_("x"), _lengths()
    spread = either(length, op("Expand", length))
    return either(op("Div", x, spread), op("Mul", x, op("Reciprocal", spread)))


DIVIDED = _divided()


def run(model: ir.Model) -> PassReport:
    """Fuse every L2 normalization, in place."""
    if not nodes_of(model, "ReduceL2", "ReduceSum", "ReduceSumSquare"):
        return PassReport("fuse_l2_norm")
    return rewrite_each(model, "fuse_l2_norm", nodes_of(model, "Div", "Mul"), _find, _fuse)


def _find(node: ir.Node) -> tuple[ir.Value, int] | str | None:
    """What is normalized along which axis."""
    found = None if node.graph is None else match(DIVIDED, node.outputs[0])
    if found is None:
        return None
    axis = _axis(found)
    return axis if isinstance(axis, str) else (found["x"], axis)


def _fuse(node: ir.Node, found: tuple[ir.Value, int], _: object) -> None:
    attributes = {"axis": found[1], "p": 2}
    substitute(node.outputs[0], [ir.node("LpNormalization", [found[0]], attributes=attributes, name=node.name)])


def _axis(found: Bound) -> int | str:
    """The one axis, or the reason why the place stays."""
    total = found["sum"].producer()
    axes = None if total is None else axes_of(total)
    if total is None or axes is None or len(axes) != 1 or not int_attribute(total, "keepdims", 1):
        return "the length is not taken over one constant axis that is kept"
    under_root = "inner" in found
    epsilon = scalar(found["inner" if under_root else "outer"])
    if under_root and epsilon is not None and epsilon >= 0:
        epsilon = epsilon**0.5
    if epsilon is None or not 0 <= epsilon <= LARGEST_EPSILON:
        return f"its epsilon ({epsilon}) is none: LpNormalization would lose it"
    return axes[0]
