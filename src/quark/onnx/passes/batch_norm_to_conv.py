"""A BatchNormalization that nothing could take in becomes a depthwise 1×1 convolution (ConvertBNToConv).

    W[c, 0, 0…] = scale / √(var + ε)        b[c] = bias - mean · W[c]        group = C

NPU compilers have a kernel for the convolution and none for the normalization. Fold first: this is for what is left.

Not handled: training form, parameters that are not constants, a rank that is not known or below 3, float64.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import (
    Names,
    add_initializer,
    constant_array,
    float_attribute,
    has_array,
    nodes_of,
    not_single,
    substitute,
)
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each
from quark.onnx.passes.fold_batch_norm import affine, in_training, noise_of_channels

#: Noise over energy, on average over the channels, from which it stays: what it would stay as is exact.
COARSE = 0.01


def run(
    model: ir.Model,
    keep_resolution: Annotated[bool, "Leave those whose channels would be lost under one 8-bit scale."] = False,
) -> PassReport:
    """Rewrite ``model`` in place.

    Args:
        keep_resolution: leave those whose convolution would lose channels where its weight has one 8-bit scale
            (``fold_batch_norm.noise_of_channels``: a hundredth of a channel's energy or more, on average).
    """

    def look(node: ir.Node) -> ir.Node | str:
        return why_not(node) or (keep_resolution and coarse(node)) or node

    nodes = nodes_of(model, "BatchNormalization")
    return rewrite_each(model, "batch_norm_to_conv", nodes, look, lambda node, _, names: _rewrite(node, model, names))


def why_not(node: ir.Node) -> str | None:
    """The reason why a BatchNormalization is not a convolution, or None."""
    source = node.inputs[0]
    if in_training(node):
        return "it is in training form"
    if any(not has_array(value) for value in node.inputs[1:5]):
        return "its parameters are not constants"
    if source is None or source.shape is None or len(source.shape) < 3:
        return "its input has fewer than three axes, or an unknown number"
    return not_single(source)


def coarse(node: ir.Node) -> str | None:
    """Why a depthwise weight with one 8-bit scale would have too few codes for the channels, or None."""
    noise = noise_of_channels(_affine(node)[0].reshape(-1, 1))
    if noise < COARSE:
        return None
    return (
        f"with one 8-bit scale the channels of the convolution would keep {-10 * np.log10(noise):.0f} dB; weights per "
        "channel would not suffer, and ConvertBNToConv=True converts all the same"
    )


def _affine(node: ir.Node) -> tuple[np.ndarray, np.ndarray]:
    """Factor and shift per channel, float64."""
    arrays = [np.asarray(constant_array(value), np.float64) for value in node.inputs[1:5]]
    return affine(arrays, float_attribute(node, "epsilon", 1e-5))


def _rewrite(node: ir.Node, model: ir.Model, names: Names) -> None:
    source, output = node.inputs[0], node.outputs[0]
    s, shift = _affine(node)
    spatial = [1] * (len(source.shape or ()) - 2) if source is not None else []
    dtype = np.asarray(constant_array(node.inputs[1])).dtype
    weight = add_initializer(
        model.graph, s.reshape(-1, 1, *spatial).astype(dtype), names.fresh(f"{output.name}weights")
    )
    bias = add_initializer(model.graph, shift.astype(dtype), names.fresh(f"{output.name}bias"))
    conv = ir.node("Conv", [source, weight, bias], attributes={"kernel_shape": spatial}, name=node.name)
    conv.attributes["group"] = ir.AttrInt64("group", int(s.size))
    substitute(output, [conv])
