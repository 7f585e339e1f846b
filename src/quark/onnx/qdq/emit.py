"""Emission: write the Plan into the graph, once.

An activation X gets X -> QuantizeLinear -> DequantizeLinear; a constant W becomes its stored codes behind a
DequantizeLinear. Names: ``X_scale``, ``X_zero_point``, ``X_QuantizeLinear``, ``W_quantized`` and so on, as compilers for
this interface expect. Codes are computed when the file is written, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

import ml_dtypes  # noqa: F401 - registers the 4-bit types with NumPy
import numpy as np
import onnx_ir as ir

from quark.config.options import Options
from quark.config.plan import Plan, TensorPlan
from quark.errors import ModelError
from quark.numerics.affine import quantize
from quark.numerics.formats import get_format
from quark.numerics.granularity import Channel, Group
from quark.onnx.graph.surgery import add_initializer
from quark.onnx.passes.constants import remove_unused
from quark.onnx.qdq.carriers import onnx_type


def emit(model: ir.Model, plan: Plan, options: Options) -> None:
    """Insert the Q and DQ nodes of a complete plan into ``model``, in place."""
    values = {value.name: value for value in _all_values(model)}
    parameters: dict[str, tuple[ir.Value, ir.Value]] = {}
    for tensor in plan:
        if tensor.scale is None:
            raise ModelError(f"the plan has no scale for {tensor.name!r}")
        shared = parameters.get(tensor.group)
        if shared is None or tensor.role != "activation":
            shared = _parameters(model.graph, tensor)
            parameters[tensor.group] = shared
        if tensor.role == "activation":
            _activation(model.graph, values[tensor.name], tensor, shared, options)
        else:
            _constant(model.graph, values[tensor.name], tensor, shared, options)
    remove_unused(model)


def _all_values(model: ir.Model) -> Iterable[ir.Value]:
    yield from model.graph.inputs
    yield from model.graph.initializers.values()
    for node in model.graph:
        yield from node.outputs


def _parameters(graph: ir.Graph, tensor: TensorPlan) -> tuple[ir.Value, ir.Value]:
    """The scale and zero point initializers; the zero point also carries the type of the codes."""
    prefix = f"{tensor.name}_quantized" if tensor.role == "bias" else tensor.name
    scale = ir.tensor(np.asarray(tensor.scale, np.float32), name=f"{prefix}_scale")
    dtype = onnx_type(tensor.spec)
    zero_point = ir.tensor(np.asarray(tensor.zero_point).astype(dtype.numpy()), dtype=dtype, name=f"{prefix}_zero_point")
    return add_initializer(graph, scale, f"{prefix}_scale"), add_initializer(graph, zero_point, f"{prefix}_zero_point")


def _attributes(tensor: TensorPlan) -> dict[str, int]:
    granularity = tensor.spec.granularity
    if isinstance(granularity, Channel):
        return {"axis": 0 if tensor.role == "bias" else granularity.axis} if np.ndim(tensor.scale) else {}
    if isinstance(granularity, Group):
        return {"axis": granularity.axis, "block_size": granularity.size}
    return {"axis": 0} if np.ndim(tensor.scale) else {}


def _node(op_type: str, name: str, inputs: list[ir.Value], output: str, like: ir.Value, attributes: dict[str, int]) -> ir.Node:
    dtype = like.dtype if op_type == "DequantizeLinear" else inputs[2].dtype
    value = ir.Value(name=output, shape=like.shape, type=ir.TensorType(dtype) if dtype is not None else None)
    return ir.node(op_type, inputs, attributes=attributes, outputs=[value], name=name)


def _pair(tensor: TensorPlan, value: ir.Value, shared: tuple[ir.Value, ir.Value], suffix: str = "") -> list[ir.Node]:
    name, attributes = f"{tensor.name}{suffix}", _attributes(tensor)
    q = _node(
        "QuantizeLinear", f"{name}_QuantizeLinear", [value, *shared], f"{name}_QuantizeLinear_Output", value, attributes
    )
    dq = _node(
        "DequantizeLinear",
        f"{name}_DequantizeLinear",
        [q.outputs[0], *shared],
        f"{name}_DequantizeLinear_Output",
        value,
        attributes,
    )
    return [q, dq]


# ---- activations ---------------------------------------------------------------------------------------------------------


def _activation(
    graph: ir.Graph, value: ir.Value, tensor: TensorPlan, shared: tuple[ir.Value, ir.Value], options: Options
) -> None:
    uses = [use for use in value.uses() if tensor.readers is None or (use.node.name or "") in tensor.readers]
    if options.DedicatedQDQPair and len(uses) > 1:
        for number, use in enumerate(uses, 1):
            pair = _pair(tensor, value, shared, f"_{number}")
            _insert(graph, value, pair)
            use.node.replace_input_with(use.idx, pair[1].outputs[0])
        return
    pair = _pair(tensor, value, shared)
    _insert(graph, value, pair)
    for use in uses:
        use.node.replace_input_with(use.idx, pair[1].outputs[0])
    if tensor.readers is None and value.is_graph_output():
        _write_output(graph, value, pair)


def _write_output(graph: ir.Graph, value: ir.Value, pair: list[ir.Node]) -> None:
    """Let the DQ write the graph output: it takes the name, the producer's value gets another."""
    name, dq = value.name, pair[1].outputs[0]
    value.name = f"{name}_QuantizeLinear_Input"
    dq.name = name
    for position, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[position] = dq


def _insert(graph: ir.Graph, value: ir.Value, nodes: list[ir.Node]) -> None:
    producer = value.producer()
    if producer is not None:
        graph.insert_after(producer, nodes)
    elif len(graph):
        graph.insert_before(graph[0], nodes)


# ---- constants -----------------------------------------------------------------------------------------------------------


def _constant(
    graph: ir.Graph, value: ir.Value, tensor: TensorPlan, shared: tuple[ir.Value, ir.Value], options: Options
) -> None:
    uses = [use for use in value.uses() if tensor.readers is None or (use.node.name or "") in tensor.readers]
    if options.AddQDQPairToWeight and tensor.role == "weight":
        nodes = _pair(tensor, value, shared)
    else:
        codes = add_initializer(graph, _codes(value, tensor), f"{tensor.name}_quantized")
        name = f"{tensor.name}_DequantizeLinear"
        nodes = [_node("DequantizeLinear", name, [codes, *shared], f"{name}_Output", value, _attributes(tensor))]
    _insert(graph, value, nodes)
    for use in uses:
        use.node.replace_input_with(use.idx, nodes[-1].outputs[0])


def _codes(value: ir.Value, tensor: TensorPlan) -> ir.TensorProtocol:
    """The stored codes of a constant, computed when they are written (the float tensor is held, not its graph value)."""
    dtype, source = onnx_type(tensor.spec), value.const_value
    if source is None:
        raise ModelError(f"the initializer {tensor.name!r} has no values")

    def compute() -> ir.TensorProtocol:
        return ir.tensor(stored_codes(source.numpy(), tensor).astype(dtype.numpy(), copy=False), dtype=dtype)

    return ir.LazyTensor(compute, dtype, ir.Shape(source.shape), name=f"{tensor.name}_quantized")


def stored_codes(values: np.ndarray, tensor: TensorPlan) -> np.ndarray:
    """The codes of a constant under its plan: nearest, clipped, narrow where the spec is."""
    spec = tensor.spec
    if tensor.role == "bias":
        exact = np.rint(values.astype(np.float64) / np.asarray(tensor.scale, np.float64))
        return exact.astype(np.int32)
    scale, zero_point = np.asarray(tensor.scale), np.asarray(tensor.zero_point)
    narrow = spec.narrow and spec.symmetric
    return quantize(values, scale, zero_point, get_format(spec.format), spec.granularity, spec.rounding, narrow)
