"""Types and shapes of every value, by ONNX shape inference on the model without its weights.

``onnx.shape_inference`` serializes the whole model twice; leaving the weights out makes it a matter of milliseconds,
and lets it work above 2 GB. Data propagation is on, so shapes computed by Shape → Gather → Concat → Reshape are found.

Not handled: operators that ONNX does not know (their outputs stay unknown, and so may what follows them).
"""

from __future__ import annotations

import logging

import onnx
import onnx_ir as ir

from quark.onnx.graph.weightless import through_proto

_log = logging.getLogger(__name__)


def infer_shapes(model: ir.Model) -> int:
    """Fill in the types and shapes that inference finds, in place, subgraphs included.

    What the model already states is kept where inference knows less.

    Returns:
        Number of values that learnt something. 0, with a warning in the log, where inference gives up on the model.
    """
    try:
        inferred = through_proto(model, _infer)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        _log.warning("shape inference gave up: %s", error)
        return 0
    pairs = zip(model.graphs(), inferred.graphs(), strict=True)
    return sum(_learn_graph(ours, theirs) for ours, theirs in pairs)


def _infer(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Reshape takes up propagated shapes from opset 14 on only, and nothing else that matters changed in 14."""
    for entry in proto.opset_import:
        if entry.domain == "" and entry.version == 13:
            entry.version = 14
    return onnx.shape_inference.infer_shapes(proto, strict_mode=False, data_prop=True)


def _learn_graph(graph: ir.Graph, inferred: ir.Graph) -> int:
    """Graphs come out of inference with the same nodes in the same order (and without unnamed last outputs)."""
    nodes = zip(graph, inferred, strict=True)
    return sum(_learn(ours, theirs) for a, b in nodes for ours, theirs in zip(a.outputs, b.outputs, strict=False))


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
