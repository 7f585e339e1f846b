"""SmoothQuant in a graph: divide what linear layers read by s per channel, and multiply their weights.

All layers that read one tensor share s. The division goes into what makes the tensor where it can (``divide.py``);
otherwise one Mul stands in front of the layers, which stays float outside NPU flows: the tensor is rounded once.

s says how far the paper goes. How far it helps is measured: every tensor takes the power s^t, t from 0 to 1, with which
its layers, rounded as the job rounds them, answer best (``local.py``). ``keep_worse=True`` takes s as it is.

Not handled: convolutions, stacked matrices.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.algorithms.smoothquant import smoothing_scales
from quark.ir.surgery import Names
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.divide import divider, put_in_front
from quark.onnx.algorithms.linear import Linear, by_input
from quark.onnx.algorithms.local import RoundingJudge, judge_of, look
from quark.onnx.graph.report import PassReport
from quark.onnx.qdq.slots import STAYS_FLOAT
from quark.onnx.quantization.config.algorithm import SmoothQuantConfig

#: t of s^t.
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def run(model: ir.Model, config: SmoothQuantConfig, context: JobContext) -> PassReport:
    """Smooth every tensor that linear layers read, in place.

    Raises:
        DataError: there is no calibration data.
    """
    found = by_input(model)
    if not found:
        return PassReport(config.name, 0, ("the model has no MatMul or Gemm with a constant matrix",))
    seen = look(model, found, context, config.name)
    judge, names, refused = None if config.keep_worse else judge_of(model, context), Names(model), []
    for value, layers in found.items():
        here = seen[str(value.name)]
        weights = np.max([np.abs(layer.weight).max(0) for layer in layers], axis=0)
        s = np.asarray(smoothing_scales(here.largest, weights.astype(np.float32), config.alpha))
        strength = 1.0 if judge is None else _best(judge, value, layers, here.rows, s)
        if not strength:
            refused.append(f"{value.name!r} stays: its layers answer best without")
            continue
        _smooth(model, names, value, layers, np.asarray(s**strength, np.float32), context.job.npu)
    return PassReport(config.name, len(found) - len(refused), tuple(refused))


def _best(judge: RoundingJudge, value: ir.Value, layers: list[Linear], rows: np.ndarray, s: np.ndarray) -> float:
    """The strength with the least loss; of equal ones the least."""

    def loss(strength: float) -> float:
        power = s**strength
        return judge.loss(value, layers, rows, lambda x: x / power, lambda w: w * power)

    return min(STRENGTHS, key=loss)


def _smooth(model: ir.Model, names: Names, value: ir.Value, layers: list[Linear], s: np.ndarray, npu: bool) -> None:
    divide = divider(value, layers)
    for layer in layers:
        layer.write(layer.weight * s)
    if divide is not None:
        divide(s)
        return
    node = put_in_front(model, names, value, layers, s)
    if not npu:
        node.meta[STAYS_FLOAT] = "SmoothQuant: it smooths what the layers behind it read"
