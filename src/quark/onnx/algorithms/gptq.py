"""GPTQ, GPTAQ and Qronos in a graph: the inputs' second moments, layer by layer, and weights on the Plan's grid.

Layers are rounded in graph order; what a layer reads comes from the fake-quantized model whose earlier layers are
rounded already, and for GPTAQ and Qronos, which aim at what the float model computes, from a walk through the float
model beside it. A layer whose error on the calibration data is not below that of rounding to nearest keeps its float
weight, which emission rounds to nearest.

Not handled: convolutions, stacked matrices; they are rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.algorithms.columns import Columns, columns_of
from quark.algorithms.gptaq import excess
from quark.algorithms.gptq import loss
from quark.algorithms.rounders import rounder_of
from quark.config.plan import Plan, TensorPlan
from quark.errors import ConfigError
from quark.ir.surgery import input_name, set_constant
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.fake_quantized import fake_quantized
from quark.onnx.algorithms.layers import Tunable, tunable_layers
from quark.onnx.algorithms.linear import Linear, linear_of
from quark.onnx.algorithms.moments import Moments, Pair, summed
from quark.onnx.algorithms.samples import feeds_of
from quark.onnx.algorithms.walk import GraphWalk
from quark.onnx.bodies import graphs
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.session import Runtime
from quark.onnx.quantization.config.algorithm import AlgoConfig


def on_grid(weight: np.ndarray, seen: Moments, grid: Columns, config: AlgoConfig) -> np.ndarray:
    """The weight [out, in] as the algorithm of ``config`` rounds it, float32; ``seen`` are means."""
    return np.asarray(rounder_of(config).prepare(seen, config)(weight, grid), np.float32)


def lost(rounded: np.ndarray, weight: np.ndarray, seen: Moments) -> float:
    """What outputs lose by a rounded weight, up to what no rounding changes; ``seen`` are means."""
    error = rounded - weight
    parts = loss(error, seen.hessian) if seen.cross is None else excess(error, weight, seen.hessian, seen.cross)
    return float(parts.sum())


class LayerInputs:
    """What layers read, in the order of the graph.

    Args:
        model, reads: where layers are rounded, and what they read there, by name.
        reference, wanted: a float model that does not change, and what the same layers read there; None: not needed.
        context: whose job says how to run.
        samples: that both read.
    """

    def __init__(
        self,
        model: ir.Model,
        reads: Sequence[str],
        context: JobContext,
        samples: Sequence[Any],
        reference: tuple[ir.Model, Sequence[str]] | None = None,
    ) -> None:
        runtime = Runtime.of(context.job.options)
        self._walk = GraphWalk(model, samples, reads, runtime)
        self._float = None if reference is None else GraphWalk(reference[0], samples, reference[1], runtime)

    def of(self, name: str, source: str) -> Iterable[Pair]:
        """Sample by sample, what is called ``name`` in the model and ``source`` in the float model."""
        rows = self._walk.advance([name])
        if self._float is None:
            return ((sample[name], None) for sample in rows)
        partners = self._float.advance([source])
        return ((one[name], other[source]) for one, other in zip(rows, partners, strict=True))


def run(model: ir.Model, plan: Plan, config: Any, context: JobContext) -> PassReport:
    """Round every linear layer, in place.

    Raises:
        ConfigError: the model has no linear layer with a quantized weight, and no bodies that may have one.
        DataError: there is no calibration data.
    """
    found, refused = tunable_layers(model, plan, ("MatMul", "Gemm"), config.layers)
    pairs = [(layer, linear_of(layer.node)) for layer in found]
    layers = [(layer, linear) for layer, linear in pairs if linear is not None]
    refused += [f"{layer.name!r} stays: its weight is not a plain matrix" for layer, linear in pairs if linear is None]
    if not layers:
        sentence = "the model has no MatMul or Gemm with a quantized constant matrix"
        if next(graphs(model), None) is None:
            raise ConfigError(f"{type(config).__name__}: {sentence}")
        return PassReport(config.name, 0, (f"{sentence} outside of its bodies",))
    options = context.job.options
    fake_model = fake_quantized(model, plan, options)
    nodes = {node.name: node for node in fake_model.graph}
    reads = {layer.name: _source(nodes[layer.name]) for layer, _ in layers}
    float_reads = [layer.source for layer, _ in layers]
    beside = (context.reference or model.clone(), float_reads) if rounder_of(config).paired else None
    walks = LayerInputs(fake_model, list(reads.values()), context, feeds_of(model, context), beside)
    kept: list[str] = []
    for done, (layer, linear) in enumerate(layers, 1):
        finished = context.journal.arrays(f"{config.name} {layer.name}")
        inputs = walks.of(reads[layer.name], layer.source)
        arrays = _rounded(layer, linear, inputs, config) if finished is None else finished
        if finished is None:
            context.journal.finish_arrays(f"{config.name} {layer.name}", arrays)
        if arrays["better"]:
            linear.write(arrays["weight"])
            stored = arrays["weight"] if linear.transposed else arrays["weight"].T
            set_constant(fake_model.graph.initializers[layer.weight.name], np.ascontiguousarray(stored, np.float32))
        else:
            kept.append(repr(layer.name))
        context.progress(config.name, done, len(layers))
    if kept:  # rounded to nearest, or by an algorithm before this one
        refused.append(f"no better than what they have on the calibration data: {', '.join(kept)}")
    return PassReport(config.name, len(layers) - len(kept), tuple(refused))


def _source(node: ir.Node) -> str:
    return input_name(node, 0)


def _rounded(layer: Tunable, linear: Linear, inputs: Iterable[Pair], config: AlgoConfig) -> dict[str, np.ndarray]:
    """The weight [out, in] on its grid, and whether it is better than rounded to nearest."""
    weight = np.asarray(linear.weight, np.float32)
    seen = summed(inputs, weight.shape[1]).mean
    grid = grid_of(layer.weight, np.asarray(layer.constant(1), np.float32))
    grid = grid if linear.transposed else grid.transposed
    found = on_grid(weight, seen, grid, config)
    before, after = (lost(one, weight, seen) for one in (np.asarray(grid.round(weight)), found))
    return {"weight": found, "better": np.array(after < before), "errors": np.array([before, after])}


def grid_of(tensor: TensorPlan, weight: np.ndarray) -> Columns:
    """The grid of a weight under its plan, in the orientation of the file."""
    return columns_of(weight, tensor.spec.coding, tensor.scale, tensor.zero_point)
