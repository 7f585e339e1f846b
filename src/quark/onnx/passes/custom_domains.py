"""The same operators under the names that other runtimes know (the tools convert_custom_ops, convert_customqdq_to_qdq).

    com.amd.quark::ExtendedQuantizeLinear → com.vai.quantize::VitisQuantizeLinear, … and back
    com.amd.quark::ExtendedQuantizeLinear → com.microsoft::QuantizeLinear           for 8- and 16-bit integers

The functions of the model follow the first change, so that it still runs anywhere.
"""

from __future__ import annotations

from typing import Annotated

import onnx_ir as ir

from quark.ir.surgery import remove_unused_functions
from quark.onnx.graph.quantized import all_nodes_in_graphs, code_type
from quark.onnx.graph.report import PassReport

AMD, VAI, MICROSOFT = "com.amd.quark", "com.vai.quantize", "com.microsoft"
VITIS_NAMES = {
    "ExtendedQuantizeLinear": "VitisQuantizeLinear",
    "ExtendedDequantizeLinear": "VitisDequantizeLinear",
    "ExtendedInstanceNormalization": "VitisInstanceNormalization",
    "ExtendedLSTM": "VitisLSTM",
    "BFPQuantizeDequantize": "BFPFixNeuron",
    "MXQuantizeDequantize": "MXFixNeuron",
}
#: Types of the codes that the operators of com.microsoft take.
CONTRIB = {
    "ExtendedQuantizeLinear": ("INT8", "UINT8", "INT16", "UINT16"),
    "ExtendedDequantizeLinear": ("INT8", "UINT8", "INT16", "UINT16", "INT32"),
}
BIAS = 2
Back = Annotated[bool, "From the older names to those of com.amd.quark."]


def rename(model: ir.Model, reverse_conversion: Back = False) -> PassReport:
    """Rename the operators of com.amd.quark, and their functions, in place."""
    source, target = (VAI, AMD) if reverse_conversion else (AMD, VAI)
    names = {new: old for old, new in VITIS_NAMES.items()} if reverse_conversion else VITIS_NAMES
    functions = [one for one in model.functions.values() if one.domain == source and one.name in names]
    nodes = [*all_nodes_in_graphs(model), *(node for function in model.functions.values() for node in function)]
    changed = [node for node in nodes if node.domain == source and node.op_type in names]
    for node in changed:
        node.domain, node.op_type = target, names[node.op_type]
    for function in functions:
        del model.functions[function.identifier()]
        function.domain, function.name = target, names[function.name]
        model.functions[function.identifier()] = function
    if changed:
        version = model.graph.opset_imports.get(source, 1)
        model.graph.opset_imports.setdefault(target, version)
        for function in model.functions.values():
            function.opset_imports.setdefault(target, version)
    return PassReport("custom_domains", len(changed))


def to_contrib(model: ir.Model) -> PassReport:
    """Let extended Q and DQ of integer codes be those of com.microsoft, in place."""
    fired, refused = 0, []
    for node in all_nodes_in_graphs(model):
        if node.domain != AMD or node.op_type not in CONTRIB:
            continue
        kind = code_type(node)
        if kind not in CONTRIB[node.op_type]:
            refused.append(f"{node.name!r} stays: {node.op_type.removeprefix('Extended')} has no codes of {kind}")
            continue
        if kind == "INT32" and any(use.idx != BIAS for use in node.outputs[0].uses()):
            refused.append(f"{node.name!r} stays: ONNX Runtime fuses int32 operands and then refuses them")
            continue
        node.op_type, node.domain, node.overload = node.op_type.removeprefix("Extended"), MICROSOFT, ""
        fired += 1
    if fired:
        model.graph.opset_imports.setdefault(MICROSOFT, 1)
        remove_unused_functions(model)
    return PassReport("custom_domains", fired, tuple(refused))
