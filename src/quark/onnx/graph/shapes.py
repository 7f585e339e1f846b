"""Types and shapes of every value, by ONNX shape inference on the model without its weights.

``onnx.shape_inference`` serializes the whole model twice; leaving the weights out makes it a matter of milliseconds,
and lets it work above 2 GB. Data propagation is on, so shapes computed by Shape → Gather → Concat → Reshape are found;
not for models in which it would fill the memory (:mod:`quark.onnx.graph.budget`).

What a file says of its own tensors is no proof. Exporters give one symbolic name to outputs of different sizes (every
level of a detector has its own number of boxes), and ONNX Runtime shares buffers between tensors of equal names: a
name that spreads to inner tensors makes the model fail at run time. Inference therefore never reads the shapes that
graph outputs declare, and :func:`prove_shapes` forgets every inner shape that does not follow from the inputs.

Not handled: shapes of what operators make that ONNX does not know; their types are learnt from their readers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy

import onnx
import onnx_ir as ir
from onnx_ir.serde import deserialize_value_info_proto

from quark.ir.walk import graphs_of, nodes_within
from quark.onnx.graph.budget import may_propagate
from quark.onnx.graph.reader_types import learn_from_readers
from quark.onnx.graph.runtime_operators import stand_in
from quark.onnx.graph.weightless import light_proto

Stated = tuple[ir.TypeProtocol | None, ir.Shape | None]
_log = logging.getLogger(__name__)


def infer_shapes(model: ir.Model) -> int:
    """Fill in the types and shapes that inference finds, in place, subgraphs included.

    What the model already states is kept where inference knows less.

    Returns:
        Number of values that learnt something. 0, with a warning in the log, where inference gives up on the model.
    """
    try:
        inferred, places = _infer(light_proto(model), may_propagate(model))
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        _log.warning("shape inference gave up: %s", error)
        return 0
    learnt = _learn_graph(model.graph, inferred.graph, places)
    if learn_from_readers(model.graph):
        learnt += 1 + infer_shapes(model)
    return learnt


def prove_shapes(model: ir.Model, add: bool = True) -> int:
    """Replace every shape in the graph by the one that follows from its inputs, in place.

    Args:
        model: a model, whose graph inputs are believed.
        add: state the shapes of tensors too that had none; False for a graph whose shapes were proved before nodes
            came into it that ONNX does not know: what does not follow any more keeps its fixed sizes.

    Where nothing follows (an operator that ONNX does not know), a shape of fixed sizes stays if all inputs of the
    model have fixed sizes, and none is stated otherwise. Graph outputs keep the sizes that they declare, and the names
    that no other tensor has unless both are proved equal; the others get names of their own.

    Returns:
        Number of values that have another shape than before.
    """
    stated = {value: value.shape for node in _nodes(model) for value in node.outputs}
    for value in stated:
        value.shape = None
    infer_shapes(model)
    fixed = all(_is_static(value.shape) for value in model.graph.inputs if not value.is_initializer())
    open_ends = [(value, shape) for value, shape in stated.items() if value.shape is None and shape is not None]
    kept = [(value, shape) for value, shape in open_ends if not add or (fixed and _is_static(shape))]
    for value, shape in kept:
        value.shape = ir.Shape([size if isinstance(size, int) else None for size in shape])
    if kept:
        infer_shapes(model)
    _declare(model.graph, stated)
    for value in [value for value, shape in stated.items() if shape is None and not add]:
        value.shape = None
    return sum(value.shape != shape for value, shape in stated.items())


def are_stated(model: ir.Model) -> bool:
    """Whether the type and the shape of every tensor that a node makes are stated."""
    return all(one.type is not None and one.shape is not None for node in _nodes(model) for one in node.outputs)


def names_stated(model: ir.Model) -> frozenset[str]:
    """The tensors whose types a model states although a node makes them."""
    return frozenset(str(one.name) for node in _nodes(model) for one in node.outputs if one.type is not None)


def leave_unsaid(model: ir.Model, stated: Collection[str] | None = None) -> None:
    """Forget, in place, the types and shapes of what Q and DQ make, and of constants: every reader infers them, and in
    a small model of many tensors they take more bytes than 8-bit codes save. Graph inputs and outputs keep theirs.

    Args:
        stated: forget those of all other tensors, too; ``None`` keeps them.
    """
    for node in _nodes(model):
        obvious = node.op_type in ("QuantizeLinear", "DequantizeLinear") and node.domain == ""
        for value in node.outputs:
            if (obvious or (stated is not None and value.name not in stated)) and not value.is_graph_output():
                value.shape = value.type = None
    for graph in graphs_of(model):
        for value in graph.initializers.values():
            if not value.is_graph_input() and not value.is_graph_output():
                value.shape = value.type = None  # its data say both


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    return nodes_within(model.graph)


def _declare(graph: ir.Graph, stated: Mapping[ir.Value, ir.Shape | None]) -> None:
    """Give the outputs what they declare beyond their proved shapes, with names that stand for one size each."""
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    symbols = (size.value for value in values for size in value.shape or () if not isinstance(size, int))
    proved = {symbol: symbol for symbol in symbols if symbol is not None}
    for output in graph.outputs:
        given = stated.get(output)
        if given is None or (output.shape is not None and len(given) != len(output.shape)):
            continue
        known = output.shape or ir.Shape([None] * len(given))
        sizes: list[int | str | None] = []
        for axis, (size, found) in enumerate(zip(given, known, strict=True)):
            symbol = None if isinstance(found, int) else found.value
            sizes.append(found if isinstance(found, int) else _size(size, symbol, proved, f"{output.name}_dim_{axis}"))
        output.shape = ir.Shape(sizes)


def _size(declared: int | ir.SymbolicDim, symbol: str | None, proved: dict[str, str], fresh: str) -> int | str | None:
    """The size of one axis of an output.

    Args:
        declared: by the model.
        symbol: of inference, which gives equal sizes equal symbols.
        proved: name -> symbol that it stands for; grows.
        fresh: a name of this axis alone, for where the declared one stands for another size already.
    """
    if isinstance(declared, int) or declared.value is None:
        return declared if isinstance(declared, int) else symbol
    name, stands_for = declared.value, symbol or fresh
    if proved.setdefault(name, stands_for) != stands_for:
        return symbol or fresh
    return name


def _is_static(shape: ir.Shape | None) -> bool:
    return shape is not None and shape.is_static()


def _infer(proto: onnx.ModelProto, propagate: bool) -> tuple[onnx.ModelProto, list[int]]:
    """The model with what inference finds, and the positions of its nodes among stand-ins.

    Reshape takes up propagated shapes from opset 14 on only, and nothing else that matters changed in 14.
    """
    version = max((entry.version for entry in proto.opset_import if not entry.domain), default=1)
    places = stand_in(proto.graph, version)
    for output in proto.graph.output:
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")
    for entry in proto.opset_import:
        if entry.domain == "" and entry.version == 13:
            entry.version = 14
    return onnx.shape_inference.infer_shapes(proto, strict_mode=False, data_prop=propagate), places


def _learn_graph(
    graph: ir.Graph,
    inferred: onnx.GraphProto,
    places: Sequence[int] | None = None,
    read: dict[bytes, Stated] | None = None,
) -> int:
    """Learn what the protobuf of the same graph says of the tensors that its nodes make, subgraphs included.

    Args:
        places: positions of the nodes in the protobuf; ``None`` where it has no others.
        read: types and shapes that were read already, by their bytes; it grows.
    """
    read = {} if read is None else read
    found = {info.name: info for info in (*inferred.value_info, *inferred.output)}
    learnt = 0
    protos = inferred.node if places is None else [inferred.node[place] for place in places]
    for node, proto in zip(graph, protos, strict=True):
        for value in node.outputs:
            if value.name in found:
                learnt += _learn(value, *_read(found[value.name], read))
        for attribute in proto.attribute:
            theirs = [attribute.g] if attribute.HasField("g") else attribute.graphs
            pairs = zip(_bodies(node.attributes[attribute.name]), theirs, strict=True) if theirs else ()
            learnt += sum(_learn_graph(*pair, read=read) for pair in pairs)
    return learnt


def _read(info: onnx.ValueInfoProto, read: dict[bytes, Stated]) -> Stated:
    """The type and the shape that a protobuf states, shared by all that are equal: copy the type, shapes are frozen."""
    key = info.type.SerializeToString()
    known = read.get(key)
    if known is None:
        made = deserialize_value_info_proto(info, None)
        known = read[key] = (made.type, made.shape)
    return known


def _bodies(attribute: ir.Attr) -> Sequence[ir.Graph]:
    """The graphs in an attribute."""
    if attribute.type == ir.AttributeType.GRAPH:
        return (attribute.as_graph(),)
    return attribute.as_graphs() if attribute.type == ir.AttributeType.GRAPHS else ()


def _learn(value: ir.Value, kind: ir.TypeProtocol | None, shape: ir.Shape | None) -> bool:
    """Take over what was inferred and ``value`` does not know."""
    learnt = False
    if value.type is None and kind is not None:
        value.type, learnt = deepcopy(kind), True
    if shape is None or not _knows_more(shape, value.shape):
        return learnt
    if value.is_graph_output() and value.shape is not None and len(value.shape) == len(shape):
        pairs = zip(shape, value.shape, strict=True)
        shape = ir.Shape([size if isinstance(size, int) else given for size, given in pairs])
    learnt, value.shape = learnt or shape != value.shape, shape
    return learnt


def _knows_more(shape: ir.Shape, than: ir.Shape | None) -> bool:
    return than is None or (shape != than and _static_dims(shape) >= _static_dims(than))


def _static_dims(shape: ir.Shape) -> int:
    return sum(isinstance(size, int) for size in shape)


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape where every dimension is a known number, otherwise None."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return tuple(int(size) for size in value.shape.numpy())
