"""AWQ in a graph: scale up the channels that matter before weights are rounded, then clip groups of the weights.

Scales go where they cost nothing, into what makes the tensor that the layers read (``divide.py``); which scale a place
takes, its layers, rounded as the job rounds them, decide on rows of the calibration data (``local.py``). Clips are for
weights with a scale per group or per output channel. The mathematics is that of ``quark.algorithms.awq``.

Not handled: convolutions, stacked matrices.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import onnx_ir as ir

from quark.algorithms.awq import Pair, best_clips, best_exponents, clipped, is_clipped, scale_of
from quark.numerics.granularity import Channel, Granularity, Group
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.divide import Divide, divider
from quark.onnx.algorithms.linear import Linear, by_input
from quark.onnx.algorithms.local import RoundingJudge, Seen, judge_of, look
from quark.onnx.graph.report import PassReport
from quark.onnx.quantization.config.algorithm import AWQConfig


def run(model: ir.Model, config: AWQConfig, context: JobContext) -> PassReport:
    """Scale and clip the layers behind every place that can be scaled, in place.

    Raises:
        DataError: there is no calibration data.
    """
    found = {value: layers for value, layers in by_input(model).items() if layers}
    if not found:
        return PassReport(config.name, 0, ("the model has no MatMul or Gemm with a constant matrix",))
    seen, judge, fired = look(model, found, context, config.name), judge_of(model, context), 0
    refused = []
    for value, layers in found.items():
        here, divide = seen[str(value.name)], divider(value, layers)
        s = None if divide is None or not len(here.rows) else _scale(judge, value, layers, here)
        if s is not None and divide is not None:
            _apply(divide, layers, s)
        clips = _clip(judge, layers, here.rows if s is None else here.rows / s)
        fired += s is not None or clips > 0
        if s is None and not clips:
            refused.append(f"{value.name!r} stays: {'nothing' if divide else 'no free scale and no clip'} helps there")
    return PassReport(config.name, fired, tuple(refused))


def _apply(divide: Divide, layers: list[Linear], s: np.ndarray) -> None:
    divide(s)
    for layer in layers:
        layer.write(layer.weight * s)


def _scale(judge: RoundingJudge, value: ir.Value, layers: list[Linear], here: Seen) -> np.ndarray | None:
    """The best scale of the family; None where the layers answer best without."""
    weights = np.max([np.abs(layer.weight).max(0) for layer in layers], axis=0).astype(np.float32)

    def loss(pair: Pair) -> float:
        s = np.asarray(scale_of(here.mean, weights, pair), np.float32)
        return judge.loss(value, layers, here.rows, lambda x: x / s, lambda w: w * s)

    best = best_exponents(lambda pairs: [loss(pair) for pair in pairs])
    return (
        None
        if best == (0.0, 0.0) or loss(best) >= loss((0.0, 0.0))
        else np.asarray(scale_of(here.mean, weights, best), np.float32)
    )


def _clip(judge: RoundingJudge, layers: list[Linear], rows: np.ndarray) -> int:
    """Clip the weights that read rows [n, channels] of one tensor; how many are changed."""
    wanted = [layer for layer in layers if is_clipped(_own_name(layer)) and judge.tensor_of(layer) is not None]
    if not wanted or not len(rows):
        return 0
    hessian, count = rows.T @ rows, 0
    for layer in wanted:
        weight = np.asarray(layer.weight, np.float32)
        size = _group_size(judge.granularity_of(layer), weight.shape[1], layer.transposed)
        steps = None if size is None else best_clips(weight, partial(judge.rounded_weight, layer), hessian, size)
        if steps is not None and size is not None:
            layer.write(np.asarray(clipped(weight, steps, size)))
            count += 1
    return count


def _own_name(layer: Linear) -> str:
    """The part of a node's name that says what the layer is: ``q_proj`` of ``/layers.0/self_attn/q_proj/MatMul``."""
    parts = [part for part in re.split(r"[./]", layer.name) if part and not part.startswith(layer.node.op_type)]
    return parts[-1] if parts else layer.name


def _group_size(granularity: Granularity | None, columns: int, transposed: bool) -> int | None:
    """Columns that share a scale in a row of the weight [out, in]; None where rows share scales."""
    summed = 1 if transposed else 0
    if isinstance(granularity, Group) and granularity.axis % 2 == summed:
        return min(granularity.size, columns)
    return columns if isinstance(granularity, Channel) and granularity.axis % 2 != summed else None
