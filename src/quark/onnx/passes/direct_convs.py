"""Convolutions in the form that has the fastest kernels (FasterForms).

    ConvTranspose of stride 1                  =  Conv with the taps in reverse, padding d (k - 1) - p
    Conv 1x1 ∘ unfold (∘ Pad)                  =  one Conv with the kernel, dilation and stride of the unfolding

ONNX Runtime has no integer kernel of ConvTranspose. ``torch.nn.Unfold`` is exported as two Gathers, a Transpose and a
Reshape, which copy every pixel once for each place of the kernel.

Both are exact but for the order of sums. Not handled: strides and padding that ``auto_pad`` or ``output_shape`` give,
unfolded images that anything else reads, grouped convolutions behind them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
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
    sole_consumer,
    substitute,
)
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each
from quark.onnx.graph.shapes import static_shape


def run(model: ir.Model) -> PassReport:
    """Rewrite ``model`` in place."""
    name, transposed = "direct_convs", nodes_of(model, "ConvTranspose")
    turned = rewrite_each(model, name, transposed, lambda one: _not_plain(one) or one, _turn)
    return turned + rewrite_each(model, name, nodes_of(model, "Conv"), _unfolding, _join)


# ---- transposed convolutions -----------------------------------------------------------------------------------------


def _not_plain(node: ir.Node) -> str | None:
    """The reason why a ConvTranspose is no convolution."""
    weight = constant_shape(input_at(node, 1))
    if weight is None or len(weight) < 3:
        return "its weight is computed"
    kernel = weight[2:]
    if any(one != 1 for one in ints_attribute(node, "strides") or ()):
        return "its stride is above 1"
    if attribute(node, "auto_pad", "NOTSET") != "NOTSET" or node.attributes.get("output_shape") is not None:
        return "its padding is not written down"
    if any(ints_attribute(node, "output_padding") or ()):
        return "its output is padded"
    return None if min(_pads(node, kernel)) >= 0 else "its output is cut by more than the kernel"


def _pads(node: ir.Node, kernel: Sequence[int]) -> list[int]:
    """The padding of the convolution."""
    given = ints_attribute(node, "pads") or [0] * 2 * len(kernel)
    steps = ints_attribute(node, "dilations") or [1] * len(kernel)
    wide = [step * (size - 1) for step, size in zip(steps, kernel, strict=True)]
    return [whole - one for whole, one in zip(wide * 2, given, strict=True)]


def _turn(node: ir.Node, _: ir.Node, names: Names) -> None:
    weight, graph, group = constant_array(node.inputs[1]), node.graph, int_attribute(node, "group", 1)
    if weight is None or graph is None:
        return
    read, made, *kernel = weight.shape
    apart = weight.reshape(group, read // group, made, *kernel).swapaxes(1, 2)
    taps = np.flip(apart.reshape(group * made, read // group, *kernel), tuple(range(2, weight.ndim)))
    attributes: dict[str, int | list[int]] = {"kernel_shape": kernel, "pads": _pads(node, kernel), "group": group}
    if (steps := ints_attribute(node, "dilations")) is not None:
        attributes["dilations"] = steps
    stored = add_initializer(graph, np.ascontiguousarray(taps), names.fresh(f"{node.name}_taps"))
    inputs = [node.inputs[0], stored, *node.inputs[2:]]
    substitute(node.outputs[0], [ir.node("Conv", inputs, attributes, name=node.name)])


# ---- unfolded images -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Unfolding:
    """An image and how it is unfolded, along rows and columns."""

    image: ir.Value
    kernel: list[int]
    dilations: list[int]
    strides: list[int]
    pads: list[int]


def _unfolding(node: ir.Node) -> _Unfolding | None:
    """What a Conv reads unfolded."""
    weight, value = constant_shape(input_at(node, 1)), node.inputs[0]
    ones = [*(ints_attribute(node, "strides") or ()), int_attribute(node, "group", 1)]
    if weight is None or weight[2:] != (1, 1) or set(ones) != {1} or any(ints_attribute(node, "pads") or ()):
        return None
    whole = None if value is None else value.shape
    wanted: list[tuple[str, dict[str, object]]] = [
        ("Reshape", {}),
        ("Transpose", {"perm": [0, 1, 2, 4, 3, 5]}),
        ("Gather", {"axis": 4}),
        ("Gather", {"axis": 2}),
    ]
    steps: list[tuple[int, int, int, int]] = []
    for op_type, given in wanted:
        maker = None if value is None or sole_consumer(value) is None else value.producer()
        if maker is None or maker.op_type != op_type or any(_plain(maker, name) != one for name, one in given.items()):
            return None
        if op_type == "Gather":
            found = _walk(constant_array(input_at(maker, 1)))
            if found is None:
                return None
            steps.insert(0, found)
        value = maker.inputs[0]
    return None if value is None or whole is None else _placed(value, steps, whole, weight[1])


def _plain(node: ir.Node, name: str) -> object:
    value = attribute(node, name)
    return value if isinstance(value, int) else ints_attribute(node, name)


def _walk(indices: np.ndarray | None) -> tuple[int, int, int, int] | None:
    """(kernel, places, dilation, stride) of indices that are dilation * i + stride * k."""
    if indices is None or indices.ndim != 2 or not indices.size or indices[0, 0] != 0:
        return None
    taps, places = indices.shape
    dilation = int(indices[1, 0]) if taps > 1 else 1
    stride = int(indices[0, 1]) if places > 1 else 1
    expected = dilation * np.arange(taps)[:, None] + stride * np.arange(places)
    return (taps, places, dilation, stride) if dilation > 0 < stride and np.array_equal(indices, expected) else None


def _placed(
    value: ir.Value, steps: Sequence[tuple[int, int, int, int]], whole: ir.Shape, channels: int
) -> _Unfolding | None:
    """The unfolding with its padding, where it reads the image to its end and the Reshape joins what it made."""
    shape = static_shape(value)
    taps, places, dilations, strides = (list(one) for one in zip(*steps, strict=True))
    if shape is None or len(shape) != 4 or len(whole) != 4 or shape[1] * taps[0] * taps[1] != channels:
        return None
    reach = [
        (size - dilation * (tap - 1) - 1) // stride + 1
        for size, tap, dilation, stride in zip(shape[2:], taps, dilations, strides, strict=True)
    ]
    if reach != places or list(whole[1:]) != [channels, *places]:
        return None
    pads = _zeros_before(value)
    maker = value.producer()
    if pads is None or maker is None or maker.inputs[0] is None:
        return _Unfolding(value, taps, dilations, strides, [0, 0, 0, 0])
    return _Unfolding(maker.inputs[0], taps, dilations, strides, pads)


def _zeros_before(value: ir.Value) -> list[int] | None:
    """The zeros that a Pad before puts around the image, which a convolution can put there itself."""
    maker = value.producer()
    pads = None if maker is None else constant_array(input_at(maker, 1))
    if maker is None or maker.op_type != "Pad" or pads is None or pads.size != 8 or input_at(maker, 3) is not None:
        return None
    filled = input_at(maker, 2)
    number = constant_array(filled)
    zero = filled is None or (number is not None and not number.any())
    sides = [int(one) for one in pads.reshape(2, 4)[:, 2:].reshape(-1)]
    spatial = not pads.reshape(2, 4)[:, :2].any() and min(sides) >= 0
    plain = attribute(maker, "mode", "constant") == "constant" and sole_consumer(value) is not None
    return sides if zero and spatial and plain else None


def _join(node: ir.Node, found: _Unfolding, names: Names) -> None:
    weight, graph = constant_array(node.inputs[1]), node.graph
    if weight is None or graph is None:
        return
    channels = weight.shape[1] // (found.kernel[0] * found.kernel[1])
    wide = np.ascontiguousarray(weight.reshape(weight.shape[0], channels, *found.kernel))
    stored = add_initializer(graph, wide, names.fresh(f"{node.name}_unfolded"))
    attributes = {
        "kernel_shape": found.kernel,
        "dilations": found.dilations,
        "strides": found.strides,
        "pads": found.pads,
    }
    substitute(node.outputs[0], [ir.node("Conv", [found.image, stored, *node.inputs[2:]], attributes, name=node.name)])
