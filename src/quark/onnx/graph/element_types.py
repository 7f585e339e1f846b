"""Element types in a graph, changed: of values, in attributes, and by a Cast."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir


def retype(value: ir.Value, old: Collection[ir.DataType], new: ir.DataType) -> int:
    """Let a value of one of the old types have the new one; whether it was one."""
    if value.dtype not in old:
        return 0
    value.type = ir.TensorType(new)
    return 1


def convert_attributes(node: ir.Node, old: Collection[ir.DataType], new: ir.DataType, naming: tuple[str, ...]) -> int:
    """Let the attributes of a node name the new type, and hold it, where they have an old one; whether any did.

    Args:
        naming: attributes that name an element type.
    """
    changed = 0
    for name, attribute in list(node.attributes.items()):
        if attribute.is_ref():
            continue
        if name in naming and attribute.type == ir.AttributeType.INT and attribute.value in old:
            node.attributes[name] = ir.AttrInt64(name, int(new))
            changed = 1
        elif attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in old:
            array = attribute.value.numpy().astype(new.numpy())
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(array, dtype=new))
            changed = 1
    return changed


def cast(source: ir.Value, dtype: ir.DataType, name: str, node_name: str) -> ir.Node:
    """A Cast of ``source``, in no graph yet; its result is called ``name``."""
    node = ir.node("Cast", [source], {"to": int(dtype)}, name=node_name)
    made = node.outputs[0]
    made.name, made.type, made.shape = name, ir.TensorType(dtype), source.shape
    return node
