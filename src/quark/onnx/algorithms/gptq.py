"""GPTQ in a graph: the inputs' second moments from the quantized twin, layer by layer, and weights on the Plan's grid.

Layers are rounded in graph order; what a layer reads comes from the twin whose earlier layers are rounded already. A
layer whose error on the calibration data is not below that of rounding to nearest keeps its float weight, which
emission rounds to nearest.

Not handled: convolutions, stacked matrices; they are rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from quark.algorithms.columns import Columns, columns_of
from quark.algorithms.gptq import gptq, loss
from quark.config.plan import Plan, TensorPlan
from quark.errors import ConfigError
from quark.onnx.algorithms.context import Context
from quark.onnx.algorithms.layers import Tunable, tunable_layers
from quark.onnx.algorithms.linear import Linear, linear_of
from quark.onnx.algorithms.samples import feeds_of
from quark.onnx.algorithms.twin import twin_of
from quark.onnx.algorithms.walk import Walk
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import set_constant
from quark.onnx.quantization.config.algorithm import GPTQConfig


def run(model: ir.Model, plan: Plan, config: GPTQConfig, context: Context) -> PassReport:
    """Round every linear layer, in place.

    Raises:
        ConfigError: the model has no linear layer with a quantized weight.
        DataError: there is no calibration data.
    """
    found, refused = tunable_layers(model, plan, ("MatMul", "Gemm"), config.layers)
    pairs = [(layer, linear_of(layer.node)) for layer in found]
    layers = [(layer, linear) for layer, linear in pairs if linear is not None]
    refused += [f"{layer.name!r} stays: its weight is no plain matrix" for layer, linear in pairs if linear is None]
    if not layers:
        raise ConfigError("GPTQConfig: the model has no MatMul or Gemm with a quantized constant matrix")
    options = context.job.options
    twin = twin_of(model, plan, options)
    nodes = {node.name: node for node in twin.graph}
    reads = {layer.name: _source(nodes[layer.name]) for layer, _ in layers}
    libraries = options.UserCustomOpLibPath
    walk = Walk(twin, feeds_of(model, context), reads.values(), options.ExecutionProviders, libraries)
    better = 0
    for done, (layer, linear) in enumerate(layers, 1):
        name = reads[layer.name]
        finished = context.resume.done(config.name, layer.name)
        inputs = (sample[name] for sample in walk.advance([name]))
        arrays = _rounded(layer, linear, inputs, config) if finished is None else finished
        if finished is None:
            context.resume.finish(config.name, layer.name, arrays)
        if arrays["better"]:
            better += 1
            linear.write(arrays["weight"])
            stored = arrays["weight"] if linear.transposed else arrays["weight"].T
            set_constant(twin.graph.initializers[layer.weight.name], np.ascontiguousarray(stored, np.float32))
        context.progress(config.name, done, len(layers))
    return PassReport(config.name, better, tuple(refused))


def _source(node: ir.Node) -> str:
    return "" if node.inputs[0] is None else str(node.inputs[0].name)


def _rounded(layer: Tunable, linear: Linear, inputs: Iterable[np.ndarray], config: GPTQConfig) -> dict[str, np.ndarray]:
    """The weight [out, in] on its grid, and whether it is better than rounded to nearest."""
    weight = np.asarray(linear.weight, np.float32)
    hessian = second_moments(inputs, weight.shape[1])
    grid = grid_of(layer.weight, np.asarray(layer.constant(1), np.float32))
    grid = grid if linear.transposed else grid.transposed
    found = gptq(weight, hessian, grid, config.block_size, config.perc_damp, config.act_order)
    nearest = grid.round(weight)
    before, after = (float(loss(np.asarray(one) - weight, hessian).sum()) for one in (nearest, found))
    return {"weight": np.asarray(found), "better": np.array(after < before), "errors": np.array([before, after])}


def second_moments(inputs: Iterable[np.ndarray], columns: int) -> np.ndarray:
    """The mean of x x^T over all rows of all samples, [columns, columns] float32; one sample is in memory at a time."""
    total, count = np.zeros((columns, columns), np.float64), 0
    for array in inputs:
        rows = np.asarray(array, np.float32).reshape(-1, columns)
        total += rows.T @ rows
        count += len(rows)
    return mean_moments(total, count)


def mean_moments(total: np.ndarray, count: int) -> np.ndarray:
    """A sum of x x^T over ``count`` rows as a mean, float32."""
    return (total / max(count, 1)).astype(np.float32)


def moments_in_halves(inputs: Iterable[np.ndarray], columns: int) -> tuple[np.ndarray, np.ndarray]:
    """The sums of x x^T, [2, columns, columns] float64, and numbers of rows [2] of every other sample.

    A sample that is alone is divided in the middle.
    """
    totals, counts = np.zeros((2, columns, columns)), np.zeros(2, np.int64)

    def add(half: int, rows: np.ndarray) -> None:
        totals[half] += rows.T @ rows
        counts[half] += len(rows)

    parts = (np.asarray(array, np.float32).reshape(-1, columns) for array in inputs)
    first, second = next(parts, None), next(parts, None)
    if first is None:
        return totals, counts
    for half, rows in enumerate(np.array_split(first, 2) if second is None else (first, second)):
        add(half, rows)
    for place, rows in enumerate(parts):
        add(place % 2, rows)
    return totals, counts


def grid_of(tensor: TensorPlan, weight: np.ndarray) -> Columns:
    """The grid of a weight under its plan, in the orientation of the file."""
    spec = tensor.spec
    scale, zero = tensor.scale, tensor.zero_point
    return columns_of(weight, spec.row, spec.granularity, scale, zero, spec.rounding, spec.narrow_codes)
