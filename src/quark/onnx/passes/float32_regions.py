"""Parts of a float16 model in float32, with Casts at their edges.

    x (float16) → A → B → y (float16)     becomes     x → Cast → A → B → Cast → y       for the part from A to B

A part is what lies between its start and its end, both included; every way back from the end has to come to the start.
Constants that its nodes read are converted for them; other nodes keep theirs. Bodies of If and Loop inside a part are
not handled: such a node is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from quark.config.rules import Rule, Rules, Subgraph
from quark.config.tensor import LayerSpec
from quark.errors import ConfigError
from quark.ir.surgery import Names, add_initializer, constant_array, drop_if_unused, label, name_nodes, name_of
from quark.ir.walk import bodies
from quark.onnx.graph.element_types import cast, convert_attributes
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import insert_behind
from quark.onnx.qdq.selection import known_nodes

_HALF, _FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
#: Attributes that name an element type.
TYPE_ATTRIBUTES = ("to", "dtype", "stash_type", "output_dtype")
#: "start:end", or the two names.
Part = str | tuple[str, str]


def convert_parts(model: ir.Model, parts: Sequence[Part]) -> PassReport:
    """Convert the parts in place; ``fired`` counts their nodes."""
    name_nodes(model)
    inside = _nodes_of(model, parts)
    names, wide = Names(model), dict[ir.Value, ir.Value]()
    for node in inside:
        for position, value in enumerate(node.inputs):
            if value is not None and value.dtype == _HALF and value.producer() not in inside:
                node.replace_input_with(position, _widened(model, value, node, wide, names))
                drop_if_unused(value)
    for node in inside:
        convert_attributes(node, [_HALF], _FLOAT, TYPE_ATTRIBUTES)
        for value in [value for value in node.outputs if value.dtype == _HALF]:
            _narrowed(value, node, inside, names)
    return PassReport("float32_regions", len(inside))


def _nodes_of(model: ir.Model, parts: Sequence[Part]) -> dict[ir.Node, None]:
    """The nodes of the parts, in order."""
    selectors = []
    for part in parts:
        ends = tuple(one.strip() for one in part.split(":")) if isinstance(part, str) else tuple(part)
        if len(ends) != 2:
            raise ConfigError(f"subgraphs_to_include: {part!r} is not of the form start:end")
        selectors.append(Subgraph((ends[0],), (ends[1],)))
    decided = Rules(LayerSpec(), (Rule(tuple(selectors), None, "subgraphs_to_include"),)).bind(known_nodes(model))
    found = {node: None for node in model.graph if decided[name_of(node)].layer is None}
    for node in found:
        if bodies(node):
            raise ConfigError(f"subgraphs_to_include: {label(node)} has a body, which stays float16: leave it out")
    return found


def _widened(model: ir.Model, value: ir.Value, node: ir.Node, wide: dict[ir.Value, ir.Value], names: Names) -> ir.Value:
    """A tensor in float32 for the nodes inside: a constant of its own, or a Cast, made once."""
    if value not in wide:
        array = constant_array(value)
        if array is not None:
            name = names.fresh(f"{value.name}_float32")
            wide[value] = add_initializer(model.graph, array.astype(np.float32), name)
        else:
            wide[value] = _cast(value, node, _FLOAT, f"{value.name}_float32", names)
    return wide[value]


def _narrowed(value: ir.Value, node: ir.Node, inside: dict[ir.Node, None], names: Names) -> None:
    """The result of a node inside in float32, and in float16, under its own name, for whoever reads it outside."""
    value.type = ir.TensorType(_FLOAT)
    outside = [use for use in value.uses() if use.node not in inside]
    if not outside and not value.is_graph_output():
        return
    name = str(value.name)
    narrow = _cast(value, node, _HALF, f"{name}_float16", names)
    for use in outside:
        use.node.replace_input_with(use.idx, narrow)
    if value.is_graph_output():
        outputs = value.graph.outputs if value.graph is not None else []
        outputs[:] = [narrow if one is value else one for one in outputs]
        value.name, narrow.name = names.fresh(f"{name}_float32"), name


def _cast(value: ir.Value, beside: ir.Node, dtype: ir.DataType, name: str, names: Names) -> ir.Value:
    """A Cast of a tensor: behind the node that makes it, or before the one that reads a graph input."""
    fresh = names.fresh(name)
    made = cast(value, dtype, fresh, f"{fresh}_Cast")
    if not isinstance(beside.graph, ir.Graph):
        raise ValueError(f"{label(beside)} is in no graph")
    insert_behind(beside.graph, value, made)
    return made.outputs[0]
