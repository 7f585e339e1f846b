"""How much a model may ask for before anything is computed with it: nodes, and bytes of what constants blow up to.

A few hundred bytes can describe 10^8 nodes (functions that call functions ten times each), a tensor of petabytes
(Range, ConstantOfShape, Expand, Tile) or a loop without an end. What follows from the graph alone is refused here, in
one sentence, before a runtime tries.

What depends on the samples is not known here: sizes have no budget, and a loop whose condition is computed has one of
seconds (``quark.onnx.graph.run``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from quark.errors import ModelError
from quark.ir.surgery import constant_array, input_at, is_constant, label
from quark.ir.walk import graphs_of, nodes_within

NODES = 200_000
"""Nodes of a model with all subgraphs and with all functions written out; a decoder of 80 layers has some 20,000."""
DEPTH = 24
"""Subgraphs inside subgraphs, functions that call functions."""
CONSTANT_BYTES = 2**31
"""Bytes of a tensor that constants alone give; it would not fit into a protobuf."""
TENSOR_BYTES = 2**40
"""Bytes of any tensor whose size is fixed."""
ROUNDS = 10_000_000
"""Iterations of a Loop that nothing but its count can end."""
LOOP_SECONDS = 120.0
"""Of one run of a model with a Loop that nothing but a computed condition can end."""
PROPAGATED = 2**22
"""Elements of a vector whose values shape inference may follow: it keeps a record of some 50 bytes for each."""
_ENDLESS = 2.0**60
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32, None)
SHAPE_INPUTS = {
    **dict.fromkeys(["ConstantOfShape", "RandomUniformLike"], (0,)),
    **dict.fromkeys(["Expand", "OneHot", "Pad", "Reshape", "Tile"], (1,)),
    "Range": (0, 1, 2),
    "Resize": (2, 3),
    "Upsample": (1,),
}
"""Operator -> inputs that say how large its result is."""
# ---- nodes -----------------------------------------------------------------------------------------------------------


def check_nodes(proto: onnx.ModelProto, source: str) -> None:
    """Refuse a model of too many nodes, or with functions that call themselves.

    Raises:
        ModelError: the budget is exceeded; the message says what was counted.
    """
    bodies = {(one.domain, one.name): one for one in proto.functions}
    counts: dict[tuple[str, str], int] = {}

    def weigh(key: tuple[str, str], path: tuple[tuple[str, str], ...]) -> int:
        if key in path:
            raise ModelError(f"{source}: the function {key[1]!r} of the domain {key[0]!r} calls itself")
        if len(path) > DEPTH:
            raise ModelError(f"{source}: functions call each other more than {DEPTH} deep, up to {key[1]!r}")
        if key not in counts:
            called = _calls(bodies[key].node, 0, source)
            counts[key] = sum(weigh(one, (*path, key)) if one in bodies else 1 for one in called)
        return counts[key]

    total = sum(weigh(one, ()) if one in bodies else 1 for one in _calls(proto.graph.node, 0, source))
    for key in bodies:  # those that nothing calls, too
        weigh(key, ())
    if total > NODES:
        raise ModelError(f"{source} has {total} nodes with its functions written out; at most {NODES} are taken")


def _calls(nodes: Sequence[onnx.NodeProto], depth: int, source: str) -> Iterator[tuple[str, str]]:
    """(domain, operator) of every node, those of subgraphs included."""
    if depth > DEPTH:
        raise ModelError(f"{source}: subgraphs are nested more than {DEPTH} deep")
    if len(nodes) > NODES:
        raise ModelError(f"{source} has {len(nodes)} nodes; at most {NODES} are taken")
    for node in nodes:
        yield node.domain, node.op_type
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs) if attribute.type in _GRAPHS else ():
                yield from _calls(graph.node, depth + 1, source)


_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


# ---- tensors and loops -----------------------------------------------------------------------------------------------


def check_sizes(model: ir.Model) -> None:
    """Refuse tensors that cannot be, and loops without an end; shapes have been inferred as far as they go.

    Raises:
        ModelError: the message names the node, the tensor and its bytes.
    """
    fixed: set[ir.Value] = set()
    for node in model.graph:
        constant = bool(node.inputs) and all(one is None or one in fixed or is_constant(one) for one in node.inputs)
        if constant:
            fixed.update(node.outputs)
        for value in node.outputs:
            _check_bytes(node, value, CONSTANT_BYTES if constant else TENSOR_BYTES)
    for value in model.graph.inputs:
        if (size := bytes_of(value)) is not None and size > TENSOR_BYTES:
            raise ModelError(f"the input {str(value.name)!r} takes {size} bytes; at most {TENSOR_BYTES} are taken")
    check_ends(model)


def check_ends(model: ir.Model) -> None:
    """Refuse loops without an end.

    Raises:
        ModelError: the message names the node, and how often it would run.
    """
    for node in nodes_within(model.graph):
        if node.op_type == "Loop" and node.domain == "":
            _check_end(node)


def loop_without_count(model: ir.Model) -> ir.Node | None:
    """A Loop that nothing ends but a condition that it computes; ``None`` where there is none."""
    nodes = (node for node in nodes_within(model.graph) if node.op_type == "Loop")
    return next((node for node in nodes if node.domain == "" and _uncounted(node)), None)


def _uncounted(node: ir.Node) -> bool:
    """Whether the count of a Loop does not end it: there is none, or it is beyond ``ROUNDS``."""
    count = constant_array(input_at(node, 0))
    return input_at(node, 0) is None or (count is not None and count.size > 0 and int(count.reshape(-1)[0]) > ROUNDS)


def _check_bytes(node: ir.Node, value: ir.Value, limit: int) -> None:
    size = bytes_of(value)
    if size is not None and size > limit:
        what = " of constants" if limit == CONSTANT_BYTES else ""
        raise ModelError(
            f"the node {label(node)} makes{what} the tensor {str(value.name)!r} of {size} bytes; at most {limit} are "
            "taken"
        )


def bytes_of(value: ir.Value) -> int | None:
    """Bytes of a tensor of known type and size; ``None`` where either is unknown."""
    dtype, shape = value.dtype, value.shape
    if dtype in (None, ir.DataType.STRING, ir.DataType.UNDEFINED) or shape is None or not shape.is_static():
        return None
    return math.prod(int(size) for size in shape.numpy()) * dtype.bitwidth // 8


def _check_end(node: ir.Node) -> None:
    """A Loop ends by its count, or by a condition that its body computes."""
    count, start = constant_array(input_at(node, 0)), input_at(node, 1)
    limit = int(count.reshape(-1)[0]) if count is not None and count.size else None
    if not _uncounted(node) or not _always(node, start):
        return
    times = "without an end" if limit is None else f"{limit} times"
    raise ModelError(f"the node {label(node)} runs {times}: its condition never changes; at most {ROUNDS} are taken")


def _always(node: ir.Node, start: ir.Value | None) -> bool:
    """Whether the condition of a Loop is true at its start, as far as is known, and then never computed."""
    first = constant_array(start)
    if first is not None and not first.any():
        return False
    body = node.attributes["body"].as_graph() if "body" in node.attributes else None
    if body is None or not body.outputs or len(body.inputs) < 2:
        return False
    value = body.outputs[0]
    while (maker := value.producer()) is not None and maker.op_type in ("Identity", "Cast"):
        value = maker.inputs[0] or value
        if maker.inputs[0] is None:
            break
    known = constant_array(value)
    return value is body.inputs[1] or (known is not None and bool(known.any()))


# ---- what shape inference may follow ---------------------------------------------------------------------------------


def may_propagate(model: ir.Model) -> bool:
    """Whether shape inference may follow the values of shape computations.

    It keeps a record of every element of every vector on the way, so that a vector of 2^40 elements that is never
    computed would take terabytes. Followed are models whose known vectors are short, and whose shape computations
    cannot reach such sizes (a bound from above: constants and known sizes, through Add, Mul and the like).
    """
    values = (value for graph in graphs_of(model) for value in (*graph.inputs, *_made(graph)))
    if any(_is_long(value) for value in values):
        return False
    bounds: dict[ir.Value, float] = {}
    for node in model.graph:
        for position in SHAPE_INPUTS.get(node.op_type, ()):
            if _bound(input_at(node, position), bounds) > PROPAGATED:
                return False
        if node.domain == "" and any(value.dtype in _INTEGERS for value in node.outputs):
            bounds.update(dict.fromkeys(node.outputs, _result(node, bounds)))
    return True


def _made(graph: ir.Graph) -> Iterator[ir.Value]:
    for node in graph:
        yield from node.outputs


def _is_long(value: ir.Value) -> bool:
    shape = value.shape
    return shape is not None and len(shape) == 1 and isinstance(shape[0], int) and shape[0] > PROPAGATED


def _result(node: ir.Node, bounds: dict[ir.Value, float]) -> float:
    """A bound of the whole numbers that a node of shape computations makes; 0 for one that makes none."""
    if node.op_type in ("Shape", "Size"):
        shape = node.inputs[0].shape if node.inputs and node.inputs[0] is not None else None
        sizes = [size for size in shape or () if isinstance(size, int)]
        return float(math.prod(sizes) if node.op_type == "Size" else max(sizes, default=0))
    if any(value is not None and value.dtype not in _INTEGERS for value in node.inputs):
        return 0.0
    known = [_bound(value, bounds) for value in node.inputs]
    if node.op_type in ("Mul", "Pow", "ReduceProd"):
        return min(math.prod(max(one, 1.0) for one in known), _ENDLESS) ** (1 if node.op_type == "Mul" else 4)
    return min(float(sum(known)), _ENDLESS)


def _bound(value: ir.Value | None, bounds: dict[ir.Value, float]) -> float:
    """The largest magnitude that a value is known to have; short vectors of numbers only."""
    if value is None:
        return 0.0
    if value in bounds:
        return bounds[value]
    array = constant_array(value) if is_constant(value) and bytes_of(value) not in (None, 0) else None
    if array is None or array.size > 64 or array.dtype.kind not in "iuf":
        return 0.0
    found = float(np.nan_to_num(np.abs(array.astype(np.float64)), posinf=0.0).max(initial=0.0))
    bounds[value] = found if found < _ENDLESS else 0.0  # the ends that exporters write for "everything"
    return bounds[value]
