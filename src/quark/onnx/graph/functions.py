"""Model-local functions, put in place of the nodes that call them, so that placement sees what they compute.

Exporters write one per module. Functions of our own operators stay, and those of operators that ONNX Runtime has
kernels for: their bodies are for other runtimes.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
from onnx_ir.passes import PreconditionError
from onnx_ir.passes.common import InlinePass

from quark.errors import ModelError
from quark.ir.surgery import name_nodes
from quark.ir.walk import nodes_within
from quark.onnx.graph.run import RUNTIME_DOMAINS
from quark.operators.registry import DOMAIN, OWN_DOMAIN

_KEPT = frozenset([DOMAIN, OWN_DOMAIN, *RUNTIME_DOMAINS])


def inline_functions(model: ir.Model) -> None:
    """Inline the functions, nested ones too, in place; the nodes get names of their own.

    Raises:
        ModelError: functions call each other in a circle, or use another version of a domain than the graph.
    """
    if all(function.domain in _KEPT for function in model.functions.values()):
        return
    try:
        InlinePass(lambda function: function.domain not in _KEPT)(model)
    except (PreconditionError, ValueError) as error:
        raise ModelError(f"the functions of the model cannot be inlined: {error}") from error
    model.graph.sort()
    name_nodes(model)


def inline_those_with(model: ir.Model, kinds: Collection[str]) -> None:
    """Inline the functions, in place, if one of them has an operator of these types, so that passes see it."""
    inside = (function for function in model.functions.values() if function.domain not in _KEPT)
    if any(node.op_type in kinds for function in inside for node in nodes_within(function)):
        inline_functions(model)
