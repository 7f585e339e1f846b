"""Set attributes of named nodes: the last word on what an exporter wrote.

    [{"node_name": "Conv_3", "attributes": {"pads": [1, 1, 1, 1]}}]

A value has the type that the operator's schema gives the attribute; an attribute that the operator does not have is an
error. Nodes of other domains take integers, floats, text and lists of them as they come.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import onnx
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.errors import ModelError, check_name
from quark.ir.surgery import opset
from quark.ir.walk import nodes_within
from quark.onnx.graph.report import PassReport


@dataclass(frozen=True)
class Update:
    """What changes at one node."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    node_name: str
    attributes: dict[str, Any]


Updates = Annotated[list[Update], "For each node `node_name` and its new `attributes`."]


def run(model: ir.Model, node_attribute_updates: Updates) -> PassReport:
    """Set the attributes, in place; ``fired`` counts those that changed.

    Raises:
        ModelError: there is no such node, or its operator has no such attribute.
    """
    nodes = {str(node.name): node for node in nodes_within(model.graph)}
    fired = 0
    for update in node_attribute_updates:
        check_name("node", update.node_name, nodes, ModelError)
        node = nodes[update.node_name]
        for name, value in update.attributes.items():
            fired += _set(node, name, value, opset(model))
    return PassReport("node_attributes", fired)


def _set(node: ir.Node, name: str, value: Any, version: int) -> int:
    made = _attribute(node, name, value, version)
    old = node.attributes.get(name)
    if old is not None and list(_listed(old.value)) == list(_listed(made.value)):
        return 0
    node.attributes[name] = made
    return 1


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _attribute(node: ir.Node, name: str, value: Any, version: int) -> ir.Attr:
    if node.domain != "":
        return ir.convenience.convert_attribute(name, value)
    known = onnx.defs.get_schema(node.op_type, version, "").attributes
    check_name(f"attribute of {node.op_type} {node.name!r}:", name, known, ModelError)
    kind = ir.AttributeType[str(known[name].type).rsplit(".", 1)[-1]]
    try:
        return ir.convenience.convert_attribute(name, value, kind)
    except (TypeError, ValueError) as error:
        raise ModelError(f"the attribute {name!r} of {node.name!r} cannot be {value!r}: {error}") from error
