"""Transposes that wait (FasterForms): what computes element by element, or along axes, does so in front of them.

    f(T(x), T(y), c)  =  T(f(x, y, T⁻¹(c)))            T'(T(x))  =  x, or one Transpose

Exporters of networks with channels last put a Transpose on both sides of each convolution. ONNX Runtime moves them
through a float model until they meet; Q and DQ stop it, and every one of them is computed: a MobileNetV3 of Keras ran
at 0.85 of float, with 107 of 108 Transposes left.

Only orders that move the channels of pictures and volumes to the end or back wait: those of attention are parts of
patterns that later passes look for. Not handled: rank 3; operators that are not in the tables here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import (
    Names,
    add_initializer,
    axes_of,
    bypass,
    constant_array,
    input_at,
    int_attribute,
    ints_attribute,
    nodes_of,
    opset,
    prune,
    substitute,
)
from quark.onnx.graph.report import PassReport

_ALIKE = frozenset(
    {"Abs", "Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity", "Log"}
    | {"LeakyRelu", "Max", "Min", "Mul", "Neg", "Pow", "PRelu", "Reciprocal", "Relu", "Selu", "Sigmoid", "Softplus"}
    | {"Softsign", "Sqrt", "Sub", "Tanh"}
)
"""Operators whose every element comes from those at the same place."""
Order = Sequence[int]
Changes = tuple[Mapping[str, object], Mapping[int, np.ndarray]]
"""What a node has in the other order: attributes, and constants by their input."""


def run(model: ir.Model) -> PassReport:
    """Rewrite ``model`` in place."""
    waiting = [node for node in nodes_of(model, "Transpose") if _order(node) is not None]
    if len(waiting) < 2:
        return PassReport("later_transposes", 0)
    names, fired = Names(model), 0
    for node in list(model.graph):
        if node.graph is not None and node.op_type == "Transpose":
            fired += _join(node, names)
        elif node.graph is not None and len(node.outputs) == 1 and not node.domain:
            fired += _wait(node, names, opset(model))
    return PassReport("later_transposes", fired)


def _order(node: ir.Node | None) -> Order | None:
    """The order of a Transpose that moves channels to the end, or back behind the first axis."""
    order = None if node is None or node.op_type != "Transpose" else ints_attribute(node, "perm")
    if order is None or len(order) < 4:
        return None
    inner = list(range(1, len(order)))
    return order if order in ([0, *inner[1:], 1], [0, inner[-1], *inner[:-1]]) else None


def _join(node: ir.Node, names: Names) -> bool:
    """Two Transposes in a row are one, or none; whether they were two."""
    first = None if node.inputs[0] is None else node.inputs[0].producer()
    inner, outer = None if first is None else _order(first), _order(node)
    if first is None or inner is None or outer is None or first.graph is not node.graph:
        return False
    source, order = cast(ir.Value, first.inputs[0]), [inner[axis] for axis in outer]
    if order != sorted(order):
        substitute(node.outputs[0], [_transpose(source, order, names, str(node.name))])
    elif bypass(node, source) is None:
        prune(first)
    else:
        return False
    return True


def _wait(node: ir.Node, names: Names, version: int) -> bool:
    """Let the Transposes in front of a node stand behind it; whether they do."""
    read = {k: value.producer() for k, value in enumerate(node.inputs) if value is not None}
    moved = {k: maker for k, maker in read.items() if _order(maker) is not None}
    orders = {tuple(cast(Order, _order(maker))) for maker in moved.values()}
    if len(orders) != 1 or not any(_leaves(cast(ir.Node, maker)) for maker in moved.values()):
        return False
    order = orders.pop()
    changes = _changes(node, order, moved, version)
    if changes is None:
        return False
    attributes, constants = changes
    graph, inputs = cast(ir.Graph, node.graph), list(node.inputs)
    for k, maker in moved.items():
        inputs[k] = cast(ir.Node, maker).inputs[0]
    for k, array in constants.items():
        inputs[k] = add_initializer(graph, array, names.fresh(f"{node.name}_{k}"))
    kept = {name: value for name, value in node.attributes.items() if name not in attributes}
    made = ir.node(node.op_type, inputs, {**kept, **attributes}, name=node.name)  # type: ignore[dict-item]
    out, old = made.outputs[0], node.outputs[0]
    out.name, out.type = names.fresh(f"{old.name}_before"), old.type
    if old.shape is not None and len(old.shape) == len(order):
        out.shape = ir.Shape([old.shape[axis] for axis in np.argsort(order)])
    substitute(old, [made, _transpose(out, order, names, str(node.name))])
    return True


def _transpose(value: ir.Value, order: Order, names: Names, base: str) -> ir.Node:
    node = ir.node("Transpose", [value], {"perm": list(order)}, name=names.fresh(f"{base}_Transpose"))
    node.outputs[0].name = names.fresh(f"{base}_moved")
    return node


def _leaves(transpose: ir.Node) -> bool:
    """Whether a Transpose goes, once all that can take its place has done so."""
    out = transpose.outputs[0]
    return not out.is_graph_output() and all(
        use.node.op_type in (*_ALIKE, *_ALONG, "Transpose") and use.node.graph is transpose.graph for use in out.uses()
    )


# ---- what changes with the order -------------------------------------------------------------------------------------


def _changes(node: ir.Node, order: Order, moved: Mapping[int, object], version: int) -> Changes | None:
    """What a node has where its inputs are not transposed; ``None``: it has to stay behind them."""
    if node.op_type in _ALIKE:
        return _alike(node, order, moved)
    along = _ALONG.get(node.op_type)
    return None if along is None else along(node, order, moved, version)


def _alike(node: ir.Node, order: Order, moved: Mapping[int, object]) -> Changes | None:
    constants = {}
    for k, value in enumerate(node.inputs):
        if value is None or k in moved:
            continue
        array = constant_array(value)
        if array is None or array.ndim > len(order):
            return None
        if array.size > 1:
            whole = array.reshape((1,) * (len(order) - array.ndim) + array.shape)
            constants[k] = np.ascontiguousarray(whole.transpose(np.argsort(order)))
    return {}, constants


def _concat(node: ir.Node, order: Order, moved: Mapping[int, object], version: int) -> Changes | None:
    return ({"axis": order[int_attribute(node, "axis", 0)]}, {}) if len(moved) == len(node.inputs) else None


def _softmax(node: ir.Node, order: Order, moved: Mapping[int, object], version: int) -> Changes | None:
    return ({"axis": order[int_attribute(node, "axis", -1)]}, {}) if version >= 13 else None


def _pad(node: ir.Node, order: Order, moved: Mapping[int, object], version: int) -> Changes | None:
    pads = constant_array(input_at(node, 1))
    if pads is None or pads.size != 2 * len(order) or input_at(node, 3) is not None:
        return None
    return {}, {1: np.ascontiguousarray(pads.reshape(2, -1)[:, np.argsort(order)].reshape(-1))}


def _reduce(node: ir.Node, order: Order, moved: Mapping[int, object], version: int) -> Changes | None:
    axes = axes_of(node)
    if axes is None or not int_attribute(node, "keepdims", 1):
        return None
    found = sorted(order[axis] for axis in axes)
    return ({"axes": found}, {}) if "axes" in node.attributes else ({}, {1: np.array(found, np.int64)})


_ALONG: Mapping[str, Callable[[ir.Node, Order, Mapping[int, object], int], Changes | None]] = {
    "Concat": _concat,
    "Softmax": _softmax,
    "Pad": _pad,
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"), _reduce),
}
"""Operators with axes."""
