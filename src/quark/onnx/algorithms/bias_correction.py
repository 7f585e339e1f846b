"""Bias correction in a graph: walk through the float model and its quantized twin, compare the channels' means.

The layers before are corrected already when a layer is measured. A channel keeps its old bias where the codes of the
new one would not bring its mean nearer.

Not handled: layers without a bias, biases that other nodes share.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir

from quark.algorithms.bias_correction import channel_means, corrected, shrunk
from quark.config.plan import Plan
from quark.onnx.algorithms.context import Context
from quark.onnx.algorithms.forward import CHANNEL_AXIS
from quark.onnx.algorithms.layers import Tunable, tunable_layers
from quark.onnx.algorithms.samples import feeds_of
from quark.onnx.algorithms.twin import rounded, twin_of
from quark.onnx.algorithms.walk import Walk
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import constant_array, input_at, is_constant, set_constant
from quark.onnx.quantization.config.algorithm import BiasCorrectionConfig

_TYPES = ("Conv", "ConvTranspose", "Gemm")


def run(model: ir.Model, plan: Plan, config: BiasCorrectionConfig, context: Context) -> PassReport:
    """Correct every bias, in place.

    Raises:
        DataError: there is no calibration data.
    """
    found, refused = tunable_layers(model, plan, _TYPES)
    layers = [layer for layer in found if _has_own_bias(layer)]
    refused += [f"{layer.name!r} stays: it has no bias of its own" for layer in found if layer not in layers]
    options = context.job.options
    twin = twin_of(model, plan, options)
    nodes = {node.name: node for node in twin.graph}
    feeds = feeds_of(model, context)
    names = {layer.name: str(layer.node.outputs[0].name) for layer in layers}
    twins = {layer.name: str(nodes[layer.name].outputs[0].name) for layer in layers}
    providers, libraries = options.ExecutionProviders, options.UserCustomOpLibPath
    floats = Walk(model, feeds, names.values(), providers, libraries)
    quantized = Walk(twin, feeds, twins.values(), providers, libraries)
    fired = 0
    for done, layer in enumerate(layers, 1):
        axis = CHANNEL_AXIS.get(layer.node.op_type, 1)
        pair = [
            [sample[name] for sample in walk.advance([name])]
            for walk, name in ((floats, names[layer.name]), (quantized, twins[layer.name]))
        ]
        shift = _correct(model, layer, _wanted(pair, axis))
        fired += bool(shift.any())
        quantized.edit(twins[layer.name], partial(_shifted, shift=shift, axis=axis))
        context.progress(config.name, done, len(layers))
    return PassReport(config.name, fired, tuple(refused))


def _has_own_bias(layer: Tunable) -> bool:
    bias = input_at(layer.node, 2)
    return bias is not None and is_constant(bias) and len(bias.uses()) == 1 and len(bias.shape or ()) == 1


def _wanted(pair: list[list[np.ndarray]], axis: int) -> np.ndarray:
    """[C]: what the channels' means lack, by float and quantized results of every sample."""
    expected, found = (np.array([channel_means([one], axis) for one in side]) for side in pair)
    sizes = np.array([one.size for one in pair[0]], np.float64)
    return shrunk(expected, found, sizes)


def _correct(model: ir.Model, layer: Tunable, lacking: np.ndarray) -> np.ndarray:
    """Give the layer its new bias; what that adds to every channel of its result."""
    value = model.graph.initializers[str(layer.node.inputs[2].name)]  # type: ignore[union-attr]
    bias = np.asarray(constant_array(value))
    wanted = corrected(bias, lacking)
    shift = _as_stored(layer, wanted) - _as_stored(layer, bias)
    nearer = np.abs(lacking - shift) < np.abs(lacking)
    set_constant(value, np.where(nearer, wanted, bias).astype(bias.dtype))
    return np.where(nearer, shift, 0)


def _as_stored(layer: Tunable, bias: np.ndarray) -> np.ndarray:
    """The values that the codes of a bias stand for."""
    values = bias if layer.bias is None else np.asarray(rounded(bias.astype(np.float32), layer.bias))
    return values.astype(np.float64)


def _shifted(values: np.ndarray, shift: np.ndarray, axis: int) -> np.ndarray:
    shape = [1] * values.ndim
    shape[axis] = -1
    return (values + shift.reshape(shape)).astype(values.dtype)
