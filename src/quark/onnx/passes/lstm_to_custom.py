"""A quantized LSTM as the device's own operator (the tool convert_lstm_to_customlstm).

    DQ(x), DQ(W), DQ(R), DQ(B) → LSTM → Q      becomes      the same around com.amd.quark::ExtendedLSTM

whose attributes repeat every scale and zero point. The Q/DQ nodes stay, so the values stay. The operator has the output
Y only, one scale per tensor, the default activations, and neither lengths, initial states nor peepholes; a node that
needs more stays, with the reason.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.ir.surgery import attribute, int_attribute, opset, substitute
from quark.onnx.graph.quantized import QUANTIZE, all_nodes_in_graphs, dequantizer, parameters
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each
from quark.operators.functions import OVERLOADS_FROM_IR
from quark.operators.registry import DOMAIN, VERSION, function_for

OPERATOR = "ExtendedLSTM"
INPUTS = (("x", "X"), ("w", "W"), ("r", "R"), ("b", "B"))
KEPT = ("direction", "hidden_size", "layout")
Grids = dict[str, tuple[float, int]]


def run(model: ir.Model) -> PassReport:
    """Convert every quantized LSTM that the operator can stand for, in place."""
    nodes = [node for node in all_nodes_in_graphs(model) if node.op_type == "LSTM" and node.domain in ("", "ai.onnx")]
    report = rewrite_each(
        model, "convert_lstm_to_customlstm", nodes, _grids, lambda node, grids, _: _convert(model, node, grids)
    )
    if report.fired:
        model.graph.opset_imports.setdefault(DOMAIN, VERSION)
        model.ir_version = max(model.ir_version or 0, OVERLOADS_FROM_IR)
    return report


def _grids(node: ir.Node) -> Grids | str:
    """Tensor of the operator -> (scale, zero point), or the reason why it cannot stand for the node."""
    unknown = [name for name in node.attributes if name not in KEPT]
    if unknown:
        return f"the operator has no attribute {unknown[0]!r}"
    if any(value is not None for value in node.inputs[len(INPUTS) :]):
        return "the operator has neither sequence lengths nor initial states nor peepholes"
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return "the operator has the output Y only, and Y_h or Y_c is used"
    grids: Grids = {}
    for position, (name, shown) in enumerate(INPUTS):
        value = node.inputs[position] if position < len(node.inputs) else None
        found = _grid(dequantizer(value))
        if isinstance(found, str):
            return f"its input {shown} {found}"
        grids[name] = found
    readers = [use.node for use in node.outputs[0].uses()]
    found = _grid(next((one for one in readers if one.op_type in QUANTIZE), None))
    if isinstance(found, str):
        return f"its output Y {found}"
    return {**grids, "y": found}


def _grid(node: ir.Node | None) -> tuple[float, int] | str:
    """Scale and zero point of a Q or DQ, or why there are none to state."""
    found = None if node is None else parameters(node)
    if found is None:
        return "is not quantized"
    scale, zero_point = found
    if scale.size != 1 or zero_point.size != 1:
        return "has a scale per channel, and the operator has one scale per tensor"
    return float(scale.reshape(())), int(zero_point.reshape(()))


def _convert(model: ir.Model, node: ir.Node, grids: Grids) -> None:
    """Put the operator in the place of a node, and the function that runs it into the model."""
    values: dict[str, str | int | float] = {
        "direction": str(attribute(node, "direction", "forward")),
        "hidden_size": int_attribute(node, "hidden_size", 1),
        "layout": int_attribute(node, "layout", 0),
    }
    for name, (scale, zero_point) in grids.items():
        values |= {f"{name}_scale": scale, f"{name}_zero_point": zero_point}
    function = ir.serde.deserialize_function(function_for(OPERATOR, values, opset(model)))
    inputs = list(node.inputs[: len(INPUTS)])
    new = ir.node(OPERATOR, inputs, values, domain=DOMAIN, overload=function.overload, name=node.name)
    substitute(node.outputs[0], [new])
    model.functions[function.identifier()] = function
