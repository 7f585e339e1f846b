"""A quantized model becomes a float one: Q/DQ pairs go, stored weights are dequantized.

Pairs behind float weights, as training with quantizers leaves them (TensorRT's tools), go like those of activations.
Stored weights keep the values that their codes stand for. What a stored weight is, ONNX Runtime says: the node that
reads it is run on its own, so every format comes back exactly as it ran.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import (
    Names,
    add_initializer,
    has_array,
    input_name,
    nodes_of,
    prune,
    remove_unused_functions,
    tensor_alias,
)
from quark.ir.walk import all_nodes, graphs_of
from quark.onnx.graph.functions import inline_those_with
from quark.onnx.graph.quantized import DEQUANTIZE, FUSED, QUANTIZE, STORED, remove, stages, stored
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.session import open_session
from quark.onnx.passes import dynamic_to_float, remove_qdq
from quark.onnx.passes.constants import lift_constant_nodes

SUFFIXES = ("_DequantizeLinear_Output", "_QuantizeLinear_Output", "_quantized", "_codes")
DYNAMIC = frozenset(["DynamicQuantizeLinear", "ConvInteger", "MatMulInteger", "DynamicQuantizeLSTM"])
_QUANTIZED = QUANTIZE | DEQUANTIZE | FUSED | STORED | DYNAMIC


def undoes(model: ir.Model, kinds: Iterable[str]) -> bool:
    """Whether nothing quantized is left by ``run``: ``kinds`` are the quantized operators of the model."""
    return {*kinds} <= _QUANTIZED and not dynamic_to_float.left(model)


def run(model: ir.Model) -> PassReport:
    """Rewrite ``model`` in place."""
    inline_those_with(model, _QUANTIZED)
    if any(node.op_type in _QUANTIZED for node in all_nodes(model)):
        for graph in graphs_of(model):
            lift_constant_nodes(graph)
    report = remove_qdq.run(model)
    left = [remove(stage) for stage in stages(model, constant=True)]
    fired, refused = dynamic_to_float.run(model)
    fired, names = fired + report.fired + left.count(None), None
    for node in [*stored(model), *_casts(model)]:
        names = names or Names(model)
        _dequantize(node, model, names)
        fired += 1
    remove_unused_functions(model)
    return PassReport("quant_to_float", fired, (*report.refused, *filter(None, left), *refused))


def _casts(model: ir.Model) -> list[ir.Node]:
    """Casts of stored 8- and 16-bit floats, and the products with their scales."""
    casts = [node for node in nodes_of(model, "Cast") if _narrow(node.inputs[0])]
    products = []
    for cast in casts:
        readers = [use.node for use in cast.outputs[0].uses()]
        products += [one for one in readers if one.op_type == "Mul" and has_array(one.inputs[1])]
    return [*casts, *products]


def _narrow(value: ir.Value | None) -> bool:
    if value is None or value.dtype is None or not has_array(value):
        return False
    return value.dtype.is_floating_point() and value.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def _dequantize(node: ir.Node, model: ir.Model, names: Names) -> None:
    output = node.outputs[0]
    source = input_name(node, 0) or str(output.name)
    base = next((source.removesuffix(end) for end in SUFFIXES if source.endswith(end)), f"{source}_float")
    value = add_initializer(model.graph, np.ascontiguousarray(run_alone(node, model)), names.fresh(base))
    output.replace_all_uses_with(value, replace_graph_outputs=True)
    prune(node)


def run_alone(node: ir.Node, model: ir.Model) -> np.ndarray:
    """What a node with constant operands gives."""
    inputs: list[ir.Value | None] = []
    held: dict[str, ir.Value] = {}
    for value in node.inputs:
        if value is None or value.const_value is None:
            inputs.append(None)
            continue
        name = str(value.name)
        held[name] = held.get(name) or ir.Value(
            name=name, type=value.type, shape=value.shape, const_value=tensor_alias(value.const_value, name)
        )
        inputs.append(held[name])
    copy = ir.node(node.op_type, inputs, domain=node.domain, overload=node.overload, attributes=None)
    copy.attributes.update(node.attributes)
    copy.outputs[0].name, copy.outputs[0].type = "alone", ir.TensorType(node.outputs[0].dtype or ir.DataType.FLOAT)
    graph = ir.Graph([], copy.outputs, nodes=[copy], initializers=list(held.values()), name="alone")
    graph.opset_imports.update(model.graph.opset_imports)
    functions = [one for one in model.functions.values() if one.domain == node.domain]
    small = ir.Model(graph, ir_version=model.ir_version, functions=functions)
    return open_session(small).run(None, {})[0]
