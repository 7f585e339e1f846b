"""SmoothQuant in a graph: divide what linear layers read by s per channel, and multiply their weights.

All layers that read one tensor share s. Where nothing else reads the tensor, the division goes into what makes it (the
scale and bias of a LayerNormalization, the constant of a Mul, the columns of a linear layer); otherwise one Mul stands
in front of the layers.

Not handled: convolutions, stacked matrices.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.algorithms.smoothquant import smoothing_scales
from quark.onnx.algorithms.channels import write_operand
from quark.onnx.algorithms.context import Context
from quark.onnx.algorithms.linear import Linear, by_input, linear_of
from quark.onnx.algorithms.samples import feeds_of
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.run import Runner
from quark.onnx.graph.surgery import Names, add_initializer, constant_array, input_at, int_attribute
from quark.onnx.quantization.config.algorithm import SmoothQuantConfig


def run(model: ir.Model, config: SmoothQuantConfig, context: Context) -> PassReport:
    """Smooth every tensor that linear layers read, in place.

    Raises:
        DataError: there is no calibration data.
    """
    found = by_input(model)
    if not found:
        return PassReport(config.name, 0, ("the model has no MatMul or Gemm with a constant matrix",))
    largest = input_magnitudes(model, found, context, config.name)
    names = Names(model)
    for value, layers in found.items():
        weights = np.max([np.abs(layer.weight).max(0) for layer in layers], axis=0)
        s = np.asarray(smoothing_scales(largest[value], weights.astype(np.float32), config.alpha))
        for layer in layers:
            layer.write(layer.weight * s)
        if not _fold(value, layers, s):
            _divide(model, names, value, layers, s)
    return PassReport(config.name, len(found))


def input_magnitudes(
    model: ir.Model, found: dict[ir.Value, list[Linear]], context: Context, stage: str
) -> dict[ir.Value, np.ndarray]:
    """The largest magnitude of every channel (last axis) of these tensors; one sample is in memory at a time."""
    options = context.job.options
    names = {value: str(value.name) for value in found}
    runner = Runner(model, names.values(), (), options.ExecutionProviders, options.UserCustomOpLibPath)
    largest = {value: np.zeros(layers[0].weight.shape[1], np.float32) for value, layers in found.items()}
    feeds = feeds_of(model, context)
    for done, feed in enumerate(feeds, 1):
        seen = runner.run(feed).values
        for value, name in names.items():
            array = np.abs(seen[name]).reshape(-1, len(largest[value]))
            if len(array):
                np.maximum(largest[value], array.max(0), out=largest[value])
        context.progress(stage, done, len(feeds))
    return largest


def _fold(value: ir.Value, layers: list[Linear], s: np.ndarray) -> bool:
    """Divide by ``s`` in what makes the tensor, if only these layers read it and its maker can take it."""
    node = value.producer()
    readers = {layer.node for layer in layers}
    if node is None or value.is_graph_output() or any(use.node not in readers for use in value.uses()):
        return False
    if node.op_type == "LayerNormalization" and int_attribute(node, "axis", -1) == -1:
        return _divide_constants(node, (1, 2), s)
    if node.op_type == "Mul":
        return any(_divide_constants(node, (position,), s) for position in (0, 1))
    linear = linear_of(node)
    if linear is None or not _divisible(node, (2,), s):
        return False
    linear.write(linear.weight / s[:, None])
    return _divide_constants(node, (2,), s)


def _divisible(node: ir.Node, positions: tuple[int, ...], s: np.ndarray) -> bool:
    """Whether every given input is absent, or a constant with an element for every channel on its last axis."""
    values = [input_at(node, position) for position in positions]
    arrays = [constant_array(value) for value in values if value is not None]
    return all(array is not None and array.shape[-1:] == s.shape for array in arrays)


def _divide_constants(node: ir.Node, positions: tuple[int, ...], s: np.ndarray) -> bool:
    if not _divisible(node, positions, s):
        return False
    for position in positions:
        array = constant_array(input_at(node, position))
        if array is not None:
            write_operand(node, position, (array / s).astype(array.dtype))
    return True


def _divide(model: ir.Model, names: Names, value: ir.Value, layers: list[Linear], s: np.ndarray) -> None:
    """One Mul by 1 / s for all layers."""
    base = f"{value.name}_smooth"
    scale = add_initializer(model.graph, (1 / s).astype(layers[0].weight.dtype), names.fresh(f"{base}_scale"))
    product = ir.Value(name=names.fresh(base), shape=value.shape, type=value.type)
    node = ir.Node("", "Mul", [value, scale], outputs=[product], name=names.fresh(f"{base}_mul"))
    model.graph.insert_before(layers[0].node, node)
    for layer in layers:
        layer.node.replace_input_with(0, product)
