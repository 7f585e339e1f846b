"""Bias correction in a graph: walk through the float model and its fake-quantized copy, compare the channels' means.

The layers before are corrected already when a layer is measured. A channel keeps its old bias where the codes of the
new one would not bring its mean nearer. With ``gain`` the layers behind which no other layer stands are amplified as
well: clipped and noisy inputs, and weights trained on them, make an answer that keeps its mean and shrinks towards it,
so that rare large answers (the score of an object) come out too small.

Not handled: layers without a bias, biases that other nodes share.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir

from quark.algorithms.bias_correction import channel_means, corrected, growth, room, shrunk
from quark.config.plan import Plan, TensorPlan
from quark.ir.surgery import constant_array, input_at, input_name, is_constant, name_of, set_constant
from quark.numerics.formats import Block
from quark.onnx.algorithms.channels import layer_of
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.fake_quantized import fake_quantized, rounded
from quark.onnx.algorithms.forward import CHANNEL_AXIS
from quark.onnx.algorithms.layers import Tunable, tunable_layers
from quark.onnx.algorithms.samples import feeds_of
from quark.onnx.algorithms.walk import GraphWalk, inputs_of
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.session import Runtime
from quark.onnx.qdq.parameters import set_biases
from quark.onnx.quantization.config.algorithm import BiasCorrectionConfig

_TYPES = ("Conv", "ConvTranspose", "Gemm")
_WHY = "the scale follows the gain of its channel (BiasCorrectionConfig)"


def run(model: ir.Model, plan: Plan, config: BiasCorrectionConfig, context: JobContext) -> PassReport:
    """Correct every bias, in place.

    Raises:
        DataError: there is no calibration data.
    """
    found, refused = tunable_layers(model, plan, _TYPES)
    layers = [layer for layer in found if _has_own_bias(layer)]
    refused += [f"{layer.name!r} stays: it has no bias of its own" for layer in found if layer not in layers]
    options = context.job.options
    fake_model = fake_quantized(model, plan, options)
    nodes = {node.name: node for node in fake_model.graph}
    feeds = feeds_of(model, context)
    names = {layer.name: str(layer.node.outputs[0].name) for layer in layers}
    outputs = {layer.name: str(nodes[layer.name].outputs[0].name) for layer in layers}
    runtime = Runtime.of(options)
    floats = GraphWalk(context.reference or model, feeds, names.values(), runtime)
    quantized = GraphWalk(fake_model, feeds, outputs.values(), runtime)
    fired, last = 0, _last_layers(model) if config.gain else frozenset()
    for done, layer in enumerate(layers, 1):
        axis = CHANNEL_AXIS.get(layer.node.op_type, 1)
        pair = [
            [sample[name] for sample in walk.advance([name])]
            for walk, name in ((floats, names[layer.name]), (quantized, outputs[layer.name]))
        ]
        if config.gain and layer.name in last:
            layer, pair[1] = _amplified(model, plan, layer, pair, axis)
        shift = _correct(model, layer, _wanted(pair, axis))
        fired += bool(shift.any())
        quantized.edit(outputs[layer.name], partial(_shifted, shift=shift, axis=axis))
        context.progress(config.name, done, len(layers))
    return PassReport(config.name, fired, tuple(refused))


def _last_layers(model: ir.Model) -> frozenset[str]:
    """Names of the layers behind which no other layer stands."""
    before: set[ir.Value] = set()
    last = set()
    for node in reversed(list(model.graph)):
        leads_on = any(value in before for value in node.outputs)
        layer = layer_of(node)
        if layer is not None and not leads_on:
            last.add(name_of(node))
        if layer is not None or leads_on:
            before.update(inputs_of(node))
    return frozenset(last)


def _amplified(
    model: ir.Model, plan: Plan, layer: Tunable, pair: list[list[np.ndarray]], axis: int
) -> tuple[Tunable, list[np.ndarray]]:
    """Make the layer's channels larger by what they have lost; the layer with its new plans, and what it answers then.

    A scale per channel grows with its channel, so that all codes stay. Where channels share one, the codes are rounded
    again, and a channel grows no further than they reach.
    """
    channels, weight = layer_of(layer.node), layer.weight
    if channels is None:
        return layer, pair[1]
    factors = growth(pair[0], pair[1], axis)
    scale, blocks = np.asarray(weight.scale), isinstance(weight.spec.row, Block)
    if scale.size == len(factors) and weight.spec.scale_rule == "float32" and not blocks:
        plan.put(replace(weight, scale=(scale * factors.reshape(scale.shape)).astype(np.float32), changes=(_WHY,)))
    else:
        factors = np.minimum(factors, np.maximum(_reach(channels.weight, weight, channels.made), 1))
    channels.scale_made(factors)
    set_biases(model, plan)
    bias = None if layer.bias is None else plan.tensors[layer.bias.name]
    shape = [1] * pair[1][0].ndim
    shape[axis] = -1
    answers = [(one * factors.reshape(shape)).astype(one.dtype) for one in pair[1]]
    return replace(layer, weight=plan.tensors[weight.name], bias=bias), answers


def _reach(array: np.ndarray, weight: TensorPlan, axis: int) -> np.ndarray:
    """[C]: how much larger each channel may become under the scales of the Plan; those of blocks follow the values."""
    row = weight.spec.row
    if isinstance(row, Block):
        widest = np.abs(np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)).max(1)
        return np.divide(widest.max(), widest, out=np.full(len(widest), np.inf), where=row.tensor_scale & (widest > 0))
    steps, zeros = (
        weight.spec.granularity.expand(np.asarray(one, np.float64), array.shape)
        for one in (weight.scale, weight.zero_point)
    )
    return np.moveaxis(room(array, steps, zeros, row), axis, 0).reshape(array.shape[axis], -1).min(1)


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
    value = model.graph.initializers[input_name(layer.node, 2)]
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
