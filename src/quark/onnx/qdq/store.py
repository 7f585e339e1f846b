"""The stored form of a constant and the nodes that read it back, per kind of carrier.

Codes are computed when the file is written, one tensor at a time; the float tensor is held, not its place in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import ml_dtypes  # noqa: F401 - registers the narrow types with NumPy
import numpy as np
import onnx_ir as ir

from quark.config.plan import TensorPlan
from quark.ir.surgery import let_go, shape_of, tensor_of
from quark.numerics.blocks import Block
from quark.numerics.granularity import Channel, Group
from quark.numerics.packing import pack
from quark.onnx.qdq.activation_nodes import AMD, OWN, QuantizedTensor, axis_of, block_axis
from quark.onnx.qdq.node_kinds import Kind, onnx_type
from quark.operators.storage import stored


def codes_of(values: np.ndarray, tensor: TensorPlan) -> np.ndarray:
    """The codes of a constant under its plan: nearest, clipped, narrow where the spec is."""
    if tensor.role == "bias":
        return np.rint(values.astype(np.float64) / np.asarray(tensor.scale, np.float64)).astype(np.int32)
    return tensor.spec.coding.quantize(values, np.asarray(tensor.scale), np.asarray(tensor.zero_point))


def rounded_constant(item: QuantizedTensor) -> ir.Value:
    """The constant rounded to its format but kept in float32, as ``<name>_bf16`` (``EnableVaimlBF16``)."""
    tensor = item.tensor
    values = tensor.spec.coding.fake_quantize(tensor_of(item.value).numpy(), tensor.scale, tensor.zero_point)
    return item.parameters.add(np.asarray(values), f"{item.name}_bf16")


def typed(item: QuantizedTensor) -> ir.Value:
    """The initializer ``<name>_quantized`` in the ONNX type of its format, made once."""
    made = item.parameters.codes
    if item.name not in made:
        made[item.name] = _typed(item)
    return made[item.name]


def _typed(item: QuantizedTensor) -> ir.Value:
    source, tensor, dtype = tensor_of(item.value), item.tensor, onnx_type(item.tensor.spec)

    def compute() -> ir.TensorProtocol:
        codes = codes_of(source.numpy(), tensor)
        let_go(source)
        as_bits = dtype.is_floating_point()
        return ir.Tensor(codes.view(dtype.numpy()) if as_bits else codes.astype(dtype.numpy(), copy=False), dtype=dtype)

    name = f"{tensor.name}_quantized"  # whole: the one place that says whose codes these are
    lazy = ir.LazyTensor(compute, dtype, shape_of(source), name=name)
    return item.parameters.add(lazy, name)


def _standard(item: QuantizedTensor, domain: str = "", op_type: str = "DequantizeLinear") -> list[ir.Node]:
    inputs = [typed(item), *item.parameters.of(item.tensor)]
    return [item.node(op_type, inputs, axis_of(item.tensor), domain)]


def _extended(item: QuantizedTensor) -> list[ir.Node]:
    return _standard(item, AMD, "ExtendedDequantizeLinear")


def _cast(item: QuantizedTensor) -> list[ir.Node]:
    """Codes behind Cast, Sub and Mul, which ONNX Runtime computes when it loads the model and never fuses."""
    tensor = item.tensor
    nodes = [item.node("Cast", [typed(item)], {"to": int(ir.DataType.FLOAT)})]
    steps = [("Mul", np.asarray(tensor.scale, np.float32), 1.0)]
    if tensor.spec.row.has_zero_point:
        steps.insert(0, ("Sub", np.asarray(tensor.zero_point, np.float32), 0.0))
    value = nodes[0].outputs[0]
    for op_type, values, idle in steps:
        if np.any(values != idle):
            spread, operand = _beside(item, values, op_type)
            nodes += [*spread, item.node(op_type, [value, operand], {}, kind=op_type)]
            value = nodes[-1].outputs[0]
    return nodes


def turned_constant(item: QuantizedTensor) -> list[ir.Node]:
    """The same of a constant of three axes whose codes are stored with the last two exchanged."""
    source, spec, perm = tensor_of(item.value), item.tensor.spec, (0, 2, 1)
    axis = axis_of(item.tensor).get("axis")
    granularity = spec.granularity if axis is None else Channel(perm.index(axis))
    sizes = source.shape.numpy()
    stored = ir.LazyTensor(
        lambda: ir.Tensor(np.ascontiguousarray(source.numpy().transpose(perm))),
        dtype=source.dtype,
        shape=ir.Shape([sizes[k] for k in perm]),
        name=item.value.name,
    )
    value = ir.Value(name=item.value.name, shape=stored.shape, type=item.value.type, const_value=stored)
    turned = replace(item.tensor, spec=replace(spec, granularity=granularity))
    nodes = _cast(replace(item, value=value, tensor=turned))
    return [*nodes, item.node("Transpose", [nodes[-1].outputs[0]], {"perm": perm}, kind="Transpose")]


def _beside(item: QuantizedTensor, values: np.ndarray, op_type: str) -> tuple[list[ir.Node], ir.Value]:
    """Parameters in a shape that broadcasts over the constant: as they are, per channel, or gathered per group."""
    granularity, shape = item.tensor.spec.granularity, tuple(tensor_of(item.value).shape.numpy())
    name = f"{item.name}_{'scale' if op_type == 'Mul' else 'zero_point'}"
    if not values.ndim:
        return [], item.parameters.add(values, name)
    if isinstance(granularity, Group):
        axis = granularity.axis % len(shape)
        index = item.parameters.add(np.arange(shape[axis]) // granularity.size, f"{name}_index")
        kept = item.parameters.add(values.reshape(granularity.grid(shape)), name)
        gather = item.node("Gather", [kept, index], {"axis": axis}, kind=f"{op_type}_Gather")
        return [gather], gather.outputs[0]
    axis = axis_of(item.tensor)["axis"]
    others = [k for k in range(len(shape)) if k != axis]
    return [], item.parameters.add(np.expand_dims(values.reshape(-1), others), name)


def _element(item: QuantizedTensor) -> list[ir.Node]:
    """A format without an ONNX type: codes as a stream of bits."""
    values, tensor, add = tensor_of(item.value).numpy(), item.tensor, item.parameters.add
    codes = pack(codes_of(values, tensor).reshape(-1), int(tensor.spec.row.bits))
    scale, zero_point = item.parameters.of(tensor, ir.DataType.INT32)
    shape = add(np.array(values.shape, np.int64), f"{item.name}_shape")
    inputs = [add(codes, f"{tensor.name}_quantized"), scale, zero_point, shape]
    attributes: dict[str, int | str] = {"format": tensor.spec.format, "axis": axis_of(tensor).get("axis", 0)}
    return [item.node("PackedDequantize", inputs, attributes, OWN)]


def _block(item: QuantizedTensor) -> list[ir.Node]:
    """Packed element codes, block scales and shifts."""
    values, tensor, add = tensor_of(item.value).numpy(), item.tensor, item.parameters.add
    row, axis = cast(Block, tensor.spec.row), block_axis(item)
    above = np.asarray(tensor.scale, np.float32) if row.tensor_scale else None
    kept = stored(row.encode(values, axis, tensor.spec.rounding, above), row, axis, above)
    names = ("codes", "scales", "shifts", "tensor_scale")
    inputs = [add(kept.tensors[name], f"{tensor.name}_{name}") if name in kept.tensors else None for name in names]
    while inputs[-1] is None:
        inputs.pop()
    return [item.node("BlockDequantize", inputs, kept.attributes, OWN)]  # type: ignore[arg-type]


CONSTANT_NODES: dict[Kind, Callable[[QuantizedTensor], list[ir.Node]]] = {
    "standard": _standard,
    "extended": _extended,
    "cast": _cast,
    "element": _element,
    "block": _block,
}
