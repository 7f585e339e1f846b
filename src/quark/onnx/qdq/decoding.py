"""The part of a model that decodes its outputs: what a deployer leaves in float (``FloatDecoding``).

    tail       nodes from which no layer with weights is reached any more, behind at least one
    decoding   connected parts of the tail that take tensors apart or join them AND compute on the pieces

A detector ends this way: offsets become boxes (Exp, Mul, Add), scores probabilities (Sigmoid, Softmax), and both are
joined. Coordinates of a whole image and scores of 0 to 1 then share one scale, and eight bits leave a box pixels wide.
There is next to nothing to compute, so float costs no time. A classifier's pooling and Softmax, a residual sum and an
activation function at the end are not decoding.

Names and models play no part. Not handled: decoding before a layer with weights (a second stage reads its boxes).
"""

from __future__ import annotations

from collections.abc import Iterator, Set

import onnx_ir as ir

from quark.graphs import connected
from quark.ir.surgery import is_constant

OPTION = "FloatDecoding"
REASON = f"{OPTION}: it decodes the outputs behind the last layer with weights"
#: Operators that make new features, with weights or, in attention, without.
LAYERS = frozenset(
    [
        "Conv",
        "ConvTranspose",
        "DeformConv",
        "Einsum",
        "GRU",
        "Gemm",
        "LSTM",
        "MatMul",
        "RNN",
        "Attention",
        "If",
        "Loop",
        "Scan",
    ]
)
#: Operators that take a tensor apart or put tensors together.
PIECES = frozenset(["Concat", "Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "Slice", "Split"])
#: Operators that compute on one tensor what a scale for all of it serves badly.
CURVES = frozenset(["Exp", "HardSigmoid", "Log", "Pow", "Sigmoid", "Softmax", "Softplus", "Sqrt", "Tanh"])
#: Operators that compute on two.
ARITHMETIC = frozenset(["Add", "Div", "Max", "Min", "Mul", "Sub"])


def decoding_nodes(model: ir.Model) -> set[ir.Node]:
    """The nodes that decode the outputs; shapes that are computed beside them are among them."""
    found: set[ir.Node] = set()
    for part in connected(tail(model), _neighbours):
        kinds = {node.op_type for node in part}
        joins = any(node.op_type in PIECES and _moves_data(node) for node in part)
        if joins and (kinds & CURVES or kinds & ARITHMETIC):
            found.update(part)
    return found


def proposals(model: ir.Model, quantized: Set[str]) -> list[str]:
    """A sentence about decoding that is going to be quantized; nothing where there is none.

    Args:
        model: that is being placed.
        quantized: names of the nodes that the configuration quantizes.
    """
    found = decoding_nodes(model)
    part = [node for node in model.graph if node in found and node.name in quantized]
    if not any(node.op_type in CURVES | ARITHMETIC | PIECES for node in part):
        return []
    kinds = ", ".join(dict.fromkeys(node.op_type for node in part))
    where = f"{part[0].name!r} to {part[-1].name!r}"
    return [f"{len(part)} nodes from {where} decode the outputs ({kinds}): {OPTION}=True keeps them in float"]


def tail(model: ir.Model) -> set[ir.Node]:
    """The nodes with a layer before them and none behind."""
    behind: set[ir.Node] = set()
    for node in model.graph:
        before = (value.producer() for value in node.inputs if value is not None)
        if any(one is not None and (is_layer(one) or one in behind) for one in before):
            behind.add(node)
    leads: set[ir.Node] = set()
    for node in reversed(list(model.graph)):
        readers = [use.node for value in node.outputs for use in value.uses()]
        if any(is_layer(reader) or reader in leads for reader in readers):
            leads.add(node)
    return {node for node in behind - leads if not is_layer(node)}


def is_layer(node: ir.Node) -> bool:
    """Whether an operator makes features; of one of another domain nobody knows."""
    return node.op_type in LAYERS or node.domain not in ("", "ai.onnx")


def _neighbours(node: ir.Node) -> Iterator[ir.Node]:
    makers = (value.producer() for value in node.inputs if value is not None)
    yield from (maker for maker in makers if maker is not None)
    yield from (use.node for value in node.outputs for use in value.uses())


def _moves_data(node: ir.Node) -> bool:
    """Whether an operator of ``PIECES`` takes apart or joins tensors that are computed, of floats."""
    values = [value for value in node.inputs if value is not None and not is_constant(value)]
    float_types = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    moved = [value for value in values if value.dtype in float_types]
    return len(moved) > 1 if node.op_type == "Concat" else bool(moved)
