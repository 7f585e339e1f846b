"""Whether pictures have the range that the first convolution was trained on, by what it makes of one of them.

    a BatchNormalization behind it    holds the variance of what it saw: the spread over its root is near 1
    a bias                            a folded normalization: the spread over the bias is 0.1 to 30 where the range is
                                      right, and below 0.01 where it is 255 times too small

Measured over channels, medians, on the four detectors and classifiers of this project's real models: 0.8 with a
BatchNormalization, 1.3 to 2.2 with a bias; 0.003 and 0.005 to 0.009 a factor of 255 below.

Not told: a range that is too large for a folded normalization, as a network that was trained without one has biases
next to nothing (SqueezeNet: 1100); orders of channels, means and resizing, which one picture does not show.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.errors import QuarkError
from quark.files.plain import TEXT
from quark.ir.surgery import constant_array
from quark.numerics.metrics import median
from quark.onnx.graph.session import RUNTIME_ERRORS, open_session

SMALL = {"variance": 1 / 30, "bias": 1 / 50}
LARGE = {"variance": 30.0}
_STEPS = 64  # operators in front of the first layer, beyond which it is no first layer
_FLAT = 0.02  # spread of a picture over its largest value, below which it shows nothing
_UNFIT: tuple[type[Exception], ...] = (QuarkError, ValueError, *RUNTIME_ERRORS)


def far_from_trained(model: ir.Model, name: str, array: np.ndarray) -> str:
    """``small`` or ``large`` where the values of an input are by far smaller or larger than in training; else empty.

    Args:
        model: of float layers.
        name: the input.
        array: one sample of it, a batch of pictures; other arrays tell nothing.
    """
    if array.ndim != 4 or not {1, 3} & {array.shape[1], array.shape[3]} or array.dtype.kind in TEXT:
        return ""
    if not np.isfinite(array).all():
        return ""
    layer = _first_layer(model, name)
    if layer is None or array.std() <= _FLAT * np.abs(array).max():
        return ""
    kind, expected = _expected(layer)
    made = _made(model, name, layer, array) if kind else None
    if made is None or made.ndim != 4:
        return ""
    found = median(made.std((0, 2, 3)) / np.maximum(expected, np.finfo(np.float32).tiny))
    return "small" if found < SMALL[kind] else "large" if found > LARGE.get(kind, np.inf) else ""


def _first_layer(model: ir.Model, name: str) -> ir.Node | None:
    """The convolution that an input reaches first."""
    reached, steps = {name}, 0
    for node in model.graph:
        if not any(value is not None and value.name in reached for value in node.inputs):
            continue
        if node.op_type == "Conv":
            return node
        reached.update(str(value.name) for value in node.outputs)
        steps += 1
        if steps > _STEPS:
            return None
    return None


def _expected(layer: ir.Node) -> tuple[str, np.ndarray]:
    """What is compared with the spread of a channel, and its values ``[channels]``; an empty name for nothing."""
    readers = [use.node for use in layer.outputs[0].uses()]
    if len(readers) == 1 and readers[0].op_type == "BatchNormalization":
        kind, value = "variance", readers[0].inputs[4]
    else:
        kind, value = "bias", layer.inputs[2] if len(layer.inputs) > 2 else None
    array = None if value is None else value.const_value.numpy() if value.const_value else constant_array(value)
    if array is None or (array == array.flat[0]).all():  # as they were before any training
        return "", np.zeros(0)
    expected = np.abs(array.astype(np.float64))
    return kind, np.sqrt(expected) if kind == "variance" else expected


def _made(model: ir.Model, name: str, layer: ir.Node, array: np.ndarray) -> np.ndarray | None:
    """What the layer makes of a sample; None where that part of the model needs more, or does not run."""
    try:
        graph = ir.convenience.extract(model.graph, [name], [str(layer.outputs[0].name)])
        session = open_session(ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values())))
        kind = graph.inputs[0].dtype
        given = array if kind is None else array.astype(kind.numpy())
        return np.asarray(session.run(None, {name: given})[0]).astype(np.float32)
    except _UNFIT:
        return None
