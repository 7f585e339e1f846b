"""A float16 model becomes a float32 one (ConvertFP16ToFP32).

Every float16 tensor of the file changes its type: graph inputs and outputs, initializers, Constant nodes, targets of
Cast and of operators that name a type in an attribute. Every float16 number is a float32 number, so weights keep their
values; results differ from the float16 model's only by its roundings. Subgraphs are converted with the graph.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import all_nodes, set_constant

_HALF, _FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
#: Attributes that name an element type.
_TYPE_ATTRIBUTES = ("to", "dtype", "stash_type", "output_dtype")


def run(model: ir.Model) -> PassReport:
    """Convert ``model`` in place; ``fired`` counts tensors and nodes that changed."""
    fired = 0
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype == _HALF:
                set_constant(value, value.const_value.numpy().astype(np.float32))
                fired += 1
        for value in graph.inputs:
            fired += _retype(value)
    for node in all_nodes(model):
        fired += _convert_attributes(node)
        for value in node.outputs:
            _retype(value)
    return PassReport("float16_to_float32", fired)


def _retype(value: ir.Value) -> int:
    if value.dtype != _HALF:
        return 0
    value.type = ir.TensorType(_FLOAT)
    return 1


def _convert_attributes(node: ir.Node) -> int:
    changed = 0
    for name, attribute in list(node.attributes.items()):
        if attribute.is_ref():
            continue
        if name in _TYPE_ATTRIBUTES and attribute.type == ir.AttributeType.INT and attribute.value == _HALF:
            node.attributes[name] = ir.AttrInt64(name, int(_FLOAT))
            changed = 1
        elif attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype == _HALF:
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.value.numpy().astype(np.float32)))
            changed = 1
    return changed
