"""A step of an LSTM, written out, becomes LSTM (FasterForms).

    i, f, g, o = split(x W + h R + b)        c' = σ(f) c + σ(i) tanh(g)        h' = σ(o) tanh(c')

as torch's LSTMCell and Keras' unrolled layers are exported. One kernel takes the place of fifteen small ones, and the
state, which codes with a fixed scale would round at every step, stays in float.

Not handled: cells of several steps that share their weights, whose weights would be stored once for each; gates that
anything else reads; peepholes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import (
    STANDS_FOR,
    Names,
    add_initializer,
    constant_array,
    float_attribute,
    input_at,
    int_attribute,
    nodes_of,
    sole_consumer,
    substitute,
)
from quark.onnx.graph.pattern import any_, match, op
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each

_CELL = op(
    "Add",
    op("Mul", op("Sigmoid", any_("f")), any_("c")),
    op("Mul", op("Sigmoid", any_("i")), op("Tanh", any_("g"))),
    name="next",
)
HIDDEN = op("Mul", op("Sigmoid", any_("o")), op("Tanh", _CELL))
#: The order of an LSTM's gates in ONNX.
_GATES = "iofg"


class _Term(NamedTuple):
    """A product of a sum: its node's name, what is multiplied, the weights with a row per output, the bias beside."""

    name: str
    value: ir.Value
    weight: np.ndarray
    bias: np.ndarray


class _Cell(NamedTuple):
    """A step: the states before it, the cell state behind it, both products, and where each gate begins."""

    state: ir.Value
    behind: ir.Value
    terms: tuple[_Term, _Term]
    bias: np.ndarray
    begins: list[int]


def run(model: ir.Model) -> PassReport:
    """Fuse every step of an LSTM, in place."""
    if not nodes_of(model, "Tanh"):
        return PassReport("fuse_lstm_cell")
    return rewrite_each(model, "fuse_lstm_cell", nodes_of(model, "Mul"), _find, _fuse)


def _find(node: ir.Node) -> _Cell | None:
    """The cell whose output a Mul makes."""
    found = None if node.graph is None else match(HIDDEN, node.outputs[0])
    places = [] if found is None else [_place(found[gate]) for gate in _GATES]
    known = [one for one in places if one is not None]
    if found is None or len(known) != len(_GATES) or len({(source, width) for source, _, width in known}) != 1:
        return None
    maker = found["next"].producer()
    if maker is None or maker.graph is not node.graph:  # a body makes the output and reads the rest from outside
        return None
    source, _, width = known[0]
    begins, gates = [begin for _, begin, _ in known], [found[gate] for gate in _GATES]
    alone = {use.node for use in source.uses()} == {gate.producer() for gate in gates} and not source.is_graph_output()
    if sorted(begins) != [k * width for k in range(4)] or not alone or not all(map(_read_inside, gates)):
        return None
    total = _sum(source, 4 * width)
    if total is None or any(len(value.shape or ()) != 2 for value in (found["c"], *(one.value for one in total[0]))):
        return None
    states = [one for one in total[0] if one.weight.shape[1] == width]
    if not states:
        return None
    read = next(one for one in total[0] if one is not states[-1])
    return _Cell(found["c"], found["next"], (read, states[-1]), total[1], begins)


def _place(gate: ir.Value) -> tuple[ir.Value, int, int] | None:
    """What a gate is cut out of, where it begins and how wide it is, along the columns of a matrix."""
    node, width = gate.producer(), _width(gate)
    if node is None or node.inputs[0] is None or not width:
        return None
    if node.op_type == "Split":
        last = int_attribute(node, "axis", 0) in (-1, 1) and len(node.outputs) == 4
        return (node.inputs[0], width * list(node.outputs).index(gate), width) if last else None
    given = [constant_array(input_at(node, position)) for position in range(1, 5)]
    if node.op_type != "Slice" or any(one is None or one.size != 1 for one in given[:3]):
        return None
    start, _, axis, step = (1 if one is None else int(one.reshape(-1)[0]) for one in given)
    return (node.inputs[0], start, width) if axis in (-1, 1) and step == 1 and start >= 0 else None


def _read_inside(gate: ir.Value) -> bool:
    """Whether nothing but the cell reads a gate, before its function and behind."""
    function = sole_consumer(gate)
    return function is not None and sole_consumer(function.outputs[0]) is not None


def _width(value: ir.Value) -> int:
    """The last size of a matrix, 0 where it is not known."""
    last = value.shape[-1] if value.shape is not None and len(value.shape) == 2 else None
    return last if isinstance(last, int) else 0


def _sum(value: ir.Value, width: int) -> tuple[tuple[_Term, _Term], np.ndarray] | None:
    """The two products and the bias that a tensor is the sum of."""
    pending, terms, bias = [value], list[_Term](), np.zeros(width, np.float32)
    while pending:
        one = pending.pop()
        array, term, maker = constant_array(one), _product(one), one.producer()
        if array is not None and array.size == width and array.shape[-1] == width:
            bias = bias + array.reshape(-1)
        elif one is not value and sole_consumer(one) is None:
            return None
        elif term is not None:
            terms.append(term)
        elif maker is not None and maker.op_type == "Add" and None not in maker.inputs:
            pending += [part for part in maker.inputs if part is not None]
        else:
            return None
    if len(terms) != 2 or any(one.weight.shape[0] != width for one in terms):
        return None
    return (terms[0], terms[1]), np.asarray(bias + terms[0].bias + terms[1].bias, np.float32)


def _product(value: ir.Value) -> _Term | None:
    """A MatMul or Gemm with constant weights that nothing else reads."""
    node = value.producer()
    if node is None or node.op_type not in ("MatMul", "Gemm") or node.inputs[0] is None:
        return None
    weight, extra = constant_array(input_at(node, 1)), input_at(node, 2)
    shared = node.inputs[1] is None or len(tuple(node.inputs[1].uses())) > 1
    if weight is None or weight.ndim != 2 or weight.dtype != np.float32 or shared:
        return None
    plain = not int_attribute(node, "transA", 0) and float_attribute(node, "alpha", 1.0) == 1.0
    rows = weight if int_attribute(node, "transB", 0) else weight.T
    bias = np.zeros(len(rows), np.float32) if extra is None else constant_array(extra)
    if not plain or float_attribute(node, "beta", 1.0) != 1.0 or bias is None or bias.size != len(rows):
        return None
    return _Term(str(node.name), node.inputs[0], rows, bias.reshape(-1))


# ---- the new node ----------------------------------------------------------------------------------------------------


def _fuse(node: ir.Node, cell: _Cell, names: Names) -> None:
    graph, base, hidden = node.graph, str(node.name), len(cell.bias) // 4
    if graph is None:
        return
    read, state = cell.terms

    def rows(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.concatenate([array[at : at + hidden] for at in cell.begins]))[None]

    bias = np.concatenate([rows(cell.bias), np.zeros((1, 4 * hidden), np.float32)], axis=1)
    first = add_initializer(graph, np.array([0], np.int64), names.fresh(f"{base}_axis"))
    stored = [
        add_initializer(graph, array, names.fresh(f"{base}_{name}"))
        for name, array in (("W", rows(read.weight)), ("R", rows(state.weight)), ("B", bias))
    ]
    before = [_wider(value, first, names, base) for value in (read.value, state.value, cell.state)]
    sequence, memory, cells = (one.outputs[0] for one in before)
    outputs = [ir.Value(name=""), *(_like(cell.behind, names.fresh(f"{base}_{name}")) for name in ("Yh", "Yc"))]
    made = ir.Node(
        "",
        "LSTM",
        [sequence, *stored, None, memory, cells],
        [ir.AttrInt64("hidden_size", hidden)],
        outputs=outputs,
        name=f"{base}_lstm",
    )
    made.meta[STANDS_FOR] = (read.name, state.name)
    squeezed = [ir.node("Squeeze", [value, first], name=str(value.name)) for value in outputs[1:]]
    substitute(cell.behind, [*before, made, squeezed[1]])
    substitute(node.outputs[0], squeezed[:1])


def _wider(value: ir.Value, first: ir.Value, names: Names, base: str) -> ir.Node:
    node = ir.node("Unsqueeze", [value, first], name=names.fresh(f"{base}_{value.name}"))
    node.outputs[0].name, node.outputs[0].type = node.name, value.type
    node.outputs[0].shape = ir.Shape([1, *(value.shape or ())])
    return node


def _like(value: ir.Value, name: str) -> ir.Value:
    return ir.Value(name=name, type=value.type, shape=ir.Shape([1, *(value.shape or ())]))
