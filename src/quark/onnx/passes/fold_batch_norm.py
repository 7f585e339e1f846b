"""Fold BatchNormalization into the Conv, ConvTranspose or Gemm before it.

    s = scale / sqrt(var + epsilon)        W' = W · s (along the output channels)        b' = (b - mean) · s + bias

Source: Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference", section 3.2. The output channels are axis 0 of a Conv weight; axis 1 of a ConvTranspose weight
[C_in, C_out / group, …], group by group; axis 0 (transB) or 1 of a Gemm weight, where alpha stays outside and beta is
absorbed into b.

Weights and biases that another node reads are copied, never changed. The folded node's output takes the name of the
BatchNormalization's. Where ``written_out`` says so, a Mul and an Add of constants per channel fold alike: what some
exporters make of a BatchNormalization.

Not handled: BatchNormalization in training form, statistics that are not constants, a result before the
BatchNormalization that others read, operators other than these three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, cast

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.surgery import (
    Names,
    add_initializer,
    constant_array,
    constant_shape,
    drop_if_unused,
    float_attribute,
    has_array,
    input_at,
    int_attribute,
    label,
    nodes_of,
    set_constant,
    set_input,
    sole_consumer,
    take_over,
)
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each
from quark.onnx.qdq.units import changes_units


def _scale_conv(node: ir.Node, weight: np.ndarray, s: np.ndarray) -> np.ndarray:
    return weight * s.reshape(-1, *[1] * (weight.ndim - 1))


def _scale_conv_transpose(node: ir.Node, weight: np.ndarray, s: np.ndarray) -> np.ndarray:
    groups = int_attribute(node, "group", 1)
    by_group = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    return (by_group * s.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))).reshape(weight.shape)


def _scale_gemm(node: ir.Node, weight: np.ndarray, s: np.ndarray) -> np.ndarray:
    return weight * (s[:, None] if int_attribute(node, "transB", 0) else s)


SCALERS: dict[str, Callable[[ir.Node, np.ndarray, np.ndarray], np.ndarray]] = {
    "Conv": _scale_conv,
    "ConvTranspose": _scale_conv_transpose,
    "Gemm": _scale_gemm,
}


#: Noise over energy, on average over the channels, from which a depthwise layer counts as lost.
DROWNED = 0.1


@dataclass(frozen=True)
class FoldableNorm:
    """A BatchNormalization y = x · s + shift (float64) that can go into ``node``."""

    norm: ir.Node
    node: ir.Node
    weight: ir.Value
    bias: ir.Value | None
    s: np.ndarray
    shift: np.ndarray


def run(
    model: ir.Model,
    keep_resolution: Annotated[
        bool, "Leave those that would lose channels of a depthwise weight under one 8-bit scale."
    ] = False,
    written_out: Annotated[bool, "Also a Mul or an Add of constants per channel."] = False,
) -> PassReport:
    """Fold every BatchNormalization that can be, in place; both nodes stand in one graph.

    Args:
        keep_resolution: leave those whose folding would drown channels of a depthwise weight that has one 8-bit scale:
            the noise of rounding would be a tenth of a channel's energy or more (10 dB), on average over the
            channels, and ten times what it is before.
        written_out: Mul and Add of constants are folded too, but for those that give the channels of an output units
            of their own: the layer's result would need one scale for all of them.
    """
    units = changes_units(model) if written_out else set()

    def look(norm: ir.Node) -> FoldableNorm | str | None:
        if norm.op_type != "BatchNormalization":
            return None if norm in units else _written_out(norm)
        found = match(norm)
        return drowned(found) or found if keep_resolution and isinstance(found, FoldableNorm) else found

    norms = nodes_of(model, "BatchNormalization", *(("Mul", "Add") if written_out else ()))
    return rewrite_each(model, "fold_batch_norm", norms, look, lambda _, found, names: _fold(found, model.graph, names))


def match(norm: ir.Node) -> FoldableNorm | str:
    """What a BatchNormalization can be folded into, or the reason why it cannot."""
    if in_training(norm):
        return "it is in training form"
    data = norm.inputs[0]
    reason = target_reason(data, norm)
    node = data.producer() if data is not None else None
    if reason is not None or node is None:
        return reason or "it has no input"
    found = parameters_of(norm)
    if isinstance(found, str):
        return found
    weight = node.inputs[1]
    return (
        f"{label(node)} has no weight"
        if weight is None
        else FoldableNorm(norm, node, weight, input_at(node, 2), *found)
    )


def _written_out(norm: ir.Node) -> FoldableNorm | None:
    """What a Mul or an Add of constants per channel can be folded into."""
    for value, constant in (norm.inputs, norm.inputs[::-1]):
        array, node = constant_array(constant), None if value is None else value.producer()
        if array is None or node is None or target_reason(value, norm) is not None:
            continue
        weight = cast(ir.Value, node.inputs[1])
        channels, rank = _channels(node, constant_shape(weight) or ())
        row = array.shape[1 - rank :][:1] if array.ndim >= rank - 1 else ()  # along axis 1, which has the channels
        if array.ndim > rank or array.size not in (1, *(row if row == (channels,) else ())):
            continue
        each = np.broadcast_to(np.asarray(array, np.float64).reshape(-1), channels)
        both = (each, np.zeros(channels)) if norm.op_type == "Mul" else (np.ones(channels), each)
        return FoldableNorm(norm, node, weight, input_at(node, 2), *both) if np.isfinite(each).all() else None
    return None


def _channels(node: ir.Node, shape: Sequence[int]) -> tuple[int, int]:
    """Output channels by the shape of the weight, and the rank of the output."""
    if node.op_type == "ConvTranspose":
        return shape[1] * int_attribute(node, "group", 1), len(shape)
    return shape[1 if node.op_type == "Gemm" and not int_attribute(node, "transB", 0) else 0], len(shape)


def drowned(found: FoldableNorm) -> str | None:
    """Why folding would leave a depthwise weight with one 8-bit scale too few codes, or None."""
    node, weight = found.node, np.asarray(constant_array(found.weight), np.float64)
    channels = found.s.size
    if node.op_type == "Gemm" or channels == 1 or int_attribute(node, "group", 1) != channels:
        return None
    before, after = noise_of_channels(weight), noise_of_channels(SCALERS[node.op_type](node, weight, found.s))
    if after < DROWNED or after < 10 * before:
        return None
    return (
        f"with one 8-bit scale the channels of {label(node)} would keep {-10 * np.log10(after):.0f} dB instead of "
        f"{-10 * np.log10(before):.0f}; weights per channel would not suffer, and FoldBatchNorm=True folds all the same"
    )


def noise_of_channels(weight: np.ndarray) -> float:
    """Noise of rounding to one scale of amax / 127 over a channel's energy, at most 1, averaged over axis 0.

    A depthwise weight has its channels on axis 0, in Conv and ConvTranspose alike. Channels that are all zero count as
    exact.
    """
    rows = weight.reshape(weight.shape[0], -1)
    step = max(float(np.abs(rows).max()), 1e-300) / 127
    energy = (rows**2).sum(1)
    noise = ((rows - np.round(rows / step) * step) ** 2).sum(1)
    return float(np.mean(np.minimum(noise / np.where(energy > 0, energy, 1), 1)))


def target_reason(data: ir.Value | None, reader: ir.Node) -> str | None:
    """Why nothing can be folded into the node that makes ``data`` for ``reader`` alone, or None."""
    node = data.producer() if data is not None else None
    if data is None or node is None or node.op_type not in SCALERS or node.domain != "":
        return f"it follows {'no node' if node is None else node.op_type}, not one of {', '.join(SCALERS)}"
    if sole_consumer(data) is not reader or node.graph is not reader.graph:
        return f"the result of {label(node)} is read by others too"
    weight, bias = input_at(node, 1), input_at(node, 2)
    if weight is None or not has_array(weight) or (bias is not None and not has_array(bias)):
        return f"the weight or bias of {label(node)} is not a constant"
    return None


def parameters_of(norm: ir.Node) -> tuple[np.ndarray, np.ndarray] | str:
    """(s, shift) of a BatchNormalization, or the reason why it has none."""
    parameters = [constant_array(value) for value in norm.inputs[1:5]]
    arrays = [np.asarray(array, np.float64) for array in parameters if array is not None]
    if len(arrays) < 4:
        return "its parameters are not constants"
    s, shift = affine(arrays, float_attribute(norm, "epsilon", 1e-5))
    if not (np.isfinite(s).all() and np.isfinite(shift).all()):
        return "its parameters give a scale or shift that is not finite"
    return s, shift


def in_training(norm: ir.Node) -> bool:
    """Whether a BatchNormalization computes its statistics, or hands them on."""
    read = any(bool(value.uses()) or value.is_graph_output() for value in norm.outputs[1:])
    return bool(int_attribute(norm, "training_mode", 0)) or read or len(norm.outputs) == 5  # the form before opset 14


def affine(parameters: Sequence[np.ndarray], epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Scale and shift of a BatchNormalization with the parameters scale, bias, mean, var."""
    scale, bias, mean, var = parameters
    with np.errstate(invalid="ignore", divide="ignore"):
        s = scale / np.sqrt(var + epsilon)
    return s, bias - mean * s


def _fold(found: FoldableNorm, graph: ir.Graph, names: Names) -> None:
    node = found.node
    scale_outputs(node, found.s, found.shift, graph, names)
    made = node.outputs[0]
    parameters = [value for value in found.norm.inputs if value is not made]  # a node that is taken out forgets them
    take_over(made, found.norm.outputs[0])
    for value in parameters:
        drop_if_unused(value)


def scale_outputs(node: ir.Node, s: np.ndarray, shift: np.ndarray, graph: ir.Graph, names: Names) -> None:
    """Let a node of :data:`SCALERS` give  y · s + shift  (per output channel) instead of y."""
    held, bias = node.inputs[1], input_at(node, 2)
    array, name = np.asarray(constant_array(held)), held.name if held is not None else node.name
    weight = SCALERS[node.op_type](node, array, s.astype(array.dtype))
    shifted = _bias(node, bias) * s + shift
    _replace(node, 1, weight, graph, names.fresh(f"{name}_folded"))
    _replace(node, 2, shifted.astype(array.dtype), graph, names.fresh(f"{name}_bias"))


def _bias(node: ir.Node, bias: ir.Value | None) -> np.ndarray:
    """The bias that ``node`` adds, in float64; a Gemm's beta is taken into it."""
    beta = float_attribute(node, "beta", 1.0)
    node.attributes.pop("beta", None)
    return np.zeros(1) if bias is None else np.asarray(constant_array(bias), np.float64) * beta


def _replace(node: ir.Node, position: int, array: np.ndarray, graph: ir.Graph, name: str) -> None:
    """A new weight or bias: in place where only ``node`` reads the old one, as the initializer ``name`` otherwise."""
    old = input_at(node, position)
    if old is not None and old.is_initializer() and sole_consumer(old) is node:
        set_constant(old, array)
    else:
        set_input(node, position, add_initializer(graph, array, name))
