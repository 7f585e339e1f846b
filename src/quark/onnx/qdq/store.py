"""The stored form of a constant and the nodes that read it back, per kind of carrier.

Codes are computed when the file is written, one tensor at a time; the float tensor is held, not its place in the graph.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes  # noqa: F401 - registers the narrow types with NumPy
import numpy as np
import onnx_ir as ir

from quark.config.plan import TensorPlan
from quark.errors import ModelError
from quark.numerics.affine import fake_quantize, quantize
from quark.numerics.blocks import BLOCKS
from quark.numerics.formats import get_format
from quark.numerics.packing import pack
from quark.onnx.qdq.carriers import Kind, onnx_type
from quark.onnx.qdq.carry import AMD, OWN, Carried, axis_of, block_axis, single
from quark.operators.storage import stored


def source_of(carried: Carried) -> ir.TensorProtocol:
    """The float tensor of a constant."""
    tensor = carried.value.const_value
    if tensor is None:
        raise ModelError(f"the initializer {carried.name!r} has no values")
    return tensor


def codes_of(values: np.ndarray, tensor: TensorPlan) -> np.ndarray:
    """The codes of a constant under its plan: nearest, clipped, narrow where the spec is."""
    spec = tensor.spec
    if tensor.role == "bias":
        return np.rint(values.astype(np.float64) / np.asarray(tensor.scale, np.float64)).astype(np.int32)
    scale, zero_point = np.asarray(tensor.scale), np.asarray(tensor.zero_point)
    narrow = spec.narrow and spec.symmetric
    return quantize(values, scale, zero_point, get_format(spec.format), spec.granularity, spec.rounding, narrow)


def rounded_constant(carried: Carried) -> ir.Value:
    """The constant rounded to its format but kept in float32, as ``<name>_bf16`` (``EnableVaimlBF16``)."""
    tensor = carried.tensor
    values = fake_quantize(
        source_of(carried).numpy(),
        tensor.scale,
        tensor.zero_point,
        get_format(tensor.spec.format),
        tensor.spec.granularity,
    )
    return carried.parameters.add(np.asarray(values), f"{carried.name}_bf16")


def _typed(carried: Carried) -> ir.Value:
    """The initializer ``<name>_quantized`` in the ONNX type of its format."""
    source, tensor, dtype = source_of(carried), carried.tensor, onnx_type(carried.tensor.spec)

    def compute() -> ir.TensorProtocol:
        codes = codes_of(source.numpy(), tensor)
        as_bits = dtype.is_floating_point()
        return ir.tensor(codes.view(dtype.numpy()) if as_bits else codes.astype(dtype.numpy(), copy=False), dtype=dtype)

    name = f"{carried.name}_quantized"
    lazy = ir.LazyTensor(compute, dtype, ir.Shape(tuple(source.numpy().shape)), name=name)
    return carried.parameters.add(lazy, name)


def _standard(carried: Carried, domain: str = "", op_type: str = "DequantizeLinear") -> list[ir.Node]:
    inputs = [_typed(carried), *carried.parameters.of(carried.tensor)]
    return [single(carried, op_type, inputs, axis_of(carried.tensor), domain)]


def _extended(carried: Carried) -> list[ir.Node]:
    return _standard(carried, AMD, "ExtendedDequantizeLinear")


def _cast(carried: Carried) -> list[ir.Node]:
    nodes = [single(carried, "Cast", [_typed(carried)], {"to": int(ir.DataType.FLOAT)})]
    scale = np.asarray(carried.tensor.scale, np.float32)
    if np.any(scale != 1.0):
        rank, axis = len(carried.value.shape or ()), axis_of(carried.tensor).get("axis", 0)
        if scale.ndim:
            scale = scale.reshape([-1 if position == axis else 1 for position in range(rank)])
        factor = carried.parameters.add(scale, f"{carried.name}_scale")
        nodes.append(single(carried, "Mul", [nodes[-1].outputs[0], factor], {}, kind="Mul"))
    return nodes


def _element(carried: Carried) -> list[ir.Node]:
    """A format without an ONNX type: codes as a stream of bits."""
    values, tensor, add = source_of(carried).numpy(), carried.tensor, carried.parameters.add
    codes = pack(codes_of(values, tensor).reshape(-1), int(get_format(tensor.spec.format).bits))
    scale, zero_point = carried.parameters.of(tensor, ir.DataType.INT32)
    shape = add(np.array(values.shape, np.int64), f"{carried.name}_shape")
    inputs = [add(codes, f"{carried.name}_quantized"), scale, zero_point, shape]
    attributes: dict[str, int | str] = {"format": tensor.spec.format, "axis": axis_of(tensor).get("axis", 0)}
    return [single(carried, "PackedDequantize", inputs, attributes, OWN)]


def _block(carried: Carried) -> list[ir.Node]:
    """Packed element codes, block scales and shifts."""
    values, tensor, add = source_of(carried).numpy(), carried.tensor, carried.parameters.add
    row, axis = BLOCKS[tensor.spec.format], block_axis(carried)
    above = np.asarray(tensor.scale, np.float32) if row.tensor_scale else None
    kept = stored(row.encode(values, axis, tensor.spec.rounding, above), row, axis, above)
    names = ("codes", "scales", "shifts", "tensor_scale")
    inputs = [add(kept.tensors[name], f"{carried.name}_{name}") if name in kept.tensors else None for name in names]
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
