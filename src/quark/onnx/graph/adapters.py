"""What has to change on a node when its operator changed between opsets: one small function a change.

``ADAPTERS[op_type]`` lists ``(opset, adapter)``: the adapter rewrites a node of the form before ``opset`` into the form
of ``opset``. It edits the node in place (names stay), adds constants through its :class:`AdapterTarget`, and raises
:class:`Refused` with the reason where the old meaning cannot be expressed. Changes of an operator that are not listed
are compatible (new types, new attributes whose default is the old behaviour); a test goes through all of ONNX's
operator schemas and holds this table complete.

Source: onnx/docs/Changelog.md; the meaning of Upsample-9 and Resize-10 is ONNX Runtime's (asymmetric coordinates; the
nearest source is rounded up where Resize-10 shrinks, down where it enlarges).

Not handled: Scan-8 (a batch axis that later versions do not have), the saved statistics of a BatchNormalization in
training form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.surgery import (
    Names,
    add_initializer,
    constant_array,
    input_at,
    int_attribute,
    set_input,
)
from quark.onnx.graph.rewriting import put_behind


class Refused(Exception):
    """A node cannot be lifted; the message is the reason."""


@dataclass
class AdapterTarget:
    """Where adapters put new constants and nodes. Equal constants of the main graph are shared."""

    main: ir.Graph
    names: Names
    _constants: dict[tuple, ir.Value] = field(default_factory=dict)

    def constant(self, node: ir.Node, array: np.ndarray, base: str) -> ir.Value:
        """A constant that ``node`` can read: an initializer, or a Constant node inside a subgraph or function."""
        if node.graph is not self.main:
            attribute = ir.AttrTensor("value", ir.Tensor(array))
            return self.insert(node, "Constant", [], base, [attribute])
        key = (base, array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = add_initializer(self.main, array, self.names.fresh(base))
        return self._constants[key]

    def insert(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        base: str,
        attributes: Sequence[ir.Attr] = (),
    ) -> ir.Value:
        """A new node before ``before``; returns its output."""
        node = ir.Node("", op_type, inputs, attributes, num_outputs=1)
        node.outputs[0].name = node.name = self.names.fresh(base)
        if before.graph is not None:
            before.graph.insert_before(before, node)
        return node.outputs[0]


Adapter: TypeAlias = Callable[[ir.Node, AdapterTarget], None]


def _take(node: ir.Node, name: str) -> object:
    """Remove an attribute and return its value, None where it is absent."""
    attr = node.attributes.pop(name, None)
    if attr is None:
        return None
    if attr.is_ref():
        raise Refused(f"its attribute {name!r} is a parameter of a model-local function: inline the function")
    return attr.value


def _ints(value: object) -> np.ndarray:
    return np.array(value, dtype=np.int64).reshape(-1)


def _data_type(node: ir.Node) -> np.dtype:
    """NumPy type of the first input; float32 where nobody knows."""
    data = input_at(node, 0)
    return np.dtype(data.dtype.numpy()) if data is not None and data.dtype is not None else np.dtype(np.float32)


def _scalar(value: object, dtype: np.dtype) -> np.ndarray:
    """A float attribute as a scalar of ``dtype``, clipped to what that holds (bounds of float32 on float16 data)."""
    number = np.array(value, np.float64)
    if dtype.kind == "f":
        number = np.clip(number, np.finfo(dtype).min, np.finfo(dtype).max)
    return np.asarray(number, dtype)


def _moved_ints(*attributes: tuple[str, int]) -> Adapter:
    """Integer attributes that became int64 inputs at the given positions."""

    def adapt(node: ir.Node, target: AdapterTarget) -> None:
        for name, position in attributes:
            value = _take(node, name)
            if value is not None:
                set_input(node, position, target.constant(node, _ints(value), name))

    return adapt


def _broadcast_axis(node: ir.Node, target: AdapterTarget) -> None:
    """Opset 7 broadcasts as NumPy does; before, ``axis`` said where the second input starts."""
    axis, broadcast = _take(node, "axis"), _take(node, "broadcast")
    if broadcast and isinstance(axis, int):
        _align(node, 1, axis, target)


def _slope_axis(node: ir.Node, target: AdapterTarget) -> None:
    """PRelu-7: the slope broadcasts as NumPy does; before, a vector belonged to the channels."""
    slope = _dimensions(node.inputs[1])
    if slope is None or (len(slope) == 1 and slope[0] != 1):
        _align(node, 1, 1, target)


def _align(node: ir.Node, position: int, axis: int, target: AdapterTarget) -> None:
    """Append axes of size 1 to an input so that its first axis meets ``axis`` of the first input."""
    left, right = _dimensions(node.inputs[0]), _dimensions(node.inputs[position])
    if left is None or right is None:
        raise Refused("it broadcasts along an axis, and the ranks of its inputs are unknown")
    missing = len(left) - axis % len(left) - len(right)
    if missing > 0:
        shape = target.constant(node, _ints([0] * len(right) + [1] * missing), "aligned_shape")
        node.replace_input_with(position, target.insert(node, "Reshape", [node.inputs[position], shape], "aligned"))


def _moved_bound(node: ir.Node, target: AdapterTarget) -> None:
    """Clip-11: min and max became inputs of the type of the data."""
    for position, name in enumerate(("min", "max"), start=1):
        value = _take(node, name)
        if value is not None:
            set_input(node, position, target.constant(node, _scalar(value, _data_type(node)), f"clip_{name}"))


def _moved_padding(node: ir.Node, target: AdapterTarget) -> None:
    """Pad-11: pads and value became inputs."""
    set_input(node, 1, target.constant(node, _ints(_take(node, "pads")), "pads"))
    value = _take(node, "value")
    if value:
        set_input(node, 2, target.constant(node, _scalar(value, _data_type(node)), "pad_value"))


def _moved_scales(node: ir.Node, target: AdapterTarget) -> None:
    """Upsample-9: scales became an input."""
    scales = np.array(_take(node, "scales"), np.float32)
    set_input(node, 1, target.constant(node, scales, "scales"))


def _upsample_to_resize(node: ir.Node, target: AdapterTarget) -> None:
    """Upsample-9 is Resize-10 under another name."""
    node.op_type = "Resize"


def _resize_modes(node: ir.Node, target: AdapterTarget) -> None:
    """Resize-11 got a region of interest as its second input, and names for what Resize-10 did."""
    scales = input_at(node, 1)
    set_input(node, 1, target.constant(node, np.zeros(0, np.float32), "roi"))
    set_input(node, 2, scales)
    node.attributes.add(ir.AttrString("coordinate_transformation_mode", "asymmetric"))
    mode = node.attributes.get("mode")
    if mode is None or mode.value == "nearest":
        node.attributes.add(ir.AttrString("nearest_mode", _nearest_mode(scales)))


def _nearest_mode(scales: ir.Value | None) -> str:
    values = constant_array(scales)
    if values is None or not (values < 1).any():
        return "floor"
    if (values > 1).any():
        raise Refused("it enlarges one axis and shrinks another, with roundings that no later opset has in one node")
    return "ceil"


def _renamed(op_type: str) -> Adapter:
    def adapt(node: ir.Node, target: AdapterTarget) -> None:
        node.op_type = op_type

    return adapt


def _drop(name: str) -> Adapter:
    """An attribute that has no meaning at inference."""

    def adapt(node: ir.Node, target: AdapterTarget) -> None:
        node.attributes.pop(name, None)

    return adapt


def _only_first_output(what: str) -> Adapter:
    """Further outputs changed their meaning or went: fine where nobody reads them."""

    def adapt(node: ir.Node, target: AdapterTarget) -> None:
        if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
            raise Refused(what)
        node.resize_outputs(1)

    return adapt


def _batch_statistics(node: ir.Node, target: AdapterTarget) -> None:
    """BatchNormalization-9 lost `spatial`; only spatial=1 has a later form."""
    if _take(node, "spatial") == 0:
        raise Refused("spatial=0 (statistics for every position) has no form in later opsets")


def _training_form(node: ir.Node, target: AdapterTarget) -> None:
    """BatchNormalization-14 says that it computes statistics; before, five outputs did, read or not."""
    what = "it is in training form (its statistics are read), which changed in opset 14"
    if len(node.outputs) < 5:
        _only_first_output(what)(node, target)
    elif any(value.uses() or value.is_graph_output() for value in node.outputs[3:]):
        raise Refused(what)
    else:
        node.resize_outputs(3)
        node.attributes.add(ir.AttrInt64("training_mode", 1))


def _split_count(node: ir.Node, target: AdapterTarget) -> None:
    """Split-18 wants to be told the number of equal parts."""
    if input_at(node, 1) is None:
        node.attributes.add(ir.AttrInt64("num_outputs", len(node.outputs)))


def _softmax_axis(node: ir.Node, target: AdapterTarget) -> None:
    """Softmax-13 normalizes over one axis; before, over all axes from ``axis`` on, taken together.

    One of those axes suffices where the others have size 1. Otherwise: flatten, normalize, restore the shape.
    """
    axis = int_attribute(node, "axis", 1)
    node.attributes.pop("axis", None)
    shape = _dimensions(node.inputs[0])
    if shape is None or len(long_axes := _long_axes(shape, axis)) > 1:
        _flatten_around(node, target, axis)
    else:
        node.attributes.add(ir.AttrInt64("axis", (long_axes or [len(shape) - 1])[0]))


def _dimensions(value: ir.Value | None) -> list[int | None] | None:
    """Sizes, None for an unknown one; None where not even the rank is known."""
    if value is None or value.shape is None:
        return None
    return [size if isinstance(size, int) else None for size in value.shape]


def _long_axes(shape: Sequence[int | None], axis: int) -> list[int]:
    """Axes from ``axis`` on that are not known to have size 1."""
    return [k for k in range(axis % len(shape) if shape else 0, len(shape)) if shape[k] != 1]


def _flatten_around(node: ir.Node, target: AdapterTarget, axis: int) -> None:
    data, output = node.inputs[0], node.outputs[0]
    shape = target.insert(node, "Shape", [data], "shape")
    flat = target.insert(node, "Flatten", [data], "flat", [ir.AttrInt64("axis", axis)])
    node.replace_input_with(0, flat)
    node.attributes.add(ir.AttrInt64("axis", -1))
    _append_reshape(node, output, shape, target)


def _append_reshape(node: ir.Node, output: ir.Value, shape: ir.Value, target: AdapterTarget) -> None:
    """The result of ``node`` in ``shape`` takes the name, the readers and the place of its output."""
    name = target.names.fresh(f"{node.name or output.name}_shape")
    reshape = ir.Node("", "Reshape", [output, shape], num_outputs=1, name=name)
    put_behind(output, [reshape], target.names.fresh(f"{output.name}_flat"))
    output.shape = None


def _roi_offset(node: ir.Node, target: AdapterTarget) -> None:
    """RoiAlign-16 shifts by half a pixel unless told not to."""
    if "coordinate_transformation_mode" not in node.attributes:
        node.attributes.add(ir.AttrString("coordinate_transformation_mode", "output_half_pixel"))


def _dft_axis(node: ir.Node, target: AdapterTarget) -> None:
    """DFT-20: the axis became an input, and its default another one."""
    axis = int_attribute(node, "axis", 1)
    node.attributes.pop("axis", None)
    set_input(node, 2, target.constant(node, np.array(axis, np.int64), "dft_axis"))


def _grid_mode(node: ir.Node, target: AdapterTarget) -> None:
    """GridSample-20 renamed its modes."""
    mode = _take(node, "mode") or "bilinear"
    renamed = {"bilinear": "linear", "bicubic": "cubic"}.get(str(mode), str(mode))
    node.attributes.add(ir.AttrString("mode", renamed))


def _scale_per_channel(node: ir.Node, target: AdapterTarget) -> None:
    """GroupNormalization-21: scale and bias have one value a channel, before one a group."""
    groups = int_attribute(node, "num_groups", 1)
    shape = _dimensions(node.inputs[0])
    if shape is None or len(shape) < 2 or shape[1] is None:
        raise Refused("the number of channels of its input is unknown")
    for position in (1, 2):
        value = node.inputs[position]
        array = constant_array(value)
        if array is not None:
            repeated = np.repeat(array, shape[1] // groups)
            node.replace_input_with(position, target.constant(node, repeated, "per_channel"))
        else:
            node.replace_input_with(position, _repeat(node, value, shape[1] // groups, target))


def _repeat(node: ir.Node, value: ir.Value | None, times: int, target: AdapterTarget) -> ir.Value:
    """Each element of a vector ``times`` times, by nodes."""
    column = target.insert(node, "Reshape", [value, target.constant(node, _ints([-1, 1]), "column")], "column")
    block = target.insert(node, "Expand", [column, target.constant(node, _ints([1, times]), "times")], "repeated")
    return target.insert(node, "Reshape", [block, target.constant(node, _ints([-1]), "vector")], "per_channel")


def _refuse(reason: str) -> Adapter:
    def adapt(node: ir.Node, target: AdapterTarget) -> None:
        raise Refused(reason)

    return adapt


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
_BROADCASTING = ("Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor")
_axes_input = _moved_ints(("axes", 1))

ADAPTERS: dict[str, list[tuple[int, Adapter]]] = {
    **{name: [(7, _broadcast_axis)] for name in _BROADCASTING},
    "BatchNormalization": [
        (7, _drop("is_test")),
        (9, _batch_statistics),
        (14, _training_form),
    ],
    "Clip": [(11, _moved_bound)],
    "DFT": [(20, _dft_axis)],
    "Dropout": [
        (7, _drop("is_test")),
        (10, _only_first_output("its mask is read, and changed its type in opset 10")),
        (12, _drop("ratio")),
    ],
    "Gemm": [(7, _drop("broadcast"))],
    "GridSample": [(20, _grid_mode)],
    "GroupNormalization": [(21, _scale_per_channel)],
    "Hardmax": [(13, _softmax_axis)],
    "LogSoftmax": [(13, _softmax_axis)],
    "Pad": [(11, _moved_padding)],
    "PRelu": [(7, _slope_axis)],
    **{f"Reduce{name}": [(18, _axes_input)] for name in _REDUCTIONS},
    "ReduceSum": [(13, _axes_input)],
    "Resize": [(11, _resize_modes)],
    "RoiAlign": [(16, _roi_offset)],
    "Scan": [(9, _refuse("Scan of opset 8 has a batch axis, which later versions do not have"))],
    "Scatter": [(11, _renamed("ScatterElements"))],
    "Slice": [(10, _moved_ints(("starts", 1), ("ends", 2), ("axes", 3)))],
    "Softmax": [(13, _softmax_axis)],
    "Split": [(13, _moved_ints(("split", 1))), (18, _split_count)],
    "Squeeze": [(13, _axes_input)],
    "TopK": [(10, _moved_ints(("k", 1)))],
    "Unsqueeze": [(13, _axes_input)],
    "Upsample": [(9, _moved_scales), (10, _upsample_to_resize)],
}
"""Changes by operator, oldest first."""

TYPED = frozenset({"Clip", "GroupNormalization", "Hardmax", "LogSoftmax", "Pad", "Softmax"})
"""Operators whose adapters read the type or shape of the input (below opset 7: all)."""
