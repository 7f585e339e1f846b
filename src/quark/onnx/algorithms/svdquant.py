"""SVDQuant in a graph: linear layers get a float branch of low rank, which takes the hard part of their weights.

    y = Q(x / s) Q(R)^T + ((x / s) L1^T) L2^T,     W s = L2 L1 + R

All layers that read one tensor share s. The division goes into what makes the tensor where it can (``divide.py``);
otherwise one Mul stands in front of the layers. The branch, two MatMul and an Add, reads and computes float values; the
residual R is the weight of the layer, which is quantized as the job says. The exponent of s is the one with which the
layers, rounded as the job rounds them, answer best on rows of the calibration data (``local.py``); where none pays, the
tensor and its layers stay. The mathematics is that of ``quark.algorithms.svdquant``.

Not handled: convolutions, stacked matrices, NPUs, which compute no float branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from quark.algorithms.svdquant import ALPHAS, LowRankSplit, best_split, is_excluded
from quark.errors import ConfigError
from quark.ir.surgery import Names, add_initializer
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.divide import divider, put_in_front
from quark.onnx.algorithms.linear import Linear, by_input
from quark.onnx.algorithms.local import RoundingJudge, judge_of, look
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import put_behind
from quark.onnx.qdq.slots import STAYS_FLOAT
from quark.onnx.quantization.config.algorithm import SVDQuantConfig


def run(model: ir.Model, config: SVDQuantConfig, context: JobContext) -> PassReport:
    """Give the large quantized linear layers their branches, in place.

    Raises:
        ConfigError: the job is for an NPU.
        DataError: there is no calibration data.
    """
    if context.job.npu:
        raise ConfigError(
            "algo_config: SVDQuantConfig adds branches that are computed in float, and an NPU computes none"
        )
    judge, names, refused = judge_of(model, context), Names(model), []
    found = {
        value: [layer for layer in layers if _is_wanted(layer, config, judge)]
        for value, layers in by_input(model).items()
    }
    found = {value: layers for value, layers in found.items() if layers}
    if not found:
        size = config.min_layer_size
        return PassReport(config.name, 0, (f"no quantized MatMul or Gemm has a matrix of at least {size} x {size}",))
    seen = look(model, found, context, config.name)
    alphas = (config.alpha_candidates or ALPHAS) if config.search_alpha else [config.smooth_alpha]
    for value, layers in found.items():
        here, weights = seen[str(value.name)], [np.asarray(layer.weight, np.float32) for layer in layers]
        error = partial(_error, judge, value, layers, here.rows)
        without = error(np.ones_like(here.largest), [LowRankSplit(w[:0], w[:, :0], w) for w in weights])
        best = best_split(weights, here.largest, alphas, config.svd_rank, error, without)
        if best is None:
            refused.append(f"{value.name!r} stays: its layers answer no better with a branch")
            continue
        _split(model, names, value, layers, *best)
    return PassReport(config.name, len(found) - len(refused), tuple(refused))


def _is_wanted(layer: Linear, config: SVDQuantConfig, judge: RoundingJudge) -> bool:
    large = min(layer.weight.shape) >= config.min_layer_size
    return large and judge.tensor_of(layer) is not None and not is_excluded([layer.name], config.exclude_patterns)


def _error(
    judge: RoundingJudge,
    value: ir.Value,
    layers: Sequence[Linear],
    rows: np.ndarray,
    s: np.ndarray,
    parts: Sequence[LowRankSplit],
) -> float:
    """Mean over the layers of what rounding x / s and the residuals changes in their answers, relative to these."""
    smooth = rows / s
    data, losses = judge.rounded_rows(value, smooth), []
    for layer, one in zip(layers, parts, strict=True):
        noise = data @ judge.rounded_weight(layer, one.residual).T - smooth @ one.residual.T
        signal = rows @ np.asarray(layer.weight, np.float32).T
        losses.append(np.square(noise, dtype=np.float64).sum() / max(np.square(signal, dtype=np.float64).sum(), 1e-300))
    return float(np.mean(losses))


def _split(
    model: ir.Model,
    names: Names,
    value: ir.Value,
    layers: list[Linear],
    s: np.ndarray,
    parts: Sequence[LowRankSplit],
) -> None:
    """Divide the tensor, and put the residuals and the branches into the graph."""
    divide = divider(value, layers)
    if divide is None:
        put_in_front(model, names, value, layers, s).meta[STAYS_FLOAT] = "SVDQuant: it smooths what layers read"
    else:
        divide(s)
    for layer, one in zip(layers, parts, strict=True):
        _put_beside(model, names, layer, one)


def _put_beside(model: ir.Model, names: Names, layer: Linear, parts: LowRankSplit) -> None:
    """The branch of one layer, whose sum with it takes the layer's place."""
    dtype, source, answer = layer.weight.dtype, layer.node.inputs[0], layer.node.outputs[0]
    layer.write(parts.residual)
    branch: list[ir.Node] = []
    for kind, factor in (("down", parts.down), ("up", parts.up)):
        base = names.fresh(f"{layer.name}_{kind}")
        matrix = add_initializer(model.graph, np.ascontiguousarray(factor.T, dtype), names.fresh(f"{base}_weight"))
        branch.append(_float_node("MatMul", source, matrix, base))
        source = branch[-1].outputs[0]
    total = _float_node("Add", answer, branch[-1].outputs[0], names.fresh(f"{layer.name}_sum"))
    put_behind(answer, [*branch, total], names.fresh(f"{answer.name}_residual"))


def _float_node(op_type: str, first: ir.Value | None, second: ir.Value, name: str) -> ir.Node:
    made = ir.Value(name=f"{name}_output", type=second.type)
    node = ir.Node("", op_type, [first, second], outputs=[made], name=name)
    node.meta[STAYS_FLOAT] = "SVDQuant: the branch of low rank stays float"
    return node
