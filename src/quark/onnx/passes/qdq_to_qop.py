"""Q/DQ around an operator becomes the integer operator itself (the tool convert_qdq_to_qop).

    DQ, DQ → Conv → Q  =  QLinearConv        DQ, DQ → MatMul → Q  =  QLinearMatMul
    Add, Mul, Sigmoid  =  QLinearAdd, QLinearMul, QLinearSigmoid of com.microsoft

Results may differ from those of a float run between Q and DQ by one code: the kernels round once more. A Relu behind
the operator that the codes make superfluous goes first (``fold_relu``).

Not handled: codes of other types than int8 and uint8, types together that ONNX Runtime has no kernel for, a bias whose
scale is not input scale × weight scale, results that are read in float.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import input_at, int_attribute, nodes_of, prune, sole_consumer
from quark.onnx.graph.quantized import QUANTIZE, code_type, dequantizer, parameters
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each
from quark.onnx.passes import fold_relu
from quark.onnx.passes.bias_scale import CLOSE, wanted_scale

MICROSOFT = "com.microsoft"
EIGHT_BITS = ("INT8", "UINT8")
#: Operators whose second operand may be int8 beside uint8, and have a scale per output channel; the others need codes
#: of one type and one scale each.
WEIGHTED = frozenset(["Conv", "MatMul"])


def _operand(node: ir.Node | None) -> list[ir.Value | None]:
    """(codes, scale, zero point) behind a DQ."""
    return [] if node is None else list(node.inputs[:3])


def _conv(node: ir.Node, dqs: list[ir.Node], q: ir.Node) -> list[ir.Value | None]:
    bias = [dqs[2].inputs[0]] if len(dqs) > 2 else []
    return [*_operand(dqs[0]), *_operand(dqs[1]), *q.inputs[1:3], *bias]


def _operands(node: ir.Node, dqs: list[ir.Node], q: ir.Node) -> list[ir.Value | None]:
    return [value for dq in dqs for value in _operand(dq)] + list(q.inputs[1:3])


#: operator -> (integer operator, its domain, its inputs).
KERNELS: dict[str, tuple[str, str, Callable[[ir.Node, list[ir.Node], ir.Node], list[ir.Value | None]]]] = {
    "Conv": ("QLinearConv", "", _conv),
    "MatMul": ("QLinearMatMul", "", _operands),
    "Add": ("QLinearAdd", MICROSOFT, _operands),
    "Mul": ("QLinearMul", MICROSOFT, _operands),
    "Sigmoid": ("QLinearSigmoid", MICROSOFT, _operands),
}


def run(model: ir.Model) -> PassReport:
    """Rewrite ``model`` in place."""
    folded = fold_relu.run(model).fired
    nodes = nodes_of(model, *KERNELS)
    report = rewrite_each(model, "qdq_to_qop", nodes, why_not, lambda node, found, _: _rewrite(node, *found, model))
    return replace(report, fired=report.fired + folded)


def why_not(node: ir.Node) -> tuple[list[ir.Node], ir.Node] | str | None:
    """(DQs, Q) around a node; None where it is not quantized at all, or the reason why it stays."""
    dqs = [dequantizer(value) for value in node.inputs if value is not None]
    if all(dq is None for dq in dqs):
        return None
    found = [dq for dq in dqs if dq is not None]
    reader = sole_consumer(node.outputs[0])
    if len(found) < len(dqs):
        return "an operand is not quantized"
    if reader is None or reader.op_type not in QUANTIZE:
        return "its result is not quantized for its one reader"
    if any(one.domain != "" or code_type(one) not in EIGHT_BITS for one in (*found[:2], reader)):
        return "its codes are neither int8 nor uint8"
    scales = [pair[0].size for pair in map(parameters, (*found, reader)) if pair is not None]
    if len(scales) <= len(found) or any(input_at(one, 2) is None for one in (*found, reader)):
        return "its parameters are computed, or a zero point is left out"
    if scales[0] != 1 or scales[-1] != 1:
        return "its activations have a scale per channel"
    types = [code_type(one) for one in (*found[:2], reader)]
    if types[0] != types[-1] or (types[1] != types[0] and (node.op_type not in WEIGHTED or types[0] == "INT8")):
        return f"ONNX Runtime has no kernel for codes of the types {', '.join(str(one).lower() for one in types)}"
    if len(found) > 1 and scales[1] > 1 and not _channels_fit(node, found[1]):
        return "the scales of its second operand do not run along output channels"
    if len(found) > 2 and not _bias_fits(node, found[2]):
        return "the scale of its bias is not input scale x weight scale"
    return found, reader


def _channels_fit(node: ir.Node, weight: ir.Node) -> bool:
    """Whether a kernel takes scales along this axis."""
    rank = len((weight.inputs[0].shape if weight.inputs[0] is not None else None) or ())
    axis = int_attribute(weight, "axis", 1)
    return rank > 0 and node.op_type in WEIGHTED and axis % rank == (0 if node.op_type == "Conv" else rank - 1)


def _bias_fits(node: ir.Node, bias: ir.Node) -> bool:
    wanted, own = wanted_scale(node, bias), parameters(bias)
    if wanted is None or own is None or code_type(bias) != "INT32" or own[1].any():
        return False
    return bool(np.allclose(own[0], wanted, rtol=CLOSE, atol=0))


def _rewrite(node: ir.Node, dqs: list[ir.Node], q: ir.Node, model: ir.Model) -> None:
    op_type, domain, inputs = KERNELS[node.op_type]
    old = q.outputs[0]
    new = ir.Value(name=old.name, shape=old.shape, type=old.type)
    made = ir.node(op_type, inputs(node, dqs, q), domain=domain, outputs=[new], name=node.name)
    made.attributes.update(node.attributes)
    if domain:
        model.graph.opset_imports.setdefault(domain, 1)
    if q.graph is not None:
        q.graph.insert_before(q, made)
    old.name = f"{old.name} (before)"
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    prune(q)
