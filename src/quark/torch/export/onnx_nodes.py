"""The ONNX nodes of one quantized tensor, built from standard operators and those of ``quark.operators``.

integers of ONNX          QuantizeLinear, DequantizeLinear; constants are stored as codes behind DequantizeLinear
FP8 constants             FLOAT8 codes behind Cast and Mul: ONNX Runtime computes them once, when it loads
float16, bfloat16         Cast, and Cast back
blocks                    the block operators; constants packed behind BlockDequantize
other elements            QuantizeDequantize; constants packed behind PackedDequantize
dynamic scales            the scale from ReduceMin and ReduceMax, per tensor, token or group
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from onnx import NodeProto, TensorProto, helper

from quark.errors import known
from quark.numerics.affine import axis_of
from quark.numerics.blocks import Block, Encoded
from quark.numerics.elements import Float, Int
from quark.numerics.formats import get_format
from quark.numerics.granularity import Channel, Group, Tensor
from quark.operators import OWN_DOMAIN, stored, stream
from quark.operators.block_operators import ROUNDING_MODES, operator_of
from quark.torch.export.layout import BlockLayout, ElementLayout, PairLayout, layout_of_quantizer, store
from quark.torch.export.onnx_marks import Marked
from quark.torch.export.onnx_says import check_activation, check_constant, is_standard, refuse
from quark.torch.fake_quantize import FakeQuantize, parts

ACTIVATIONS = ("INT8", "UINT8", "INT16", "UINT16")
SMALLEST = float(np.finfo(np.float32).tiny)


class Nodes:
    """Nodes and constants that are being made for one tensor.

    Attributes:
        nodes, constants: in order.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def constant(self, kind: str, value: np.ndarray, dtype: int | None = None) -> str:
        """An initializer; ``dtype`` for types that NumPy does not have, whose bytes ``value`` holds."""
        name = f"{self.name}.{kind}"
        code = helper.np_dtype_to_tensor_dtype(value.dtype) if dtype is None else dtype
        made = TensorProto(name=name, data_type=code, dims=value.shape, raw_data=np.ascontiguousarray(value).tobytes())
        self.constants.append(made)
        return name

    def codes(self, kind: str, codes: np.ndarray, row: Any) -> str:
        """An initializer of codes; those below a byte as ONNX packs them."""
        if row.bits >= 8:
            return self.constant(kind, codes.astype(row.code_dtype))
        name, dtype = f"{self.name}.{kind}", getattr(TensorProto, row.onnx_type)
        made = TensorProto(name=name, data_type=dtype, dims=codes.shape, raw_data=stream(codes, row.bits).tobytes())
        self.constants.append(made)
        return name

    def _op(self, kind: str, inputs: Sequence[str], domain: str = "", **attributes: Any) -> str:
        """A node; the name of its only output."""
        name = f"{self.name}.{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name, domain=domain or None, **attributes))
        return name

    op = _op


def nodes_of(marked: Marked, source: str, length: int | None = None) -> tuple[Nodes, str]:
    """The nodes that quantize a tensor; the name of what they make.

    Args:
        marked: the quantizer, and the value of a constant.
        source: name of the float tensor, for activations.
        length: of its last axis, if it is known.

    Raises:
        ConfigError: a scheme that ONNX cannot say.
    """
    nodes = Nodes(marked.name)
    if marked.value is not None:
        return nodes, constant(nodes, marked)
    for part in parts(marked.quantizer):
        if part.enabled:
            source = activation(nodes, part, source, length)
    return nodes, source


# ---- activations -----------------------------------------------------------------------------------------------------


def activation(nodes: Nodes, part: FakeQuantize, x: str, length: int | None = None) -> str:
    """One stage of an activation."""
    check_activation(nodes.name, part.stage)
    row, stage = part.stage.format, part.stage
    if isinstance(row, Block):
        return block_activation(nodes, part, row, x)
    if row.unit_scale:
        kind = getattr(TensorProto, str(row.onnx_type))
        return nodes.op("Cast", [nodes.op("Cast", [x], to=kind)], to=TensorProto.FLOAT)
    if not stage.calibrated:
        return dynamic(nodes, part, x, length)
    axis = part.granularity.axis if isinstance(part.granularity, Channel) else 0
    found = ready_scale(nodes, part)
    if row.onnx_type in ACTIVATIONS:
        points, row = movable(known(part.zero_point, "a zero point"), row)
        scale, zero = parameters(nodes, found, points, row)
        q = nodes.op("QuantizeLinear", [x, scale, zero], axis=axis)
        bare = row.onnx_type == "INT8"  # all zero points are 0
        return nodes.op("DequantizeLinear", [q, scale] if bare else [q, scale, zero], axis=axis)
    scale = nodes.constant("scale", array(found).astype(np.float32))
    zeros = np.zeros(tuple(found.shape), np.int32) if part.zero_point is None else array(part.zero_point)
    zero = nodes.constant("zero_point", zeros.astype(np.int32))
    return nodes.op("QuantizeDequantize", [x, scale, zero], OWN_DOMAIN, format=row.name, axis=axis)


def movable(zero_point: torch.Tensor, row: Any) -> tuple[torch.Tensor, Any]:
    """Zero points and type in which ONNX Runtime can move the DequantizeLinear of an int8 activation.

    From opset 21 it makes a QuantizeLinear of the wrong type where it moves one with an int8 zero point past a Reshape
    or Transpose, its own in front of a Gemm too, and refuses the model (1.28 to 1.32). It moves those that have no zero
    point, and uint8: the same values, with codes and zero point larger by 128.
    """
    if row.onnx_type != "INT8" or not zero_point.any():
        return zero_point, row
    return zero_point.int() + 128, get_format("uint8")


def ready_scale(nodes: Nodes, part: FakeQuantize) -> torch.Tensor:
    """A static scale, which must be there."""
    if part.scale is None:
        refuse(nodes.name, "no sample has given it a scale")
    return part.scale


def array(value: torch.Tensor) -> np.ndarray:
    """A tensor in NumPy."""
    return value.detach().cpu().numpy()


def parameters(nodes: Nodes, scale: torch.Tensor, zero_point: torch.Tensor | None, row: Any) -> tuple[str, str]:
    """Scale and zero point of the standard operators."""
    zeros = array(known(zero_point, "a zero point"))
    if row.bits == 32 and zeros.any():
        refuse(nodes.name, "int32 has no zero points")
    zero = "" if row.bits == 32 else nodes.codes("zero_point", zeros.astype(np.int32), row)
    return nodes.constant("scale", array(scale).astype(np.float32)), zero


def block_activation(nodes: Nodes, part: FakeQuantize, row: Block, x: str) -> str:
    """An activation in blocks."""
    axis = axis_of(part.granularity)
    mode = ROUNDING_MODES[part.stage.spec.rounding]
    operator = operator_of(row)
    if operator.rounds:
        return nodes.op(operator.name, [x], operator.domain, axis=axis, rounding_mode=mode, **operator.attributes)
    inputs = [x]
    if row.tensor_scale:
        scale = array(ready_scale(nodes, part)).astype(np.float32)
        inputs.append(nodes.constant("tensor_scale", scale.reshape(())))
    return nodes.op(operator.name, inputs, operator.domain, **operator.attributes, axis=axis)


def dynamic(nodes: Nodes, part: FakeQuantize, x: str, length: int | None) -> str:
    """A scale from the values themselves: x / s rounded and clipped, times s."""
    if isinstance(part.granularity, Group):
        return in_groups(nodes, part, x, length, part.granularity.size)
    return under_own_scale(nodes, part, x)


def in_groups(nodes: Nodes, part: FakeQuantize, x: str, length: int | None, size: int) -> str:
    """A scale per ``size`` values of the last axis; zeros, which change no range, fill a short last group."""
    if length is None:
        refuse(nodes.name, "the graph does not say how long the last axis is, which is cut into groups")
    if length <= size:
        return under_own_scale(nodes, part, x)
    axis, missing = nodes.constant("axis", np.array([-1], np.int64)), -length % size
    if missing:
        ends = nodes.constant("filled", np.array([0, missing], np.int64))
        x = nodes.op("Pad", [x, ends, number(nodes, "filling", 0.0), axis])
    rows = nodes.op("Reshape", [x, nodes.constant("groups", np.array([-1, size], np.int64))])
    y = nodes.op("Reshape", [under_own_scale(nodes, part, rows), nodes.op("Shape", [x])])
    if missing:
        start, end = (nodes.constant(name, np.array([at], np.int64)) for name, at in (("start", 0), ("end", length)))
        y = nodes.op("Slice", [y, start, end, axis])
    return y


def under_own_scale(nodes: Nodes, part: FakeQuantize, x: str) -> str:
    """A scale for all, or for each row of the last axis."""
    row, granularity = part.stage.format, part.granularity
    axes = reduced(nodes, granularity)
    high = nodes.op("Max", [nodes.op("ReduceMax", [x, *axes], keepdims=1), number(nodes, "zero", 0.0)])
    low = nodes.op("Min", [nodes.op("ReduceMin", [x, *axes], keepdims=1), number(nodes, "zero", 0.0)])
    grid = part.stage.grid
    span = nodes.op("Max", [high, nodes.op("Neg", [low])]) if grid.centred else nodes.op("Sub", [high, low])
    divisor = nodes.constant("divisor", np.asarray(grid.divisor, np.float64))
    wide = [nodes.op("Cast", [span], to=TensorProto.DOUBLE), divisor]
    exact = nodes.op("Div", wide)
    scale = nodes.op("Cast", [exact], to=TensorProto.FLOAT)
    tiny = nodes.op("Less", [scale, number(nodes, "tiny", SMALLEST)])
    scale = nodes.op("Where", [tiny, number(nodes, "one", 1.0), scale])
    y = nodes.op("Div", [x, scale])
    if isinstance(row, Int):
        zero = number(nodes, "middle", float(row.middle)) if grid.centred else moving_zero(nodes, row, low, scale)
        placed = nodes.op("Add", [nodes.op("Round", [y]), zero])
        bounds = [number(nodes, "lowest", float(row.min)), number(nodes, "highest", float(row.max))]
        y = nodes.op("Sub", [nodes.op("Clip", [placed, *bounds]), zero])
    else:
        inputs = [y, number(nodes, "unit", 1.0), nodes.constant("nothing", np.asarray(0, np.int32))]
        y = nodes.op("QuantizeDequantize", inputs, OWN_DOMAIN, format=row.name, axis=0)
    return nodes.op("Mul", [y, scale])


def moving_zero(nodes: Nodes, row: Int, low: str, scale: str) -> str:
    """The zero point clip(round(min - lo / s))."""
    steps = nodes.op("Sub", [number(nodes, "first", float(row.min)), nodes.op("Div", [low, scale])])
    bounds = [number(nodes, "least", float(row.min)), number(nodes, "most", float(row.max))]
    return nodes.op("Clip", [nodes.op("Round", [steps]), *bounds])


def number(nodes: Nodes, kind: str, value: float) -> str:
    """A float constant, once per tensor."""
    name = f"{nodes.name}.{kind}"
    if not any(made.name == name for made in nodes.constants):
        nodes.constant(kind, np.asarray(value, np.float32))
    return name


def reduced(nodes: Nodes, granularity: Any) -> list[str]:
    """The axes that share a scale, as an input; nothing means all."""
    return [] if isinstance(granularity, Tensor) else [nodes.constant("axes", np.array([-1], np.int64))]


# ---- constants -------------------------------------------------------------------------------------------------------


def constant(nodes: Nodes, marked: Marked) -> str:
    """The stored form of a weight or bias."""
    value = known(marked.value, marked.name).detach().float()
    layout = layout_of_quantizer(marked.quantizer, tuple(value.shape), "order")
    check_constant(marked.name, layout)
    made = {key: kept.cpu() for key, kept in store(value, marked.quantizer, "order", marked.frozen).items()}
    if isinstance(layout, PairLayout):
        made = layout.absolute(made)
        layout = layout.second
    if isinstance(layout, BlockLayout):
        return block_constant(nodes, layout, made)
    if not isinstance(layout, ElementLayout):
        raise TypeError(f"no layout of {nodes.name}")
    codes = layout.turn(layout.codes.get(made[""], layout.element, layout.turned(layout.shape), "order"))
    return element_constant(nodes, layout, array(codes.contiguous()), made)


def block_constant(nodes: Nodes, layout: BlockLayout, made: dict[str, torch.Tensor]) -> str:
    """Packed blocks."""
    row = layout.block
    encoded = layout.encoded(made)
    plain = Encoded(*(None if part is None else array(part) for part in encoded))
    above = made[layout.name("scale", 1)].item() if row.tensor_scale else None
    kept = stored(plain, row, axis_of(layout.granularity), above)
    inputs = [nodes.constant(name, value) for name, value in kept.tensors.items()]
    if "tensor_scale" in kept.tensors and "shifts" not in kept.tensors:
        inputs.insert(2, "")
    return nodes.op("BlockDequantize", inputs, OWN_DOMAIN, **kept.attributes)


def element_constant(nodes: Nodes, layout: ElementLayout, codes: np.ndarray, made: dict[str, torch.Tensor]) -> str:
    """Codes with their scales."""
    row: Any = layout.element
    kind = getattr(TensorProto, row.onnx_type) if row.onnx_type else None
    if not layout.stage.needs_range:
        return nodes.op("Cast", [nodes.constant("codes", codes, kind)], to=TensorProto.FLOAT)
    scale, zero = layout.scale(made), layout.zero_point(made)
    if is_standard(layout):
        return standard_constant(nodes, layout, codes, scale, zero)
    if isinstance(row, Float) and kind is not None and row.bits == 8:
        return scaled_constant(nodes, layout, codes, array(scale), kind)
    return packed_constant(nodes, layout, codes, scale, zero)


def scaled_constant(nodes: Nodes, layout: ElementLayout, codes: np.ndarray, scale: np.ndarray, kind: int) -> str:
    """Codes behind Cast and Mul, in the split shape in which the scales of groups and blocks broadcast."""
    whole, *more = layout.granularity.pieces(layout.shape)
    if more:  # a shorter last block: a scale per element
        full = layout.granularity.expand(scale, layout.shape)
        values = nodes.op("Cast", [nodes.constant("codes", codes, kind)], to=TensorProto.FLOAT)
        return nodes.op("Mul", [values, nodes.constant("scale", np.ascontiguousarray(full))])
    values = nodes.op("Cast", [nodes.constant("codes", codes.reshape(whole.shape), kind)], to=TensorProto.FLOAT)
    y = nodes.op("Mul", [values, nodes.constant("scale", scale.reshape(whole.parameter_shape))])
    if whole.shape == tuple(layout.shape):
        return y
    return nodes.op("Reshape", [y, nodes.constant("shape", np.array(layout.shape, np.int64))])


def standard_constant(
    nodes: Nodes, layout: ElementLayout, codes: np.ndarray, scale: torch.Tensor, zero: torch.Tensor
) -> str:
    """Codes behind DequantizeLinear."""
    row: Any = layout.element
    stored_codes = nodes.codes("codes", codes, row)
    attributes: dict[str, Any] = {}
    granularity = layout.granularity
    if isinstance(granularity, Channel):
        attributes = {"axis": granularity.axis}
    elif isinstance(granularity, Group):
        axis = granularity.axis % len(layout.shape)
        attributes = {"axis": axis, "block_size": min(granularity.size, layout.shape[axis])}
    names = [name for name in parameters(nodes, scale, zero, row) if name]
    return nodes.op("DequantizeLinear", [stored_codes, *names], **attributes)


def packed_constant(
    nodes: Nodes, layout: ElementLayout, codes: np.ndarray, scale: torch.Tensor, zero: torch.Tensor
) -> str:
    """Codes of a type that ONNX (or its runtime) does not have; groups become rows."""
    granularity, shape = layout.granularity, layout.shape
    axis, rows = 0, shape
    if isinstance(granularity, Group):
        size = min(granularity.size, shape[-1])
        rows = (prod(shape) // size, size)
    elif isinstance(granularity, Channel):
        axis = granularity.axis
    inputs = [
        nodes.constant("codes", stream(codes, int(layout.element.bits))),
        nodes.constant("scale", array(scale.contiguous()).astype(np.float32).reshape(-1 if scale.dim() else ())),
        nodes.constant("zero_point", array(zero.contiguous()).astype(np.int32).reshape(-1 if zero.dim() else ())),
        nodes.constant("shape", np.array(rows, np.int64)),
    ]
    y = nodes.op("PackedDequantize", inputs, OWN_DOMAIN, format=layout.element.name, axis=axis)
    return y if rows == shape else nodes.op("Reshape", [y, nodes.constant("whole", np.array(shape, np.int64))])
