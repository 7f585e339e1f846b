"""Plain constants and no detours: what exporters write around a network is taken away.

* Constant nodes become initializers, so that weights are where every other pass looks for them.
* Identity, and Dropout at inference, disappear.
* What can be computed now is computed now (:mod:`quark.onnx.passes.fold_constants`).
* Nodes and initializers that no output depends on are removed.

Main graph only, except that unused nodes of subgraphs go too. Graph inputs, and the names of graph outputs, stay.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import add_initializer, bypass, constant_array, input_at, label, tensor_alias
from quark.onnx.passes import fold_constants


def run(model: ir.Model) -> PassReport:
    """Lift, bypass, fold and clean, in place."""
    fired = lift_constant_nodes(model.graph)
    bypassed, refused = _bypass_all(model.graph)
    fired += bypassed + remove_unused(model)
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
    """Identity, and Dropout unless it is told to train."""
    if node.domain != "" or not node.inputs:
        return False
    return node.op_type == "Identity" or (node.op_type == "Dropout" and not _trains(node))


def _trains(node: ir.Node) -> bool:
    """Dropout trains where its third input says so, or may say so."""
    switch = input_at(node, 2)
    if switch is None:
        return False
    value = constant_array(switch)
    return value is None or bool(value.any())


def remove_unused(model: ir.Model) -> int:
    """Remove nodes and initializers that no graph output depends on; returns how many."""
    before = len(model.graph) + len(model.graph.initializers)
    RemoveUnusedNodesPass()(model)
    return before - len(model.graph) - len(model.graph.initializers)
