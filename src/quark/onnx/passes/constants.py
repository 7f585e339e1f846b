"""Plain constants and no detours: what exporters write around a network is taken away.

* Constant nodes become initializers, so that weights are where every other pass looks for them.
* Identity, Dropout at inference, a Cast to the type that is there and a Slice of everything disappear.
* What goes around in a loop and never changes is read from outside (:mod:`quark.onnx.passes.loop_constants`).
* What can be computed now is computed now (:mod:`quark.onnx.passes.fold_constants`).
* Nodes and initializers that no output depends on are removed.

Main graph only, except that unused nodes of subgraphs go too. Graph inputs, and the names of graph outputs, stay.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import (
    add_initializer,
    bypass,
    constant_array,
    input_at,
    int_attribute,
    label,
    remove_unused,
    tensor_alias,
)
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.passes import fold_constants, loop_constants

#: Exporters write the end of a Slice that takes everything as the largest int32 or int64.
ENDLESS = 2**31 - 1


def run(model: ir.Model) -> PassReport:
    """Lift, bypass, fold and clean, in place."""
    fired = lift_constant_nodes(model.graph)
    if any(node.op_type == "Cast" for node in model.graph):
        infer_shapes(model)  # it knows the types too
    bypassed, refused = _bypass_all(model.graph)
    fired += bypassed + loop_constants.run(model.graph) + remove_unused(model)
    folded = fold_constants.run(model)
    if folded.fired:
        bypassed, refused = _bypass_all(model.graph)
        fired += folded.fired + bypassed + remove_unused(model)
    return PassReport("constants", fired, (*refused, *folded.refused))


def lift_constant_nodes(graph: ir.Graph) -> int:
    """Constant nodes become initializers of the same name. A constant that is a graph output stays a node."""
    nodes = [node for node in graph if node.op_type == "Constant" and node.domain == ""]
    return sum(_lift_constant(node, graph) for node in nodes)


def _lift_constant(node: ir.Node, graph: ir.Graph) -> bool:
    output = node.outputs[0]
    tensor = _constant_tensor(node, str(output.name))
    if tensor is None or output.is_graph_output():
        return False
    name = str(output.name)
    output.name = f"{name} (a node)"  # the name moves on to the initializer
    output.replace_all_uses_with(add_initializer(graph, tensor, name))
    graph.remove(node, safe=True)
    return True


def _constant_tensor(node: ir.Node, name: str) -> ir.TensorProtocol | None:
    """The tensor of a Constant node, None for sparse tensors and strings."""
    if len(node.attributes) != 1:
        return None
    ((kind, attr),) = node.attributes.items()
    if kind == "value" and not attr.is_ref():
        return tensor_alias(attr.as_tensor(), name)
    dtype = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
    return ir.Tensor(np.array(attr.value, dtype[kind]), name=name) if kind in dtype and not attr.is_ref() else None


def _bypass_all(graph: ir.Graph) -> tuple[int, list[str]]:
    """How many nodes went that hand their input on, and why others stay."""
    fired, refused = 0, []
    for node in [node for node in graph if _passes_through(node)]:
        data = node.inputs[0]
        reason = "it has no input" if data is None else bypass(node, data)
        if reason is None:
            fired += 1
        else:
            refused.append(f"{label(node)} stays: {reason}")
    return fired, refused


def _passes_through(node: ir.Node) -> bool:
    """Identity, Dropout unless it is told to train, and what changes neither type nor size."""
    if node.domain != "" or not node.inputs:
        return False
    judge = PASSES_THROUGH.get(node.op_type)
    return judge is not None and judge(node)


def trains(node: ir.Node) -> bool:
    """Dropout trains where its third input says so, or may say so."""
    switch = input_at(node, 2)
    if switch is None:
        return False
    value = constant_array(switch)
    return value is None or bool(value.any())


def _keeps_type(node: ir.Node) -> bool:
    """Whether a Cast goes to the type that its input is known to have."""
    source = node.inputs[0]
    return source is not None and source.dtype is not None and source.dtype == int_attribute(node, "to", 0)


def _takes_all(node: ir.Node) -> bool:
    """Whether a Slice goes from 0 in steps of 1 to an end that no axis reaches, on every axis."""
    given = [input_at(node, index) for index in (1, 2, 4)]
    starts, ends, steps = (None if value is None else constant_array(value) for value in given)
    if starts is None or ends is None or (given[2] is not None and steps is None):
        return False
    return not starts.any() and bool((ends >= ENDLESS).all()) and (steps is None or bool((steps == 1).all()))


#: Operator -> whether a node of it hands its first input on as it is.
PASSES_THROUGH: dict[str, Callable[[ir.Node], bool]] = {
    "Identity": lambda node: True,
    "Dropout": lambda node: not trains(node),
    "Cast": _keeps_type,
    "Slice": _takes_all,
}
