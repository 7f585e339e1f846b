"""A float16 model becomes a float32 one (ConvertFP16ToFP32).

Every float16 tensor of the file changes its type: graph inputs and outputs, initializers, Constant nodes, targets of
Cast and of operators that name a type in an attribute. Every float16 number is a float32 number, so weights keep their
values; results differ from the float16 model's only by its roundings. Bodies of If and Loop are converted with the
graph. With ``subgraphs_to_include`` only parts of it are, and Casts stand where they begin and end
(:mod:`quark.onnx.passes.float32_regions`). With ``keep_interface`` inputs and outputs of the model stay float16, with a
Cast at each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import Names, all_nodes, set_constant
from quark.onnx.passes.float32_regions import Part, convert_attributes, convert_parts

_HALF, _FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT


Parts = Annotated[Sequence[Part] | None, "Parts of the graph, as start:end (or [start, end]) of node names; None: all."]


Kept = Annotated[bool, "Inputs and outputs of the model stay float16, with a Cast at each."]


def run(model: ir.Model, subgraphs_to_include: Parts = None, keep_interface: Kept = False) -> PassReport:
    """Convert ``model`` in place; ``fired`` counts tensors and nodes that changed.

    Raises:
        ConfigError: a node that is not there, or a part that is not closed.
    """
    if subgraphs_to_include:
        return convert_parts(model, subgraphs_to_include)
    fired, half = 0, [value for value in model.graph.inputs if keep_interface and value.dtype == _HALF]
    made = [value for value in model.graph.outputs if keep_interface and value.dtype == _HALF]
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
    _interface(model, half, made)
    return PassReport("float16_to_float32", fired)


def _interface(model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> None:
    """Let these inputs and outputs be float16 again, under their names, with a Cast behind or before each."""
    graph, names = model.graph, Names(model)
    for value in outputs:
        name, given = str(value.name), value.producer() is None
        cast = ir.node("Cast", [value], {"to": int(_HALF)}, name=names.fresh(f"{name}_half"))
        graph.append(cast)
        half = cast.outputs[0]
        half.type, half.shape = ir.TensorType(_HALF), value.shape
        graph.outputs[:] = [half if one is value else one for one in graph.outputs]
        if given:
            half.name = names.fresh(f"{name}_half")
        else:
            value.name, half.name = names.fresh(f"{name}_float32"), name
    for value in inputs:
        value.type = ir.TensorType(_HALF)
        cast = ir.node("Cast", [value], {"to": int(_FLOAT)}, name=names.fresh(f"{value.name}_cast"))
        wide = cast.outputs[0]
        wide.name, wide.shape, wide.type = names.fresh(f"{value.name}_float32"), value.shape, ir.TensorType(_FLOAT)
        value.replace_all_uses_with(wide)
        cast.replace_input_with(0, value)
        graph.insert_before(graph[0], cast)


def _retype(value: ir.Value) -> int:
    if value.dtype != _HALF:
        return 0
    value.type = ir.TensorType(_FLOAT)
    return 1
