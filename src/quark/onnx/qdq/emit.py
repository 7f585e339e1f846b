"""Emission: write the Plan into the graph, once.

An activation X gets X -> QuantizeLinear -> DequantizeLinear (or what its format travels by); a constant W becomes its
stored codes and a node that reads them. Names: ``X_scale``, ``X_zero_point``, ``X_QuantizeLinear``, ``W_quantized`` and
so on, as compilers for this interface expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import onnx
import onnx_ir as ir

from quark.config.options import Options
from quark.config.plan import Plan
from quark.errors import ModelError
from quark.ir.runtime_faults import work_around_faults
from quark.ir.surgery import all_values, name_of, remove_unused
from quark.onnx.graph.rewriting import insert_behind
from quark.onnx.graph.weightless import through_proto
from quark.onnx.qdq import second_type
from quark.onnx.qdq.activation_nodes import ACTIVATION_NODES, AMD, OWN, QuantizedTensor
from quark.onnx.qdq.channel_axes import is_off_channel
from quark.onnx.qdq.initializers import ParameterInitializers
from quark.onnx.qdq.node_kinds import activation_kind, constant_kind
from quark.onnx.qdq.recurrent import dynamic_nodes, is_alone, is_turned, write_dynamic
from quark.onnx.qdq.store import CONSTANT_NODES, rounded_constant, turned_constant
from quark.onnx.qdq.tables import is_lookup, write_lookups
from quark.operators import add_functions

Builder = Callable[[QuantizedTensor], list[ir.Node]]


def emit(model: ir.Model, plan: Plan, options: Options) -> ir.Model:
    """Insert the nodes of a complete plan. ``model`` is used up; the result may be another object with its data."""
    values = {value.name: value for value in all_values(model)}
    parameters, lookups = ParameterInitializers(model), list[tuple[QuantizedTensor, list[ir.Node]]]()
    integer_lstms = {name_of(node): node for node in dynamic_nodes(model, plan)}
    apart = dict[str, list[QuantizedTensor]]()
    for tensor in plan:
        if tensor.scale is None:
            raise ModelError(f"the plan has no scale for {tensor.name!r}")
        item = QuantizedTensor(tensor, values[tensor.name], parameters, options)
        reader = next(iter(tensor.readers or ()), "")
        if reader in integer_lstms and tensor.role == "weight":
            apart.setdefault(reader, []).append(item)
        elif tensor.role == "activation":
            _activation(model.graph, item)
        else:
            uses = uses_of(item)
            rows = [use.node for use in uses if is_lookup(item, use)]
            others = [use for use in uses if not is_lookup(item, use)]
            lookups += [(item, rows)] if rows else []
            if others:
                write_constant(model.graph, item, others)
    for item, nodes in lookups:  # they put other values in the place of those that the plan names
        write_lookups(item, nodes)
    for name, weights in apart.items():
        order = [value.name for value in integer_lstms[name].inputs if value is not None]
        write_dynamic(integer_lstms[name], sorted(weights, key=lambda one: order.index(one.tensor.name)))
    second_type.drop(model, plan)
    remove_unused(model)
    work_around_faults(model)
    return _with_functions(model)


def uses_of(item: QuantizedTensor) -> list[Any]:
    """The readers of the quantized values."""
    readers = item.tensor.readers
    return [use for use in item.value.uses() if readers is None or name_of(use.node) in readers]


def _activation(graph: ir.Graph, item: QuantizedTensor) -> None:
    uses, tensor = uses_of(item), item.tensor
    build = _in_float32(ACTIVATION_NODES[activation_kind(tensor.spec, item.options)])
    if item.options.DedicatedQDQPair and len(uses) > 1:
        for number, use in enumerate(uses, 1):
            nodes = build(QuantizedTensor(tensor, item.value, item.parameters, item.options, f"_{number}"))
            insert_behind(graph, item.value, nodes)
            use.node.replace_input_with(use.idx, nodes[-1].outputs[0])
        return
    nodes = build(item)
    insert_behind(graph, item.value, nodes)
    for use in uses:
        use.node.replace_input_with(use.idx, nodes[-1].outputs[0])
    if tensor.readers is None and item.value.is_graph_output():
        _write_output(graph, item, nodes[-1].outputs[0])


def _write_output(graph: ir.Graph, item: QuantizedTensor, quantized: ir.Value) -> None:
    """Let the quantized tensor be the graph output: it takes the name, the producer's value gets another."""
    value, name = item.value, item.value.name
    value.name, quantized.name = item.parameters.names.fresh(f"{name}_QuantizeLinear_Input"), name
    for position, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[position] = quantized


def write_constant(graph: ir.Graph, item: QuantizedTensor, uses: list[Any]) -> None:
    """Store the codes of a constant; ``uses`` read what is made of them."""
    options, spec = item.options, item.tensor.spec
    if options.EnableVaimlBF16 and spec.row.onnx_type == "BFLOAT16":
        read = rounded_constant(item)
    elif is_turned(item.tensor):
        nodes = turned_constant(item)
        insert_behind(graph, item.value, nodes)
        read = nodes[-1].outputs[0]
    else:
        fold, kind = _must_fold(item, uses), activation_kind(spec, options)
        if options.AddQDQPairToWeight and item.tensor.role == "weight" and not (fold and kind == "standard"):
            nodes = _in_float32(ACTIVATION_NODES[kind])(item)
        else:
            kind = "cast" if fold else constant_kind(spec, options)
            nodes = _back_to_float16(CONSTANT_NODES[kind])(item)
        insert_behind(graph, item.value, nodes)
        read = nodes[-1].outputs[0]
    for use in uses:
        use.node.replace_input_with(use.idx, read)


def _must_fold(item: QuantizedTensor, uses: Iterable[Any]) -> bool:
    """Whether ONNX Runtime would misread a constant behind DequantizeLinear, fused with the nodes that read it, or
    dequantize it at every run.

    Scales off the output channels, and 32-bit codes at a scale of their own: it refuses those of a weight, and takes
    those of a bias for codes at input scale x weight scale.
    """
    tensor, spec = item.tensor, item.tensor.spec
    if tensor.role == "bias" or constant_kind(spec, item.options) != "standard":
        return False
    off_channel = any(is_off_channel(use.node, item.value, spec) for use in uses)
    return is_alone(tensor) or spec.row.onnx_type == "INT32" or off_channel


def _is_wide(item: QuantizedTensor) -> bool:
    """Whether a float16 tensor is quantized in float32."""
    return item.value.dtype == ir.DataType.FLOAT16 and bool(item.options.UseFP32Scale)


def _in_float32(build: Builder) -> Builder:
    """``build`` between a Cast to float32 and one back, for a float16 tensor whose scales are float32."""

    def wrapped(item: QuantizedTensor) -> list[ir.Node]:
        if not _is_wide(item):
            return build(item)
        to_float = item.node("Cast", [item.value], {"to": int(ir.DataType.FLOAT)}, "", "Float", ir.DataType.FLOAT)
        nodes = build(replace(item, value=to_float.outputs[0]))
        return [to_float, *nodes, _to_half(item, nodes[-1])]

    return wrapped


def _back_to_float16(build: Builder) -> Builder:
    """``build`` and a Cast to float16, for a float16 constant whose scales are float32."""

    def wrapped(item: QuantizedTensor) -> list[ir.Node]:
        if not _is_wide(item):
            return build(item)
        source = item.value
        wide = ir.Value(
            name=source.name, shape=source.shape, type=ir.TensorType(ir.DataType.FLOAT), const_value=source.const_value
        )
        nodes = build(replace(item, value=wide))
        return [*nodes, _to_half(item, nodes[-1])]

    return wrapped


def _to_half(item: QuantizedTensor, last: ir.Node) -> ir.Node:
    return item.node("Cast", [last.outputs[0]], {"to": int(ir.DataType.FLOAT16)}, kind="Half")


def _with_functions(model: ir.Model) -> ir.Model:
    """The functions of our operators, where there are any, so that the model runs without custom kernels."""
    if not any(node.domain in (AMD, OWN) for node in model.graph):
        return model

    def complete(proto: onnx.ModelProto) -> onnx.ModelProto:
        add_functions(proto)
        return proto

    model.graph.sort()
    return through_proto(model, complete)
