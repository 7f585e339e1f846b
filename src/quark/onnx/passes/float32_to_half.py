"""A float32 model computes in float16 or bfloat16 (the tools convert_fp32_to_fp16, convert_fp32_to_bf16).

Every float32 tensor changes its type: weights, Constant nodes, targets of Cast. Inputs and outputs of the model stay
float32 behind a Cast where ``keep_io_types`` says so. Weights beyond the largest finite number become that number.
Operands that an operator takes in float32 only (the scales of Resize, the scores of NonMaxSuppression) stay float32.

ONNX Runtime's CPU provider has no kernels of bfloat16: such a model is for other runtimes.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import onnx
import onnx_ir as ir

from quark.errors import check_name
from quark.ir.surgery import Names, add_initializer, is_constant, label, name_of, opset, set_constant
from quark.ir.walk import all_nodes, graphs_of
from quark.onnx.graph.element_types import cast, convert_attributes, retype
from quark.onnx.graph.quantized import DEQUANTIZE, FUSED, QUANTIZE, STORED
from quark.onnx.graph.report import PassReport

FLOAT = ir.DataType.FLOAT
LARGEST = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: 255 * 2.0**120}
TYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_TYPE_ATTRIBUTES = ("to", "dtype")
To = Annotated[str, "float16 or bfloat16."]
Keep = Annotated[bool, "Inputs and outputs of the model stay float32."]


def run(model: ir.Model, to: To = "float16", keep_io_types: Keep = False) -> PassReport:
    """Convert ``model`` in place.

    Raises:
        ConfigError: another type than float16 and bfloat16.
    """
    check_name("type", to, TYPES)
    found = [node for node in all_nodes(model) if node.op_type in QUANTIZE | DEQUANTIZE | FUSED | STORED]
    if found:
        return PassReport("float32_to_half", refused=(f"the model is quantized already, at {label(found[0])}",))
    kind, names = TYPES[to], Names(model)
    fired = _keep_ends(model, kind, names) if keep_io_types else 0
    held = _float_operands(model, names)
    for graph in graphs_of(model):
        for value in list(graph.initializers.values()):
            if value not in held and value.const_value is not None and value.dtype == FLOAT:
                _narrow(value, kind)
                fired += 1
        for value in graph.inputs:
            if not (keep_io_types and graph is model.graph):
                fired += retype(value, [FLOAT], kind)
    ends = set(model.graph.outputs) if keep_io_types else set()
    for node in all_nodes(model):
        boundary = keep_io_types and name_of(node).endswith(_MARKS)
        if not boundary:
            convert_attributes(node, [FLOAT], kind, _TYPE_ATTRIBUTES)
        for value in node.outputs:
            if value not in ends and value not in held:
                retype(value, [FLOAT], kind)
    return PassReport("float32_to_half", fired)


_MARKS = ("_to_half", "_to_float")


def _narrow(value: ir.Value, kind: ir.DataType) -> None:
    if value.const_value is None:
        return
    array = value.const_value.numpy()
    finite = np.where(np.isfinite(array), np.clip(array, -LARGEST[kind], LARGEST[kind]), array)
    set_constant(value, finite.astype(kind.numpy()))
    value.const_value = ir.tensor(finite.astype(kind.numpy()), dtype=kind, name=value.name)
    value.type = ir.TensorType(kind)


def _keep_ends(model: ir.Model, kind: ir.DataType, names: Names) -> int:
    """Casts behind the float32 inputs and before the float32 outputs; their own values stay float32."""
    graph, fired = model.graph, 0
    for value in [one for one in graph.inputs if one.dtype == FLOAT and not one.is_initializer() and one.uses()]:
        node = cast(value, kind, names.fresh(f"{value.name}_to_half"), f"{value.name}_to_half")
        value.replace_all_uses_with(node.outputs[0])
        node.replace_input_with(0, value)
        graph.insert_before(graph[0], node)
        fired += 1
    for position, value in enumerate(graph.outputs):
        if value.dtype != FLOAT or value.producer() is None:
            continue
        name = value.name
        value.name = names.fresh(f"{name}_half")
        node = cast(value, FLOAT, str(name), f"{name}_to_float")
        graph.append(node)
        graph.outputs[position] = node.outputs[0]
        fired += 1
    return fired


def _float_operands(model: ir.Model, names: Names) -> set[ir.Value]:
    """Values that stay float32 because an operator takes nothing else; what others read too is copied or cast."""
    held: set[ir.Value] = set()
    for node in list(all_nodes(model)):
        for position in _float_only(node, opset(model)):
            value = node.inputs[position]
            if value is None or value.dtype != FLOAT or node.graph is None:
                continue
            if all(use.idx in _float_only(use.node, opset(model)) for use in value.uses()) and is_constant(value):
                held.add(value)
            elif is_constant(value) and value.const_value is not None:
                copy = add_initializer(model.graph, value.const_value.numpy(), names.fresh(f"{value.name}_float32"))
                node.replace_input_with(position, copy)
                held.add(copy)
            elif isinstance(node.graph, ir.Graph):
                name = f"{value.name}{_MARKS[1]}"
                made = cast(value, FLOAT, names.fresh(name), name)
                node.graph.insert_before(node, made)
                node.replace_input_with(position, made.outputs[0])
                held.add(made.outputs[0])
    return held


def _float_only(node: ir.Node, version: int) -> list[int]:
    """Positions of the inputs that take float32 only."""
    if node.domain != "":
        return []
    try:
        schema = onnx.defs.get_schema(node.op_type, version, "")
    except onnx.defs.SchemaError:
        return []
    return [k for k, one in enumerate(schema.inputs[: len(node.inputs)]) if one.type_str == "tensor(float)"]
