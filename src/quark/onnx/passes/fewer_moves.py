"""Moves of data that are slow, or none at all (FasterForms).

    ScatterND(x, indices of a block, u)          =  Concat(x before, u, x behind)      torch's x[:, 2:6] = u
    Unsqueeze ∘ Squeeze, Transpose ∘ Reshape, …  =  one Reshape, or nothing, where the elements keep their order
    Slice(x, 0:k), Slice(x, k:n), …              =  Split(x), where they are all of an axis

ONNX Runtime's ScatterND looks at every index of every element; two Slices and a Concat copy rows. It has a Split of
codes, and no Slice of them. A Transpose keeps the order where only axes of size 1 move. Streaming networks, whose
tensors are small, are made of such nodes: each takes a third of a microsecond to half a microsecond, whatever it does.

Not handled: blocks that are cut out of more than one axis, sizes that are not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import (
    Names,
    add_initializer,
    attribute,
    bypass,
    constant_array,
    input_at,
    ints_attribute,
    nodes_of,
    opset,
    prune,
    substitute,
)
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.shapes import static_shape

SPLIT_BY_INPUT = 13
"""The opset from which the sizes of a Split are an input."""
_RESHAPING = ("Squeeze", "Unsqueeze", "Reshape", "Flatten")


def run(model: ir.Model) -> PassReport:
    """Rewrite ``model`` in place."""
    fired, names = 0, Names(model)
    for node in nodes_of(model, "ScatterND"):
        fired += _as_concat(node, names)
    slices = [node for node in nodes_of(model, "Slice") if opset(model) >= SPLIT_BY_INPUT]
    for source in dict.fromkeys(node.inputs[0] for node in slices):
        fired += source is not None and _as_split(source, names)
    for node in nodes_of(model, *_RESHAPING, "Transpose"):
        fired += node.graph is not None and _as_one(node, names)
    return PassReport("fewer_moves", fired)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _as_concat(node: ir.Node, names: Names) -> bool:
    """Write a ScatterND of a block as a Concat; whether it was one."""
    data, updates, graph = node.inputs[0], node.inputs[2], node.graph
    block, shape = _block(node), static_shape(data)
    if block is None or shape is None or data is None or updates is None or graph is None:
        return False
    begin, size = block
    cut = [axis for axis, (one, whole) in enumerate(zip(size, shape, strict=False)) if one != whole]
    if len(cut) > 1:
        return False
    made: list[ir.Node] = []
    target = [*size, *shape[len(size) :]]
    if static_shape(updates) != tuple(target):
        made.append(_reshape(updates, target, graph, names, f"{node.name}_block"))
        updates = made[-1].outputs[0]
    if cut:
        axis, parts = cut[0], [updates]
        ends = [(0, begin[axis]), (begin[axis] + size[axis], shape[axis])]
        for place, (start, end) in zip((0, 2), ends, strict=True):
            if start < end:
                made.append(_slice(data, axis, range(start, end), graph, names, f"{node.name}_{place}"))
                parts.insert(place, made[-1].outputs[0])
        made.append(ir.node("Concat", parts, {"axis": axis}, name=node.name))
    elif not made:
        made.append(ir.node("Identity", [updates], name=node.name))
    substitute(node.outputs[0], made)
    return True


def _block(node: ir.Node) -> tuple[list[int], list[int]] | None:
    """Where the block that a ScatterND writes begins, and its size, along the axes that its indices name."""
    indices, shape = constant_array(input_at(node, 1)), static_shape(node.inputs[0])
    if indices is None or shape is None or not indices.size or attribute(node, "reduction", "none") != "none":
        return None
    known = np.array(shape[: indices.shape[-1]])
    rows = indices.reshape(-1, len(known))
    rows = np.where(rows < 0, rows + known, rows)
    begin, size = rows[0], rows[-1] - rows[0] + 1
    if (size < 1).any() or np.prod(size) != len(rows):
        return None
    expected = np.indices(size).reshape(len(known), -1).T + begin
    return (begin.tolist(), size.tolist()) if np.array_equal(rows, expected) else None


def _slice(data: ir.Value, axis: int, part: range, graph: ir.Graph, names: Names, base: str) -> ir.Node:
    given = [("starts", part.start), ("ends", part.stop), ("axes", axis)]
    stored = [add_initializer(graph, np.array([at]), names.fresh(f"{base}_{what}")) for what, at in given]
    node = ir.node("Slice", [data, *stored], name=base)
    _say(node, data, names.fresh(f"{base}_rows"), _with(static_shape(data) or (), axis, len(part)))
    return node


def _with(shape: Sequence[int], axis: int, size: int) -> list[int]:
    return [size if k == axis else one for k, one in enumerate(shape)]


def _reshape(value: ir.Value, shape: Sequence[int], graph: ir.Graph, names: Names, base: str) -> ir.Node:
    stored = add_initializer(graph, np.array(shape, np.int64), names.fresh(f"{base}_shape"))
    node = ir.node("Reshape", [value, stored], name=base)
    _say(node, value, names.fresh(f"{base}_values"), shape)
    return node


def _say(node: ir.Node, source: ir.Value, name: str, shape: Sequence[int]) -> None:
    """Name, type and shape of what a new node makes."""
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, source.type, ir.Shape(shape)


# ---- parts -----------------------------------------------------------------------------------------------------------


def _as_split(source: ir.Value, names: Names) -> bool:
    """Write the Slices that are all of an axis of ``source`` as a Split; whether there were some."""
    parts = sorted((part for part in map(_part, (use.node for use in source.uses())) if part), key=lambda one: one[:3])
    for axis in dict.fromkeys(part[0] for part in parts):
        along = [part for part in parts if part[0] == axis]
        whole, graph = cast(tuple[int, ...], static_shape(source))[axis], along[0][3].graph
        ends = [0, *(end for _, _, end, _ in along)]
        inside = graph is not None and all(part[3].graph is graph for part in along)
        if len(along) > 1 and inside and [start for _, start, _, _ in along] == ends[:-1] and ends[-1] == whole:
            _split(source, axis, [part[3] for part in along], np.diff(ends), names)
            return True
    return False


def _split(source: ir.Value, axis: int, slices: Sequence[ir.Node], sizes: np.ndarray, names: Names) -> None:
    graph = cast(ir.Graph, slices[0].graph)
    stored = add_initializer(graph, np.asarray(sizes, np.int64), names.fresh(f"{slices[0].name}_sizes"))
    split = ir.node("Split", [source, stored], {"axis": axis}, num_outputs=len(slices), name=slices[0].name)
    for node in [node for node in graph if node in slices]:
        substitute(node.outputs[0], [split], slices.index(node))


def _part(node: ir.Node) -> tuple[int, int, int, ir.Node] | None:
    """(axis, start, end, node) of a Slice along one axis of known size, step by step; None for any other."""
    shape = static_shape(node.inputs[0])
    if node.op_type != "Slice" or node.domain or shape is None:
        return None
    given = [constant_array(input_at(node, position)) for position in (1, 2, 3)]
    steps = input_at(node, 4)
    step = constant_array(steps) if steps is not None else np.ones(1)
    if step is None or step.reshape(-1).tolist() != [1] or any(one is None or one.size != 1 for one in given):
        return None
    start, end, axis = (int(cast(np.ndarray, one).reshape(-1)[0]) for one in given)
    axis %= len(shape)
    first, last, _ = slice(start, end).indices(shape[axis])
    return (axis, first, last, node) if first < last else None


# ---- order -----------------------------------------------------------------------------------------------------------


def _as_one(node: ir.Node, names: Names) -> bool:
    """Let a node that keeps the order of elements read what the ones before it read; whether there was one."""
    source, graph = node.inputs[0], node.graph
    if not _keeps_order(node) or source is None or graph is None:
        return False
    first = source
    while (maker := first.producer()) is not None and maker.graph is graph and _keeps_order(maker):
        first = cast(ir.Value, maker.inputs[0])
    target = _target(node.outputs[0])
    if first is source or target is None:
        return False
    if static_shape(first) is not None and static_shape(first) == static_shape(node.outputs[0]):
        return bypass(node, first) is None and _clean(source)
    substitute(node.outputs[0], [_reshape(first, target, graph, names, str(node.name))])
    return True


def _clean(value: ir.Value) -> bool:
    prune(value.producer())
    return True


def _keeps_order(node: ir.Node) -> bool:
    source = input_at(node, 0)
    if node.domain or source is None:
        return False
    if node.op_type != "Transpose":
        return node.op_type in _RESHAPING
    shape, order = source.shape, ints_attribute(node, "perm")
    if shape is None:
        return False
    moved = [axis for axis in order or range(len(shape))[::-1] if shape[axis] != 1]
    return moved == sorted(moved)


def _target(value: ir.Value) -> list[int] | None:
    """The sizes to reshape to, one of them free at most; None where they are not known."""
    sizes = None if value.shape is None else [one if isinstance(one, int) else -1 for one in value.shape]
    return None if sizes is None or 0 in sizes or sizes.count(-1) > 1 else sizes
