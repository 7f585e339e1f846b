"""Constants that go around with a Loop or Scan are read from outside of it.

Converters of TensorFlow hand the weights of a recurrent layer to the body as state that no iteration changes. As state
they are no weights: they could not be quantized, and every iteration would copy them. A state whose value before the
loop is a constant and whose output in the body is its input (or an Identity of it) goes; the body reads the constant.

Left alone: state that the body hands out at another place too, since ONNX Runtime wants the outputs of a body to be
made in it. Main graph only.

In the finished graph, constants that a body of If, Loop or Scan reads alone become its own (``make_own``): ONNX Runtime
packs weights and lets the originals go; where a body reads one from outside, what it is given then is no tensor, and
for want of its shape nothing is planned of the body's memory, so that each iteration allocates every tensor. A
recurrent network of Keras of 2 x 30 iterations: 290 microseconds, and 227 with the weights in the bodies (234 as they
came). Constants that several graphs read, and outputs and inputs of the model, stay outside.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from quark.ir.surgery import int_attribute, is_constant, operand
from quark.ir.walk import bodies
from quark.onnx.graph.report import PassReport


def run(graph: ir.Graph) -> int:
    """How many constants have left the state of loops; in place."""
    loops = [node for node in graph if node.op_type in ("Loop", "Scan") and node.domain == ""]
    return sum(_read_from_outside(graph, node) for node in loops)


def make_own(model: ir.Model) -> PassReport:
    """Move constants that one body reads alone into it, in place."""
    fired = 0
    for name, value in list(model.graph.initializers.items()):
        places = {use.node.graph for use in value.uses()}
        body = places.pop() if len(places) == 1 else model.graph
        outside = value.is_graph_output() or value.is_graph_input()
        if isinstance(body, ir.Graph) and body is not model.graph and not outside:
            del model.graph.initializers[name]
            body.register_initializer(value)
            fired += 1
    return PassReport("body_constants", fired)


def _read_from_outside(graph: ir.Graph, node: ir.Node) -> int:
    (body,) = bodies(node)
    around, inside, made = (2, 2, 1) if node.op_type == "Loop" else (0, 0, 0)  # what stands before the state
    if len(node.inputs) - around != len(body.inputs) - inside or len(node.outputs) != len(body.outputs) - made:
        return 0  # a Scan of opset 8, whose first input is the lengths of sequences, or what no runtime accepts
    scanned = int_attribute(node, "num_scan_inputs", 0)
    states = [k for k in range(len(node.inputs) - around - scanned) if is_constant(node.inputs[around + k])]
    fixed = [k for k in states if _comes_back(body.inputs[inside + k], k + made, body.outputs, node.outputs[k])]
    _drop(body.outputs, [made + k for k in fixed])
    for k in fixed:
        constant = operand(node, around + k)
        node.outputs[k].replace_all_uses_with(constant)
        body.inputs[inside + k].replace_all_uses_with(constant)
    if fixed:
        _drop(body.inputs, [inside + k for k in fixed])
        _replace(graph, node, [around + k for k in fixed], fixed)
    return len(fixed)


def _comes_back(state: ir.Value, position: int, outputs: Sequence[ir.Value], after: ir.Value) -> bool:
    """Whether the body hands the state on as it came, there and nowhere else, and nobody needs its name."""
    came_back = [_source(value) is state for value in outputs]
    return came_back[position] and sum(came_back) == 1 and not after.is_graph_output()


def _source(value: ir.Value) -> ir.Value | None:
    """The value that this one is, Identities taken away."""
    found: ir.Value | None = value
    while found is not None and (node := found.producer()) is not None and node.op_type == "Identity":
        found = node.inputs[0]
    return found


def _drop(values: Sequence[ir.Value], positions: Sequence[int]) -> None:
    values[:] = [value for position, value in enumerate(values) if position not in positions]  # type: ignore[index]


def _replace(graph: ir.Graph, node: ir.Node, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """The node without these inputs and outputs."""
    left = [value for position, value in enumerate(node.inputs) if position not in inputs]
    kept = [value for position, value in enumerate(node.outputs) if position not in outputs]
    new = ir.Node("", node.op_type, left, node.attributes.values(), num_outputs=len(kept), name=node.name)
    graph.insert_before(node, new)
    for before, after in zip(kept, new.outputs, strict=True):
        after.type, after.shape, after.name = before.type, before.shape, before.name
        before.replace_all_uses_with(after, replace_graph_outputs=True)
    graph.remove(node, safe=True)
