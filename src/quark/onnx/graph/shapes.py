"""Types and shapes of every value, by ONNX shape inference on the model without its weights.

``onnx.shape_inference`` serializes the whole model twice; leaving the weights out makes it a matter of milliseconds,
and lets it work above 2 GB. Data propagation is on, so shapes computed by Shape → Gather → Concat → Reshape are found.

Not handled: shapes of what operators make that ONNX does not know; their types are learnt from their readers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import onnx
import onnx_ir as ir
from onnx_ir.serde import deserialize_value_info_proto

from quark.onnx.graph.reader_types import learn_from_readers
from quark.onnx.graph.weightless import light_proto

_log = logging.getLogger(__name__)


def infer_shapes(model: ir.Model) -> int:
    """Fill in the types and shapes that inference finds, in place, subgraphs included.

    What the model already states is kept where inference knows less.

    Returns:
        Number of values that learnt something. 0, with a warning in the log, where inference gives up on the model.
    """
    try:
        inferred = _infer(light_proto(model))
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        _log.warning("shape inference gave up: %s", error)
        return 0
    learnt = _learn_graph(model.graph, inferred.graph)
    if learn_from_readers(model.graph):
        learnt += 1 + infer_shapes(model)
    return learnt


def _infer(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Reshape takes up propagated shapes from opset 14 on only, and nothing else that matters changed in 14."""
    for entry in proto.opset_import:
        if entry.domain == "" and entry.version == 13:
            entry.version = 14
    return onnx.shape_inference.infer_shapes(proto, strict_mode=False, data_prop=True)


def _learn_graph(graph: ir.Graph, inferred: onnx.GraphProto) -> int:
    """Learn what the protobuf of the same graph says of the tensors that its nodes make, subgraphs included."""
    found = {info.name: info for info in (*inferred.value_info, *inferred.output)}
    learnt = 0
    for node, proto in zip(graph, inferred.node, strict=True):
        for value in node.outputs:
            if value.name in found:
                learnt += _learn(value, deserialize_value_info_proto(found[value.name], None))
        for attribute in proto.attribute:
            theirs = [attribute.g] if attribute.HasField("g") else attribute.graphs
            pairs = zip(_bodies(node.attributes[attribute.name]), theirs, strict=True) if theirs else ()
            learnt += sum(_learn_graph(*pair) for pair in pairs)
    return learnt


def _bodies(attribute: ir.Attr) -> Sequence[ir.Graph]:
    """The graphs in an attribute."""
    if attribute.type == ir.AttributeType.GRAPH:
        return (attribute.as_graph(),)
    return attribute.as_graphs() if attribute.type == ir.AttributeType.GRAPHS else ()


def _learn(value: ir.Value, inferred: ir.Value) -> bool:
    """Copy what ``inferred`` knows and ``value`` does not."""
    learnt = False
    if value.type is None and inferred.type is not None:
        value.type, learnt = inferred.type, True
    if inferred.shape is not None and _knows_more(inferred.shape, value.shape):
        value.shape, learnt = inferred.shape, True
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
