"""SmoothQuant in a graph: divide what linear layers read by s per channel, and multiply their weights.

All layers that read one tensor share s. Where nothing else reads the tensor, the division goes into what makes it (the
scale and bias of a LayerNormalization, the constant of a Mul, the columns of a linear layer); otherwise one Mul stands
in front of the layers, which stays float outside NPU flows, so that the tensor is rounded once.

s says how far the paper goes. How far it helps is measured: every tensor takes the power s^t, t from 0 to 1, with which
its layers, rounded as the job rounds them, answer best (``local.py``). ``keep_worse=True`` takes s as it is.

Not handled: convolutions, stacked matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from quark.algorithms.smoothquant import smoothing_scales
from quark.onnx.algorithms.channels import write_operand
from quark.onnx.algorithms.context import Context
from quark.onnx.algorithms.linear import Linear, by_input, linear_of
from quark.onnx.algorithms.local import Judge, judge_of, look
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import Names, add_initializer, constant_array, input_at, int_attribute, sole_consumer
from quark.onnx.qdq.slots import STAYS_FLOAT
from quark.onnx.quantization.config.algorithm import SmoothQuantConfig

#: t of s^t.
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def run(model: ir.Model, config: SmoothQuantConfig, context: Context) -> PassReport:
    """Smooth every tensor that linear layers read, in place.

    Raises:
        DataError: there is no calibration data.
    """
    found = by_input(model)
    if not found:
        return PassReport(config.name, 0, ("the model has no MatMul or Gemm with a constant matrix",))
    seen = look(model, found, context, config.name)
    judged = not config.keep_worse and context.job.mode != "nbits"
    judge, names, refused = judge_of(model, context) if judged else None, Names(model), []
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


def _best(judge: Judge, value: ir.Value, layers: list[Linear], rows: np.ndarray, s: np.ndarray) -> float:
    """The strength with the least loss; of equal ones the least."""

    def loss(strength: float) -> float:
        power = s**strength
        return judge.loss(value, layers, rows, lambda x: x / power, lambda w: w * power)

    return min(STRENGTHS, key=loss)


def _smooth(model: ir.Model, names: Names, value: ir.Value, layers: list[Linear], s: np.ndarray, npu: bool) -> None:
    for layer in layers:
        layer.write(layer.weight * s)
    if not _fold(value, layers, s):
        _divide(model, names, value, layers, s, npu)


def _fold(value: ir.Value, layers: Sequence[Linear], s: np.ndarray) -> bool:
    """Divide by ``s`` in what makes the tensor, if only these layers read it and its maker can take it."""
    node = value.producer()
    readers = {layer.node for layer in layers}
    if node is None or value.is_graph_output() or any(use.node not in readers for use in value.uses()):
        return False
    if node.op_type == "LayerNormalization" and int_attribute(node, "axis", -1) == -1:
        return _divide_constants(node, (1, 2), s)
    if node.op_type == "Mul":
        return any(_divide_constants(node, (position,), s) or _divide_maker(node, position, s) for position in (0, 1))
    return _divide_linear(node, s)


def _divide_maker(node: ir.Node, position: int, s: np.ndarray) -> bool:
    """Divide the linear layer that makes a factor of a product (the "up" layer of a gated network)."""
    factor = input_at(node, position)
    maker = None if factor is None or sole_consumer(factor) is not node else factor.producer()
    return maker is not None and _divide_linear(maker, s)


def _divide_linear(node: ir.Node, s: np.ndarray) -> bool:
    """Divide the columns of a linear layer and its bias."""
    linear = linear_of(node)
    if linear is None or linear.weight.shape[0] != len(s) or not _divisible(node, (2,), s):
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


def _divide(model: ir.Model, names: Names, value: ir.Value, layers: list[Linear], s: np.ndarray, npu: bool) -> None:
    """One Mul by 1 / s for all layers."""
    base = f"{value.name}_smooth"
    scale = add_initializer(model.graph, (1 / s).astype(layers[0].weight.dtype), names.fresh(f"{base}_scale"))
    product = ir.Value(name=names.fresh(base), shape=value.shape, type=value.type)
    node = ir.Node("", "Mul", [value, scale], outputs=[product], name=names.fresh(f"{base}_mul"))
    if not npu:
        node.meta[STAYS_FLOAT] = "SmoothQuant: it smooths what the layers behind it read"
    model.graph.insert_before(layers[0].node, node)
    for layer in layers:
        layer.node.replace_input_with(0, product)
