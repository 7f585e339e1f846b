"""A float16 or bfloat16 model becomes a float32 one (ConvertFP16ToFP32).

Every tensor of these types changes its type: graph inputs and outputs, initializers, Constant nodes, targets of
Cast and of operators that name a type in an attribute. Every such number is a float32 number, so weights keep their
values; results differ from the model's own only by its roundings. Bodies of If and Loop are converted with the
graph. With ``subgraphs_to_include`` only parts of it are, and Casts stand where they begin and end
(:mod:`quark.onnx.passes.float32_regions`). With ``keep_interface`` inputs and outputs of the model stay what they are,
with a Cast at each.

A float32 model that is rounded to bfloat16 (a Cast there and one back) computes in float32 already and stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import Names, set_constant
from quark.ir.walk import all_nodes, graphs_of
from quark.onnx.graph.element_types import cast, convert_attributes, retype
from quark.onnx.graph.halves import bfloat16_node
from quark.onnx.graph.report import PassReport
from quark.onnx.passes.float32_regions import TYPE_ATTRIBUTES, Part, convert_parts

_FLOAT = ir.DataType.FLOAT


Parts = Annotated[Sequence[Part] | None, "Parts of the graph, as start:end (or [start, end]) of node names; None: all."]


Kept = Annotated[bool, "Inputs and outputs of the model stay what they are, with a Cast at each."]


def run(model: ir.Model, subgraphs_to_include: Parts = None, keep_interface: Kept = False) -> PassReport:
    """Convert ``model`` in place; ``fired`` counts tensors and nodes that changed.

    Raises:
        ConfigError: a node that is not there, or a part that is not closed.
    """
    if subgraphs_to_include:
        return convert_parts(model, subgraphs_to_include)
    fired, kinds = 0, [ir.DataType.FLOAT16, *([ir.DataType.BFLOAT16] if bfloat16_node(model) is not None else [])]
    given = {value: value.dtype for value in model.graph.inputs if keep_interface and value.dtype in kinds}
    made = {value: value.dtype for value in model.graph.outputs if keep_interface and value.dtype in kinds}
    for graph in graphs_of(model):
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype in kinds:
                set_constant(value, value.const_value.numpy().astype(np.float32))
                fired += 1
        for value in graph.inputs:
            fired += retype(value, kinds, _FLOAT)
    for node in all_nodes(model):
        fired += convert_attributes(node, kinds, _FLOAT, TYPE_ATTRIBUTES)
        for value in node.outputs:
            retype(value, kinds, _FLOAT)
    _interface(model, given, made)
    return PassReport("float16_to_float32", fired)


Kinds = Mapping[ir.Value, ir.DataType]


def _interface(model: ir.Model, inputs: Kinds, outputs: Kinds) -> None:
    """Let these inputs and outputs have their types again, under their names, with a Cast behind or before each."""
    graph, names = model.graph, Names(model)
    for value, kind in outputs.items():
        name, given = str(value.name), value.producer() is None
        node = cast(value, kind, name, names.fresh(f"{name}_half"))
        graph.append(node)
        half = node.outputs[0]
        graph.outputs[:] = [half if one is value else one for one in graph.outputs]
        if given:
            half.name = names.fresh(f"{name}_half")
        else:
            value.name = names.fresh(f"{name}_float32")
    for value, kind in inputs.items():
        value.type = ir.TensorType(kind)
        node = cast(value, _FLOAT, names.fresh(f"{value.name}_float32"), names.fresh(f"{value.name}_cast"))
        value.replace_all_uses_with(node.outputs[0])
        node.replace_input_with(0, value)
        graph.insert_before(graph[0], node)
