"""Fold a BatchNormalization after a Concat of convolutions into each of them (FoldBatchNorm).

    BN(concat(y₁, y₂, …)) = concat(y₁ · s[c₁] + shift[c₁], y₂ · s[c₂] + shift[c₂], …)

where c_k are the channels that branch k contributes. Every branch may be a Conv, ConvTranspose (grouped or not) or Gemm
of its own kind; weights that others read are copied.

Not handled: a Concat along another axis than the channels, a branch that is something else or that others read too.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import (
    Names,
    constant_shape,
    drop_if_unused,
    ends_body,
    int_attribute,
    nodes_of,
    sole_consumer,
    take_over,
)
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each
from quark.onnx.passes.fold_batch_norm import in_training, parameters_of, scale_outputs, target_reason


def run(model: ir.Model) -> PassReport:
    """Fold every BatchNormalization that follows a Concat, in place."""

    def look(norm: ir.Node) -> tuple[ir.Node, np.ndarray, np.ndarray] | str | None:
        concat = norm.inputs[0].producer() if norm.inputs[0] is not None else None
        if concat is None or concat.op_type != "Concat":
            return None
        found = why_not(norm, concat)
        return found if isinstance(found, str) else (concat, *found)

    norms = nodes_of(model, "BatchNormalization")
    return rewrite_each(
        model,
        "fold_batch_norm_after_concat",
        norms,
        look,
        lambda norm, found, names: _fold(norm, *found, model.graph, names),
    )


def why_not(norm: ir.Node, concat: ir.Node) -> tuple[np.ndarray, np.ndarray] | str:
    """(s, shift) of the BatchNormalization, or the reason why it stays."""
    joined, rank = concat.outputs[0], len(concat.outputs[0].shape or ())
    axis = int_attribute(concat, "axis", 0)
    if axis != 1 and (not rank or axis % rank != 1):
        return "the Concat before it does not join channels"
    if in_training(norm) or sole_consumer(joined) is not norm:
        return "it is in training form, or the result of the Concat is read by others too"
    if ends_body(norm, concat):
        return "it makes an output of a body"
    if len(set(concat.inputs)) < len(concat.inputs):
        return "a branch is joined twice"
    for value in concat.inputs:
        reason = target_reason(value, concat)
        if reason is not None:
            return f"branch {value.name if value is not None else ''!r}: {reason}"
    found = parameters_of(norm)
    if not isinstance(found, str) and sum(_channels(value) for value in concat.inputs) != found[0].size:
        return "its branches do not have its number of channels"
    return found


def _channels(value: ir.Value | None) -> int:
    """Output channels of a Conv, ConvTranspose or Gemm, from its weight."""
    node = value.producer() if value is not None else None
    weight = None if node is None else constant_shape(node.inputs[1])
    if node is None or weight is None:
        return 0
    if node.op_type == "ConvTranspose":
        return weight[1] * int_attribute(node, "group", 1)
    return weight[1] if node.op_type == "Gemm" and not int_attribute(node, "transB", 0) else weight[0]


def _fold(norm: ir.Node, concat: ir.Node, s: np.ndarray, shift: np.ndarray, graph: ir.Graph, names: Names) -> None:
    start = 0
    for value in concat.inputs:
        node, end = value.producer() if value is not None else None, start + _channels(value)
        if node is not None:
            scale_outputs(node, s[start:end], shift[start:end], graph, names)
        start = end
    parameters = norm.inputs[1:5]
    take_over(concat.outputs[0], norm.outputs[0])
    for value in parameters:
        drop_if_unused(value)
