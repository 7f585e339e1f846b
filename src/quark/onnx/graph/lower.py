"""Give a model an older opset (ConvertOpsetVersion), where its nodes are valid there and mean the same.

Attributes that the older form lacks are taken out where they have their default values. Where an operator takes other
inputs or types, or computes something else, nothing is changed: nodes are not rewritten into old forms.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir

from quark.errors import ModelError
from quark.ir.surgery import label, opset
from quark.ir.walk import nodes_within
from quark.onnx.graph.adapters import ADAPTERS
from quark.onnx.graph.lift import misfit, schema_of
from quark.onnx.graph.shapes import infer_shapes

#: Operators that compute something else in an older opset with the same inputs and attributes. (The other changes of
#: ``ADAPTERS`` are changes of form, which the schemas show.)
MEANING = (
    "DFT",
    "Dropout",
    "GridSample",
    "GroupNormalization",
    "Hardmax",
    "LogSoftmax",
    "Resize",
    "RoiAlign",
    "Softmax",
)


def lower(model: ir.Model, version: int) -> None:
    """Set the default opset of a model and of its functions to ``version``, in place; a lower one stays.

    Raises:
        ModelError: a node that needs a newer one; the message names the first and says why.
    """
    before = opset(model)
    if before <= version:
        return
    infer_shapes(model)
    idle: list[tuple[ir.Node, str]] = []
    for node, at in _nodes(model):
        unknown = _idle_attributes(node, at, version)
        reason = _why_not(node, at, version, unknown)
        if reason is not None:
            raise ModelError(
                f"the model cannot be lowered from opset {before} to {version}: node {label(node)}: {reason}. Leave "
                "ConvertOpsetVersion out, or export the model in that opset"
            )
        idle += [(node, name) for name in unknown]
    for node, name in idle:
        del node.attributes[name]
    for imports in (model.graph.opset_imports, *(function.opset_imports for function in model.functions.values())):
        if imports.get("", 0) > version:
            imports[""] = version


def _nodes(model: ir.Model) -> Iterator[tuple[ir.Node, int]]:
    """Every node of the default domain, with the opset it is written in."""
    bodies: list[tuple[ir.Graph | ir.Function, int]] = [(model.graph, opset(model))]
    bodies += [(one, one.opset_imports[""]) for one in model.functions.values() if "" in one.opset_imports]
    for body, at in bodies:
        for node in nodes_within(body):
            if node.domain == "":
                yield node, at


def _idle_attributes(node: ir.Node, at: int, version: int) -> list[str]:
    """Attributes that the older form does not have and that say what holds without them."""
    new, old = schema_of(node.op_type, at), schema_of(node.op_type, version)
    if new is None or old is None:
        return []
    return [
        name
        for name, given in node.attributes.items()
        if name not in old.attributes and not given.is_ref() and _is_default(given, new)
    ]


def _is_default(given: ir.Attr, schema: onnx.defs.OpSchema) -> bool:
    if given.name not in schema.attributes:
        return False
    default = schema.attributes[given.name].default_value
    if default.type == onnx.AttributeProto.UNDEFINED:
        return False
    value = onnx.helper.get_attribute_value(default)
    return bool((value.decode() if isinstance(value, bytes) else value) == given.value)


def _why_not(node: ir.Node, at: int, version: int, idle: list[str]) -> str | None:
    changed = [since for since, _ in ADAPTERS.get(node.op_type, ()) if version < since <= at]
    if changed and node.op_type in MEANING:
        return f"{node.op_type} computes something else before opset {changed[0]}"
    schema = schema_of(node.op_type, version)
    return misfit(node, version, at, idle) or (_wrong_type(node, schema) if schema else None)


def _wrong_type(node: ir.Node, schema: onnx.defs.OpSchema) -> str | None:
    """Why an input has no type that the older operator takes."""
    for position, value in enumerate(node.inputs):
        if value is None or value.dtype is None or not schema.inputs or not isinstance(value.type, ir.TensorType):
            continue
        taken = schema.inputs[min(position, len(schema.inputs) - 1)].types
        kind = f"tensor({onnx.TensorProto.DataType.Name(int(value.dtype)).lower()})"
        if kind not in taken:
            return f"{node.op_type} takes no {kind} in opset {schema.since_version}"
    return None
