"""A float16 model becomes a float32 one (ConvertFP16ToFP32).

Every float16 tensor of the file changes its type: graph inputs and outputs, initializers, Constant nodes, targets of
Cast and of operators that name a type in an attribute. Every float16 number is a float32 number, so weights keep their
values; results differ from the float16 model's only by its roundings. Bodies of If and Loop are converted with the
graph. With ``subgraphs_to_include`` only parts of it are, and Casts stand where they begin and end
(:mod:`quark.onnx.passes.float32_regions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import all_nodes, set_constant
from quark.onnx.passes.float32_regions import Part, convert_attributes, convert_parts

_HALF, _FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT


Parts = Annotated[Sequence[Part] | None, "Parts of the graph, as start:end (or [start, end]) of node names; None: all."]


def run(model: ir.Model, subgraphs_to_include: Parts = None) -> PassReport:
    """Convert ``model`` in place; ``fired`` counts tensors and nodes that changed.

    Raises:
        ConfigError: a node that is not there, or a part that is not closed.
    """
    if subgraphs_to_include:
        return convert_parts(model, subgraphs_to_include)
    fired = 0
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype == _HALF:
                set_constant(value, value.const_value.numpy().astype(np.float32))
                fired += 1
        for value in graph.inputs:
            fired += _retype(value)
    for node in all_nodes(model):
        fired += convert_attributes(node)
        for value in node.outputs:
            _retype(value)
    return PassReport("float16_to_float32", fired)


def _retype(value: ir.Value) -> int:
    if value.dtype != _HALF:
        return 0
    value.type = ir.TensorType(_FLOAT)
    return 1
