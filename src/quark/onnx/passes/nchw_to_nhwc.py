"""The model takes and gives images as [N, H, W, C] instead of [N, C, H, W] (ConvertNCHWToNHWC).

    input [N, H, W, C] → Transpose(0, 3, 1, 2) → the network as it was → Transpose(0, 2, 3, 1) → output [N, H, W, C]

Inputs and outputs keep their names. Only inputs and outputs of rank 4 whose channels, height and width are known
change; what is inside stays.

Running the pass twice would transpose twice, so an input that only such a Transpose reads is left alone.
"""

from __future__ import annotations

import logging
from typing import Annotated

import onnx_ir as ir

from quark.errors import ModelError, check_name
from quark.ir.surgery import Names, ints_attribute
from quark.onnx.graph.report import PassReport

_log = logging.getLogger(__name__)
TO_NCHW, TO_NHWC = [0, 3, 1, 2], [0, 2, 3, 1]
Which = Annotated[bool | list[str], "True: every image input and output; a list: these inputs, and every image output."]


def run(model: ir.Model, convert_nchw_to_nhwc: Which = True) -> PassReport:
    """Convert ``model`` in place.

    Raises:
        ModelError: a listed input does not exist or is not an image.
    """
    listed = convert_nchw_to_nhwc if isinstance(convert_nchw_to_nhwc, list) else None
    _check(model, listed)
    fired, refused, names = 0, [], Names(model)
    inputs = [value for value in model.graph.inputs if not value.is_initializer()]
    changed = 0
    for value in inputs:
        reason = _input_reason(value, listed)
        if reason is None:
            _convert_input(value, model.graph, names)
            changed += 1
        else:
            refused.append(f"the input {value.name!r} stays: {reason}")
    for position, value in enumerate(model.graph.outputs):
        reason = _output_reason(value)
        if changed and reason is None:
            _convert_output(position, value, model.graph, names)
            fired += 1
        elif reason is not None:
            refused.append(f"the output {value.name!r} stays: {reason}")
    return PassReport("nchw_to_nhwc", fired + changed, tuple(refused))


Images = dict[str, tuple[ir.Shape, bool]]
"""Inputs and outputs of rank 4: their shape, and whether only a Transpose from or to channels-last is behind them."""


def images(model: ir.Model) -> Images:
    """The inputs and outputs of rank 4."""
    ends = [
        *((_is_last, value) for value in model.graph.inputs),
        *((_is_made_last, one) for one in model.graph.outputs),
    ]
    return {
        str(value.name): (value.shape, is_last(value))
        for is_last, value in ends
        if value.shape is not None and len(value.shape) == 4
    }


def moved(before: Images, after: Images) -> frozenset[str]:
    """The inputs and outputs whose channels have gone to the end.

    A Transpose that stands there alone now says nothing by itself: it may be one of two that were the same, or have
    come out of a function. Known sizes have to fit; those of a cube always do.
    """
    both = ((name, *before[name], *after[name]) for name in before.keys() & after.keys())
    return frozenset(name for name, shape, was, turned, now in both if now and not was and _is_turned(shape, turned))


def _is_turned(shape: ir.Shape, turned: ir.Shape) -> bool:
    pairs = [(shape[axis], size) for axis, size in zip(TO_NHWC, turned, strict=True)]
    return all(one == other for one, other in pairs if isinstance(one, int) and isinstance(other, int))


def _is_last(value: ir.Value) -> bool:
    while True:
        readers = {use.node for use in value.uses()}
        if len(readers) != 1:
            return False
        reader = next(iter(readers))
        if not _only_rounds(reader):
            return _transposes(reader, TO_NCHW)
        value = reader.outputs[0]


def _is_made_last(value: ir.Value) -> bool:
    maker = value.producer()
    while maker is not None and _only_rounds(maker):
        maker = maker.inputs[0].producer() if maker.inputs[0] is not None else None
    return maker is not None and _transposes(maker, TO_NHWC)


def _only_rounds(node: ir.Node) -> bool:
    """Whether a node is part of what a quantizer puts on a tensor."""
    return "uantize" in node.op_type or node.op_type == "Cast"


def _check(model: ir.Model, listed: list[str] | None) -> None:
    known = {str(value.name): value for value in model.graph.inputs}
    for name in listed or ():
        check_name("input", name, known, ModelError)
        if not _is_image(known[name]):
            raise ModelError(
                f"the input {name!r} is not an image: it needs four axes and known channels, height and width"
            )


def _is_image(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 4 and all(isinstance(size, int) for size in value.shape[1:])


def _input_reason(value: ir.Value, listed: list[str] | None) -> str | None:
    if listed is not None and value.name not in listed:
        return "it is not listed"
    if not _is_image(value):
        return "it does not have four axes with known channels, height and width"
    if _is_last(value):
        return "it is channels-last already"
    return None


def _output_reason(value: ir.Value) -> str | None:
    if value.shape is None or len(value.shape) != 4:
        return "it does not have four axes"
    if value.is_graph_input() or value.is_initializer():
        return "it is an input or a constant"
    return "it is channels-last already" if _is_made_last(value) else None


def _transposes(node: ir.Node, order: list[int]) -> bool:
    return node.op_type == "Transpose" and ints_attribute(node, "perm") == order


def _moved(shape: ir.Shape | None, order: list[int]) -> ir.Shape | None:
    return None if shape is None else ir.Shape([shape[axis] for axis in order])


def _convert_input(value: ir.Value, graph: ir.Graph, names: Names) -> None:
    _, channels, height, _ = value.shape or (0, 0, 0, 0)
    if isinstance(channels, int) and isinstance(height, int) and channels > height:
        _log.warning(
            "the input %s has %s channels and height %s: is it channels-last already?", value.name, channels, height
        )
    inner = ir.Value(name=names.fresh(f"{value.name}_nchw"), shape=value.shape, type=value.type)
    value.replace_all_uses_with(inner)
    node = ir.node("Transpose", [value], attributes={"perm": TO_NCHW}, outputs=[inner], name=f"{value.name}_transpose")
    graph.insert_before(graph[0], node)
    value.shape = _moved(value.shape, TO_NHWC)


def _convert_output(position: int, value: ir.Value, graph: ir.Graph, names: Names) -> None:
    name = value.name
    value.name = names.fresh(f"{name}_nchw")
    outer = ir.Value(name=name, shape=_moved(value.shape, TO_NHWC), type=value.type)
    graph.append(ir.node("Transpose", [value], attributes={"perm": TO_NHWC}, outputs=[outer], name=f"{name}_transpose"))
    graph.outputs[position] = outer
