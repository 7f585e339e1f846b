"""The operators that exporters write for GELU become one Gelu (FuseGelu).

    x · (1 + erf(x / √2)) / 2                                   approximate = none
    x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) / 2            approximate = tanh

Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units". The factors may stand in any order. Gelu exists from
opset 20 on; models below are lifted on request only, because runtimes fuse these operators themselves.
"""

from __future__ import annotations

import math
from typing import Annotated

import onnx_ir as ir

from quark.ir.surgery import nodes_of, opset, substitute
from quark.onnx.graph.pattern import Pattern, any_, either, match, number, op
from quark.onnx.graph.report import PassReport
from quark.onnx.passes import opset_version

OPSET = 20
Lift = Annotated[bool, "Lift a model of an older opset that has a GELU."]


def _halved(inner: Pattern) -> Pattern:
    """x · (1 + inner) / 2 in every order."""
    x, half = any_("x"), number(0.5)
    one_plus = op("Add", inner, number(1.0))
    two = number(2.0)
    return either(
        op("Mul", op("Mul", x, half), one_plus),
        op("Mul", op("Mul", x, one_plus), half),
        op("Mul", x, op("Mul", one_plus, half)),
        op("Mul", op("Div", x, two), one_plus),
        op("Div", op("Mul", x, one_plus), two),
    )


def _cube() -> Pattern:
    x = any_("x")
    return either(op("Pow", x, number(3.0)), op("Mul", x, op("Mul", x, x)))


def _tanh_argument() -> Pattern:
    x, cubic, root = any_("x"), number(0.044715), number(math.sqrt(2 / math.pi))
    return either(
        op("Mul", op("Add", x, op("Mul", _cube(), cubic)), root),
        op("Mul", op("Mul", x, op("Add", op("Mul", op("Mul", x, x), cubic), number(1.0))), root),
    )


_ERF = op("Erf", either(op("Div", any_("x"), number(math.sqrt(2))), op("Mul", any_("x"), number(math.sqrt(0.5)))))
FORMS = {"none": _halved(_ERF), "tanh": _halved(op("Tanh", _tanh_argument()))}


def run(model: ir.Model, lift: Lift = False) -> PassReport:
    """Fuse every GELU, in place."""
    anchors = nodes_of(model, "Erf", "Tanh")
    if not anchors:
        return PassReport("fuse_gelu")
    if lift and opset(model) < OPSET and any(_find(node)[1] for node in nodes_of(model, "Mul", "Div")):
        opset_version.run(model, OPSET)
    fired, refused = 0, []
    for node in nodes_of(model, "Mul", "Div"):
        kind, found = _find(node)
        if found is None or node.graph is None:
            continue
        if opset(model) < OPSET:
            wish = f"{node.name!r} ends a GELU, but Gelu needs opset {OPSET} and the model has {opset(model)}"
            refused.append(f"{wish}; FuseGelu=True lifts it")
            continue
        attributes = {} if kind == "none" else {"approximate": kind}
        substitute(node.outputs[0], [ir.node("Gelu", [found["x"]], attributes=attributes, name=node.name)])
        fired += 1
    return PassReport("fuse_gelu", fired, tuple(refused))


def _find(node: ir.Node) -> tuple[str, dict[str, ir.Value] | None]:
    for kind, pattern in FORMS.items():
        found = match(pattern, node.outputs[0])
        if found is not None:
            return kind, found
    return "", None
