"""The scale of a quantized bias becomes input scale × weight scale (onnx_adjust_bias_scale).

    q' = round(q · s / (s_x · s_w)),   s' = s_x · s_w

Integer kernels add the codes of the bias to the sum of products as they are, whatever its scale says; so a bias with
another scale is a wrong number in every runtime that fuses. Models that this package writes have the right scale.

Not handled: a bias that would not fit 32 bits at that scale (the report says so), biases without codes.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import constant_array, input_at, label, nodes_of
from quark.onnx.graph.quantized import Rewriter, code_type, dequantizer, parameters
from quark.onnx.graph.report import PassReport

BIASED = ("Conv", "ConvTranspose", "Gemm")
Widen = Annotated[bool, "Biases of 8 and 16 bits become int32 as well."]
CLOSE = 1e-6
INT32_MAX = 2**31 - 1


def run(model: ir.Model, widen: Widen = False) -> PassReport:
    """Adjust every bias, in place."""
    fired, refused, rewriter = 0, [], None
    for node in nodes_of(model, *BIASED):
        bias = dequantizer(input_at(node, 2))
        wanted = None if bias is None else wanted_scale(node, bias)
        if bias is None or wanted is None:
            continue
        found = _requantized(bias, wanted, widen)
        if isinstance(found, str):
            refused.append(f"the bias of {label(node)} stays: {found}")
        elif found is not None:
            rewriter = rewriter or Rewriter(model)
            rewriter.set_constant(_alone(bias, node, rewriter), found, wanted, ir.DataType.INT32)
            fired += 1
    return PassReport("bias_scale", fired, tuple(refused))


def wanted_scale(node: ir.Node, bias: ir.Node) -> np.ndarray | None:
    """Input scale × weight scale, None where one of them is not known."""
    found = [None if maker is None else parameters(maker) for maker in map(dequantizer, node.inputs[:2])]
    codes = constant_array(bias.inputs[0])
    if found[0] is None or found[1] is None or codes is None or found[0][0].size != 1:
        return None
    scale = found[0][0].reshape(()) * found[1][0].reshape(-1)
    if scale.size not in (1, codes.size):
        if codes.size % scale.size:
            return None
        scale = np.tile(scale, codes.size // scale.size)  # a grouped ConvTranspose
    return scale.reshape(()) if scale.size == 1 else scale


def _requantized(bias: ir.Node, wanted: np.ndarray, widen: bool) -> np.ndarray | str | None:
    """The new codes; None where nothing has to change, a reason where nothing can."""
    found, codes, kind = parameters(bias), constant_array(bias.inputs[0]), code_type(bias)
    if found is None or codes is None:
        return "its parameters are computed"
    if kind != "INT32" and not widen:
        return None
    values = (codes.astype(np.float64) - found[1]) * found[0]
    if kind == "INT32" and np.allclose(found[0], wanted, rtol=CLOSE, atol=0):
        return None
    moved = np.rint(values / wanted)
    return "it would not fit 32 bits" if np.abs(moved).max(initial=0) > INT32_MAX else moved


def _alone(bias: ir.Node, node: ir.Node, rewriter: Rewriter) -> ir.Node:
    """The DQ of the bias for this node only: a copy where others read it too."""
    if len(bias.outputs[0].uses()) == 1:
        return bias
    copy = ir.node(bias.op_type, list(bias.inputs), domain=bias.domain, overload=bias.overload)
    copy.attributes.update(bias.attributes)
    copy.name = f"{bias.name}_{node.name}"
    copy.outputs[0].name = rewriter.names.fresh(f"{bias.outputs[0].name}_{node.name}")
    copy.outputs[0].type, copy.outputs[0].shape = bias.outputs[0].type, bias.outputs[0].shape
    if bias.graph is not None:
        bias.graph.insert_after(bias, copy)
    node.replace_input_with(2, copy.outputs[0])
    return copy
