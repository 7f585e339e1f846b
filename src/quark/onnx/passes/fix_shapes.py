"""Give the model's inputs and outputs fixed shapes, and let every other shape follow (FixShapes).

The shapes come as ``{"x": [1, 3, 224, 224]}``, or in text: ``x:[1,3,224,224];y:[1,1000]``. What shape inference
does not find then is read off one run on random data. Inputs that are not named keep what they have.

Not handled: a model whose shapes depend on the values of its inputs keeps the shapes of that one run for them.
"""

from __future__ import annotations

import re
from typing import Annotated

import onnx_ir as ir

from quark.errors import ConfigError, ModelError, check_name
from quark.ir.walk import nodes_within
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.passes import fill_value_info

Shapes = Annotated[
    dict[str, list[int]] | str, "Shape of each input and output: a mapping, or text like `x:[1,3,8,8];y:[1,10]`."
]
_ENTRY = re.compile(r"\s*(?P<name>.+?)\s*:\s*\[(?P<sizes>[\d\s,]*)\]\s*")


def parse(text: str) -> dict[str, list[int]]:
    """The shapes that a text names.

    Raises:
        ConfigError: an entry is not ``name:[size,size]``.
    """
    found = {}
    for entry in filter(str.strip, text.split(";")):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ConfigError(f"FixShapes: {entry.strip()!r} is not of the form name:[size,size,…]")
        found[match["name"]] = [int(size) for size in match["sizes"].split(",") if size.strip()]
    if not found:
        raise ConfigError(f"FixShapes: {text!r} names no input or output, as in x:[1,3,224,224]")
    return found


def run(model: ir.Model, input_output_name_shapes: Shapes) -> PassReport:
    """Fix the shapes of ``model`` in place.

    Raises:
        ConfigError: the text is not a list of shapes, or a size is below 1.
        ModelError: a name that is not an input or output, a shape of another rank, or one that contradicts the model.
    """
    shapes = input_output_name_shapes if isinstance(input_output_name_shapes, dict) else parse(input_output_name_shapes)
    graph = model.graph
    ends = {str(value.name): value for value in (*graph.inputs, *graph.outputs)}
    for name, sizes in shapes.items():
        check_name("input or output (FixShapes)", name, ends, ModelError)
        if any(size < 1 for size in sizes):
            raise ConfigError(f"FixShapes: the sizes of {name!r} must be 1 or more, not {sizes}")
    inputs = {str(value.name) for value in graph.inputs}
    changed = sum(_set(ends[name], sizes) for name, sizes in shapes.items() if name in inputs)
    if changed:
        _forget(model)
        infer_shapes(model)
    changed += sum(_set(ends[name], sizes) for name, sizes in shapes.items() if name not in inputs)
    return PassReport("fix_shapes", changed + (fill_value_info.run(model).fired if changed else 0))


def _set(value: ir.Value, sizes: list[int]) -> int:
    """Fix a shape; 0 where it is fixed already."""
    shape = value.shape
    if shape is not None and len(shape) != len(sizes):
        raise ModelError(f"FixShapes: {value.name!r} has {len(shape)} axes, and {sizes} has {len(sizes)}")
    for old, new in zip(shape or sizes, sizes, strict=True):
        if isinstance(old, int) and old != new:
            raise ModelError(f"FixShapes: {value.name!r} has the shape {list(shape or ())}, which {sizes} contradicts")
    changed = shape is None or not shape.is_static()
    value.shape = ir.Shape(sizes)
    return int(changed)


def _forget(model: ir.Model) -> None:
    """Drop the shapes of inner tensors that are not fixed numbers: they follow from the new ones."""
    for node in nodes_within(model.graph):
        for value in node.outputs:
            if value.shape is not None and not value.shape.is_static():
                value.shape = None
