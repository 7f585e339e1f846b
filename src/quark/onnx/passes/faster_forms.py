"""Forms of the same arithmetic that integer kernels run faster (FasterForms).

    Conv ∘ Concat(x[0::2, 0::2], x[1::2, 0::2], …)  =  one Conv on x, kernel and stride doubled      (also SpaceToDepth)
    AveragePool                                     =  a depthwise Conv whose weights are 1 / size
    Softmax over channels of [N, C, H, W]           =  Softmax over channels of [N, C, H * W]
    PRelu with the same slope everywhere            =  LeakyRelu
    Reshape ∘ Transpose ∘ Reshape of channels       =  Gather of channels                            (ShuffleNet's)
    MaxPool ∘ Pad by 0 of what is not negative      =  MaxPool with pads                             (Keras's ResNet)

The first form, the "focus" at the start of detectors, reads every pixel once instead of copying it four times at a
stride. ONNX Runtime's integer AveragePool takes 20 times as long as its float one, a depthwise convolution a quarter.
For a Softmax it moves the axis to the end, two axes that change places slowly, one axis that moves over one other fast:
179 and 16 us for 80 x 22 x 22. It also takes Transposes around a Softmax away, and moves the axis itself. A shuffle of
channels behind a convolution in integers becomes one Transpose of three axes, which takes 269 us for 116 x 32 x 32.

All are exact but for the order of sums. Not handled: sizes that are not known or do not divide, padding given by
``auto_pad``, dilated or grouped convolutions behind a focus; averages that leave padding out of the count.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from quark.ir.runtime_faults import is_not_negative
from quark.ir.surgery import (
    Names,
    add_initializer,
    attribute,
    constant_array,
    constant_shape,
    input_at,
    int_attribute,
    ints_attribute,
    nodes_of,
    opset,
    sole_consumer,
    substitute,
)
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each
from quark.onnx.graph.shapes import static_shape

#: The opset from which a Softmax sums over one axis, and not over all behind it.
OF_ONE_AXIS = 13
#: Where a branch of a focus begins: (row, column) within a block.
Offset = tuple[int, int]


def run(model: ir.Model) -> PassReport:
    """Rewrite ``model`` in place."""
    name, pools = "faster_forms", nodes_of(model, "AveragePool")
    joined = rewrite_each(model, name, nodes_of(model, "Conv"), _focus, _join)
    joined += rewrite_each(model, name, nodes_of(model, "PRelu"), _slope, _leaky)
    joined += rewrite_each(model, name, nodes_of(model, "Transpose"), _shuffle, _gathered)
    joined += rewrite_each(model, name, nodes_of(model, "MaxPool"), _padded, _with_pads)
    rows = nodes_of(model, "Softmax", "LogSoftmax") if opset(model) >= OF_ONE_AXIS else []
    joined += rewrite_each(model, name, rows, _over_channels, _flat)
    return joined + rewrite_each(model, name, pools, lambda one: _not_depthwise(one) or one, _depthwise)


# ---- one slope -------------------------------------------------------------------------------------------------------


def _slope(node: ir.Node) -> float | None:
    slopes = constant_array(input_at(node, 1))
    if slopes is None or not slopes.size or node.outputs[0].dtype != ir.DataType.FLOAT:
        return None
    first = float(slopes.flat[0])
    return first if np.isfinite(first) and (slopes == first).all() else None


def _leaky(node: ir.Node, slope: float, _: Names) -> None:
    """A LeakyRelu, which has an integer kernel, and a float one that takes a twentieth."""
    substitute(node.outputs[0], [ir.node("LeakyRelu", node.inputs[:1], {"alpha": slope}, name=node.name)])


# ---- shuffled channels -----------------------------------------------------------------------------------------------


def _shuffle(node: ir.Node) -> tuple[ir.Value, ir.Value, int, int] | None:
    """What a shuffle of channels reads and makes, its groups and the channels of each."""
    before, after = cast(ir.Value, node.inputs[0]).producer(), sole_consumer(node.outputs[0])
    perm = ints_attribute(node, "perm") or []
    if before is None or after is None or perm != [0, 2, 1, *range(3, len(perm))]:
        return None
    if before.op_type != "Reshape" or after.op_type != "Reshape" or sole_consumer(before.outputs[0]) is not node:
        return None
    source, made = cast(ir.Value, before.inputs[0]), after.outputs[0]
    shapes = [value.shape for value in (source, before.outputs[0], made)]
    given, split, joined = ([] if shape is None else list(shape) for shape in shapes)
    sizes = given[1:]  # the first is the same then, by the number of elements
    groups, each = split[1:3] if len(split) > 2 else (0, 0)
    if (
        not isinstance(groups, int)
        or not isinstance(each, int)
        or not all(isinstance(one, int) and one for one in sizes)
    ):
        return None
    return (source, made, groups, each) if sizes == joined[1:] == [groups * each, *split[3:]] else None


def _gathered(node: ir.Node, found: tuple[ir.Value, ir.Value, int, int], names: Names) -> None:
    source, made, groups, each = found
    order = np.arange(groups * each).reshape(groups, each).T.reshape(-1)
    stored = add_initializer(cast(ir.Graph, node.graph), order, names.fresh(f"{made.name}_order"))
    substitute(made, [ir.node("Gather", [source, stored], {"axis": 1}, name=node.name)])


# ---- padded maxima ---------------------------------------------------------------------------------------------------


def _padded(node: ir.Node) -> tuple[ir.Value, list[int]] | None:
    """What a Pad before a MaxPool reads, and the pads of both, where a 0 at the edge is never larger than the rest."""
    pad = None if node.inputs[0] is None else node.inputs[0].producer()
    if pad is None or pad.op_type != "Pad" or sole_consumer(pad.outputs[0]) is not node or len(node.outputs) > 1:
        return None
    source, amounts, filler, axes = (input_at(pad, place) for place in range(4))
    added, by = constant_array(amounts), 0 if filler is None else constant_array(filler)
    plain = attribute(node, "auto_pad", "NOTSET") == "NOTSET" and not int_attribute(node, "ceil_mode", 0)
    if source is None or added is None or by is None or np.any(by) or axes is not None or not is_not_negative(source):
        return None
    kernel = _ints(node, "kernel_shape", [])
    places, rank = len(kernel), len(kernel) + 2
    begin, end = added.reshape(2, -1).tolist()
    if attribute(pad, "mode", "constant") != "constant" or not plain or len(begin) != rank:
        return None
    own = _ints(node, "pads", [0] * 2 * places)
    pads = [a + b for a, b in zip([*begin[2:], *end[2:]], own, strict=True)]
    covered = all(0 <= one < size for one, size in zip(pads, kernel * 2, strict=True))
    dilated = set(_ints(node, "dilations", [1] * places)) != {1}
    return (
        None if any([*begin[:2], *end[:2], *(one < 0 for one in begin + end), not covered, dilated]) else (source, pads)
    )


def _with_pads(node: ir.Node, found: tuple[ir.Value, list[int]], _: Names) -> None:
    source, pads = found
    kept = {name: one for name, one in node.attributes.items() if name != "pads"}
    pooled = ir.node("MaxPool", [source], name=node.name)
    pooled.attributes.update({**kept, "pads": ir.AttrInt64s("pads", pads)})
    substitute(node.outputs[0], [pooled])


# ---- softmax over channels -------------------------------------------------------------------------------------------


def _over_channels(node: ir.Node) -> tuple[ir.Value, ir.Value, int, list[int]] | None:
    """What a Softmax reads and makes, its axis, and the sizes of the axes behind, where there are two or more; without
    the Transposes around it where they undo each other."""
    source, made = node.inputs[0], node.outputs[0]
    if source is None or source.shape is None:
        return None
    axis = int_attribute(node, "axis", -1) % len(source.shape)
    there, back = source.producer(), sole_consumer(made)
    if there is not None and back is not None and there.op_type == back.op_type == "Transpose":
        order, again = ints_attribute(there, "perm"), ints_attribute(back, "perm")
        if order and again and [order[k] for k in again] == sorted(order) and sole_consumer(source) is node:
            source, made, axis = cast(ir.Value, there.inputs[0]), back.outputs[0], order[axis]
    known = [size if isinstance(size, int) else -1 for size in source.shape or ()]
    before, behind = known[: axis + 1], known[axis + 1 :]
    free = sum(size < 1 for size in (before if -1 in behind else []) + behind)  # no free size is told beside a 0
    return (source, made, axis, behind) if len(behind) > 1 and free <= 1 and 0 not in behind else None


def _flat(node: ir.Node, found: tuple[ir.Value, ir.Value, int, list[int]], names: Names) -> None:
    """The axes behind as one, and back; sizes before them are copied."""
    source, made, axis, sizes = found
    kept = [0] * (axis + 1)
    flat = _reshaped(source, [*kept, -1 if -1 in sizes else math.prod(sizes)], node, names)
    rows = ir.node(node.op_type, [flat.outputs[0]], {"axis": axis}, name=node.name)
    rows.outputs[0].name, rows.outputs[0].type = names.fresh(f"{made.name}_rows"), source.type
    substitute(made, [flat, rows, _reshaped(rows.outputs[0], [*kept, *sizes], node, names)])


def _reshaped(value: ir.Value, shape: list[int], node: ir.Node, names: Names) -> ir.Node:
    name = names.fresh(f"{value.name}_reshaped")
    stored = add_initializer(cast(ir.Graph, node.graph), np.array(shape, np.int64), names.fresh(f"{name}_shape"))
    made = ir.node("Reshape", [value, stored], name=name)
    made.outputs[0].name, made.outputs[0].type = name, value.type
    return made


# ---- focus -----------------------------------------------------------------------------------------------------------


def _focus(node: ir.Node) -> tuple[ir.Value, int, list[Offset]] | None:
    """The image, the size of its blocks and where each branch begins, where a Conv reads nothing but its blocks."""
    blocks = node.inputs[0]
    weight = constant_shape(input_at(node, 1))
    if blocks is None or weight is None or len(weight) != 4 or sole_consumer(blocks) is not node:
        return None
    plain = attribute(node, "auto_pad", "NOTSET") == "NOTSET" and int_attribute(node, "group", 1) == 1
    if not plain or set(_ints(node, "dilations", [1, 1])) != {1}:
        return None
    maker = blocks.producer()
    found = None if maker is None else _space_to_depth(maker) or _slices(maker)
    shape = None if found is None else static_shape(found[0])
    if found is None or shape is None or len(shape) != 4 or any(size % found[1] for size in shape[2:]):
        return None
    return found if weight[1] == shape[1] * found[1] ** 2 else None


def _space_to_depth(node: ir.Node) -> tuple[ir.Value, int, list[Offset]] | None:
    size = int_attribute(node, "blocksize", 0)
    if node.op_type != "SpaceToDepth" or node.inputs[0] is None or size < 2:
        return None
    return node.inputs[0], size, [(row, column) for row in range(size) for column in range(size)]


def _slices(node: ir.Node) -> tuple[ir.Value, int, list[Offset]] | None:
    """A Concat of the channels of strided slices of one image that, together, are the image."""
    if node.op_type != "Concat" or int_attribute(node, "axis", 0) != 1:
        return None
    size = math.isqrt(len(node.inputs))
    walked = [_walk(value, size) for value in node.inputs]
    sources = {None if one is None else one[0] for one in walked}
    offsets = [one[1] for one in walked if one is not None]
    source = next(iter(sources))
    if size < 2 or size * size != len(node.inputs) or len(sources) != 1 or source is None:
        return None
    return (source, size, offsets) if len(set(offsets)) == size * size else None


def _walk(value: ir.Value | None, step: int) -> tuple[ir.Value, Offset] | None:
    """Back through Slices of rows and columns with this step: their source and where they begin."""
    starts: dict[int, int] = {}
    while value is not None and len(starts) < 2:
        node = value.producer()
        parts = None if node is None or node.op_type != "Slice" else [constant_array(one) for one in node.inputs[1:]]
        if node is None or parts is None or len(parts) != 4 or any(one is None for one in parts):
            return None
        value, shape = node.inputs[0], static_shape(node.inputs[0])
        lists = [cast(np.ndarray, one).reshape(-1).tolist() for one in parts]
        for start, end, axis, stride in zip(*lists, strict=True):
            axis %= 4
            whole = shape is not None and len(shape) == 4 and end >= shape[axis]
            if axis not in (2, 3) or axis in starts or stride != step or not 0 <= start < step or not whole:
                return None
            starts[axis] = start
    return None if value is None or len(starts) < 2 else (value, (starts[2], starts[3]))


def _join(node: ir.Node, focus: tuple[ir.Value, int, list[Offset]], names: Names) -> None:
    """One Conv on the image: tap (i, j) of branch (row, column) is tap (i * size + row, j * size + column)."""
    image, size, offsets = focus
    weight, graph = constant_array(node.inputs[1]), node.graph
    if weight is None or graph is None:
        return
    made, channels, rows, columns = weight.shape
    taps = weight.reshape(made, len(offsets), channels // len(offsets), rows, columns)
    wide = np.zeros((made, taps.shape[2], rows * size, columns * size), weight.dtype)
    for branch, (row, column) in enumerate(offsets):
        wide[:, :, row::size, column::size] = taps[:, branch]
    stored = add_initializer(graph, wide, names.fresh(f"{node.inputs[1].name}_focus" if node.inputs[1] else "focus"))
    attributes = {
        "kernel_shape": [rows * size, columns * size],
        "strides": [step * size for step in _ints(node, "strides", [1, 1])],
        "pads": [pad * size for pad in _ints(node, "pads", [0, 0, 0, 0])],
    }
    rest = [value for value in node.inputs[2:3] if value is not None]
    output = node.outputs[0]
    substitute(output, [ir.node("Conv", [image, stored, *rest], attributes, name=node.name)])


# ---- averages --------------------------------------------------------------------------------------------------------


def _not_depthwise(node: ir.Node) -> str | None:
    """The reason why an AveragePool cannot be a depthwise convolution."""
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    if shape is None or len(shape) != 4 or not isinstance(shape[1], int):
        return "the channels of its input are not known, or it is not an image"
    if attribute(node, "auto_pad", "NOTSET") != "NOTSET" or int_attribute(node, "ceil_mode", 0):
        return "its padding depends on the size of its input"
    if any(_ints(node, "pads", [0, 0, 0, 0])) and not int_attribute(node, "count_include_pad", 0):
        return "padding does not count in its averages"
    if node.inputs[0] is None or node.inputs[0].dtype != ir.DataType.FLOAT:
        return "it is not in float32"
    return None


def _depthwise(node: ir.Node, _: ir.Node, names: Names) -> None:
    source, graph, kernel = node.inputs[0], node.graph, _ints(node, "kernel_shape", [])
    if source is None or source.shape is None or graph is None:
        return
    channels = cast(int, source.shape[1])
    weight = np.full((channels, 1, *kernel), 1 / math.prod(kernel), np.float32)
    stored = add_initializer(graph, weight, names.fresh(f"{node.name}_weight"))
    attributes: dict[str, Any] = {
        "group": channels,
        "kernel_shape": kernel,
        "strides": _ints(node, "strides", [1] * len(kernel)),
        "pads": _ints(node, "pads", [0] * 2 * len(kernel)),
        "dilations": _ints(node, "dilations", [1] * len(kernel)),
    }
    substitute(node.outputs[0], [ir.node("Conv", [source, stored], attributes, name=node.name)])


def _ints(node: ir.Node, name: str, default: list[int]) -> list[int]:
    return [int(one) for one in cast("list[int]", attribute(node, name, default))]
