"""The stored form of a constant and the nodes that read it back, per kind of carrier.

Codes are computed when the file is written, one tensor at a time; the float tensor is held, not its place in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import ml_dtypes  # noqa: F401 - registers the narrow types with NumPy
import numpy as np
import onnx_ir as ir

from quark.config.plan import TensorPlan
from quark.numerics.affine import fake_quantize, quantize
from quark.numerics.blocks import Block
from quark.numerics.granularity import Group
from quark.numerics.packing import pack
from quark.onnx.graph.surgery import let_go, shape_of, tensor_of
from quark.onnx.qdq.carriers import Kind, onnx_type
from quark.onnx.qdq.carry import AMD, OWN, Carried, axis_of, block_axis, single
from quark.operators.storage import stored


def codes_of(values: np.ndarray, tensor: TensorPlan) -> np.ndarray:
    """The codes of a constant under its plan: nearest, clipped, narrow where the spec is."""
    spec = tensor.spec
    if tensor.role == "bias":
        return np.rint(values.astype(np.float64) / np.asarray(tensor.scale, np.float64)).astype(np.int32)
    scale, zero_point = np.asarray(tensor.scale), np.asarray(tensor.zero_point)
    return quantize(values, scale, zero_point, spec.row, spec.granularity, spec.rounding, spec.narrow_codes)


def rounded_constant(carried: Carried) -> ir.Value:
    """The constant rounded to its format but kept in float32, as ``<name>_bf16`` (``EnableVaimlBF16``)."""
    tensor = carried.tensor
    values = fake_quantize(
        tensor_of(carried.value).numpy(),
        tensor.scale,
        tensor.zero_point,
        tensor.spec.row,
        tensor.spec.granularity,
    )
    return carried.parameters.add(np.asarray(values), f"{carried.name}_bf16")


def typed(carried: Carried) -> ir.Value:
    """The initializer ``<name>_quantized`` in the ONNX type of its format, made once."""
    made = carried.parameters.codes
    if carried.name not in made:
        made[carried.name] = _typed(carried)
    return made[carried.name]


def _typed(carried: Carried) -> ir.Value:
    source, tensor, dtype = tensor_of(carried.value), carried.tensor, onnx_type(carried.tensor.spec)

    def compute() -> ir.TensorProtocol:
        codes = codes_of(source.numpy(), tensor)
        let_go(source)
        as_bits = dtype.is_floating_point()
        return ir.Tensor(codes.view(dtype.numpy()) if as_bits else codes.astype(dtype.numpy(), copy=False), dtype=dtype)

    name = f"{tensor.name}_quantized"  # whole: the one place that says whose codes these are
    lazy = ir.LazyTensor(compute, dtype, shape_of(source), name=name)
    return carried.parameters.add(lazy, name)


def _standard(carried: Carried, domain: str = "", op_type: str = "DequantizeLinear") -> list[ir.Node]:
    inputs = [typed(carried), *carried.parameters.of(carried.tensor)]
    return [single(carried, op_type, inputs, axis_of(carried.tensor), domain)]


def _extended(carried: Carried) -> list[ir.Node]:
    return _standard(carried, AMD, "ExtendedDequantizeLinear")


def _cast(carried: Carried) -> list[ir.Node]:
    """Codes behind Cast, Sub and Mul, which ONNX Runtime computes when it loads the model and never fuses."""
    tensor = carried.tensor
    nodes = [single(carried, "Cast", [typed(carried)], {"to": int(ir.DataType.FLOAT)})]
    steps = [("Mul", np.asarray(tensor.scale, np.float32), 1.0)]
    if tensor.spec.row.has_zero_point:
        steps.insert(0, ("Sub", np.asarray(tensor.zero_point, np.float32), 0.0))
    value = nodes[0].outputs[0]
    for op_type, values, idle in steps:
        if np.any(values != idle):
            spread, operand = _beside(carried, values, op_type)
            nodes += [*spread, single(carried, op_type, [value, operand], {}, kind=op_type)]
            value = nodes[-1].outputs[0]
    return nodes


def _beside(carried: Carried, values: np.ndarray, op_type: str) -> tuple[list[ir.Node], ir.Value]:
    """Parameters in a shape that broadcasts over the constant: as they are, per channel, or gathered per group."""
    granularity, shape = carried.tensor.spec.granularity, tuple(tensor_of(carried.value).shape.numpy())
    name = f"{carried.name}_{'scale' if op_type == 'Mul' else 'zero_point'}"
    if not values.ndim:
        return [], carried.parameters.add(values, name)
    if isinstance(granularity, Group):
        axis = granularity.axis % len(shape)
        index = carried.parameters.add(np.arange(shape[axis]) // granularity.size, f"{name}_index")
        kept = carried.parameters.add(values.reshape(granularity.grid(shape)), name)
        gather = single(carried, "Gather", [kept, index], {"axis": axis}, kind=f"{op_type}_Gather")
        return [gather], gather.outputs[0]
    axis = axis_of(carried.tensor).get("axis", 0)
    return [], carried.parameters.add(values.reshape([-1 if k == axis else 1 for k in range(len(shape))]), name)


def _element(carried: Carried) -> list[ir.Node]:
    """A format without an ONNX type: codes as a stream of bits."""
    values, tensor, add = tensor_of(carried.value).numpy(), carried.tensor, carried.parameters.add
    codes = pack(codes_of(values, tensor).reshape(-1), int(tensor.spec.row.bits))
    scale, zero_point = carried.parameters.of(tensor, ir.DataType.INT32)
    shape = add(np.array(values.shape, np.int64), f"{carried.name}_shape")
    inputs = [add(codes, f"{tensor.name}_quantized"), scale, zero_point, shape]
    attributes: dict[str, int | str] = {"format": tensor.spec.format, "axis": axis_of(tensor).get("axis", 0)}
    return [single(carried, "PackedDequantize", inputs, attributes, OWN)]


def _block(carried: Carried) -> list[ir.Node]:
    """Packed element codes, block scales and shifts."""
    values, tensor, add = tensor_of(carried.value).numpy(), carried.tensor, carried.parameters.add
    row, axis = cast(Block, tensor.spec.row), block_axis(carried)
    above = np.asarray(tensor.scale, np.float32) if row.tensor_scale else None
    kept = stored(row.encode(values, axis, tensor.spec.rounding, above), row, axis, above)
    names = ("codes", "scales", "shifts", "tensor_scale")
    inputs = [add(kept.tensors[name], f"{tensor.name}_{name}") if name in kept.tensors else None for name in names]
    while inputs[-1] is None:
        inputs.pop()
    return [single(carried, "BlockDequantize", inputs, kept.attributes, OWN)]  # type: ignore[arg-type]


CONSTANT_NODES: dict[Kind, Callable[[Carried], list[ir.Node]]] = {
    "standard": _standard,
    "extended": _extended,
    "cast": _cast,
    "element": _element,
    "block": _block,
}
