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
from quark.onnx.graph.surgery import all_values, remove_unused
from quark.onnx.graph.weightless import through_proto
from quark.onnx.qdq import second_type
from quark.onnx.qdq.carriers import activation_kind, constant_kind
from quark.onnx.qdq.carry import ACTIVATION_NODES, AMD, OWN, Carried, single
from quark.onnx.qdq.channel_axes import is_off_channel
from quark.onnx.qdq.initializers import ParameterInitializers
from quark.onnx.qdq.recurrent import dynamic_nodes, is_alone, write_dynamic
from quark.onnx.qdq.shield import shield
from quark.onnx.qdq.store import CONSTANT_NODES, rounded_constant
from quark.onnx.qdq.tables import is_lookup, write_lookups
from quark.operators import add_functions

Builder = Callable[[Carried], list[ir.Node]]


def emit(model: ir.Model, plan: Plan, options: Options) -> ir.Model:
    """Insert the nodes of a complete plan. ``model`` is used up; the result may be another object with its data."""
    values = {value.name: value for value in all_values(model)}
    parameters, lookups = ParameterInitializers(model), list[tuple[Carried, list[ir.Node]]]()
    integer_lstms = {node.name or "": node for node in dynamic_nodes(model, plan)}
    apart = dict[str, list[Carried]]()
    for tensor in plan:
        if tensor.scale is None:
            raise ModelError(f"the plan has no scale for {tensor.name!r}")
        carried = Carried(tensor, values[tensor.name], parameters, options)
        reader = next(iter(tensor.readers or ()), "")
        if reader in integer_lstms and tensor.role == "weight":
            apart.setdefault(reader, []).append(carried)
        elif tensor.role == "activation":
            _activation(model.graph, carried)
        else:
            uses = _uses(carried)
            rows = [use.node for use in uses if is_lookup(carried, use)]
            others = [use for use in uses if not is_lookup(carried, use)]
            lookups += [(carried, rows)] if rows else []
            if others or not rows:
                _constant(model.graph, carried, others)
    for carried, nodes in lookups:  # they put other values in the place of those that the plan names
        write_lookups(carried, nodes)
    for name, weights in apart.items():
        order = [value.name for value in integer_lstms[name].inputs if value is not None]
        write_dynamic(integer_lstms[name], sorted(weights, key=lambda one: order.index(one.tensor.name)))
    second_type.drop(model, plan)
    remove_unused(model)
    shield(model)
    return _with_functions(model)


def _uses(carried: Carried) -> list[Any]:
    """The readers of the quantized values."""
    readers = carried.tensor.readers
    return [use for use in carried.value.uses() if readers is None or (use.node.name or "") in readers]


def _activation(graph: ir.Graph, carried: Carried) -> None:
    uses, tensor = _uses(carried), carried.tensor
    build = _in_float32(ACTIVATION_NODES[activation_kind(tensor.spec, carried.options)])
    if carried.options.DedicatedQDQPair and len(uses) > 1:
        for number, use in enumerate(uses, 1):
            nodes = build(Carried(tensor, carried.value, carried.parameters, carried.options, f"_{number}"))
            _insert(graph, carried.value, nodes)
            use.node.replace_input_with(use.idx, nodes[-1].outputs[0])
        return
    nodes = build(carried)
    _insert(graph, carried.value, nodes)
    for use in uses:
        use.node.replace_input_with(use.idx, nodes[-1].outputs[0])
    if tensor.readers is None and carried.value.is_graph_output():
        _write_output(graph, carried, nodes[-1].outputs[0])


def _write_output(graph: ir.Graph, carried: Carried, quantized: ir.Value) -> None:
    """Let the quantized tensor be the graph output: it takes the name, the producer's value gets another."""
    value, name = carried.value, carried.value.name
    value.name, quantized.name = carried.parameters.names.fresh(f"{name}_QuantizeLinear_Input"), name
    for position, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[position] = quantized


def _insert(graph: ir.Graph, value: ir.Value, nodes: list[ir.Node]) -> None:
    producer = value.producer()
    if producer is not None:
        graph.insert_after(producer, nodes)
    elif len(graph):
        graph.insert_before(graph[0], nodes)


def _constant(graph: ir.Graph, carried: Carried, uses: list[Any]) -> None:
    options, spec = carried.options, carried.tensor.spec
    if options.EnableVaimlBF16 and spec.row.onnx_type == "BFLOAT16":
        read = rounded_constant(carried)
    else:
        fold, kind = _must_fold(carried, uses), activation_kind(spec, options)
        if options.AddQDQPairToWeight and carried.tensor.role == "weight" and not (fold and kind == "standard"):
            nodes = _in_float32(ACTIVATION_NODES[kind])(carried)
        else:
            kind = "cast" if fold else constant_kind(spec, options)
            nodes = _back_to_float16(CONSTANT_NODES[kind])(carried)
        _insert(graph, carried.value, nodes)
        read = nodes[-1].outputs[0]
    for use in uses:
        use.node.replace_input_with(use.idx, read)


def _must_fold(carried: Carried, uses: Iterable[Any]) -> bool:
    """Whether ONNX Runtime would misread a constant behind DequantizeLinear, fused with the nodes that read it, or
    dequantize it at every run.

    Scales off the output channels, and 32-bit codes at a scale of their own: it refuses those of a weight, and takes
    those of a bias for codes at input scale x weight scale.
    """
    tensor, spec = carried.tensor, carried.tensor.spec
    if tensor.role == "bias" or constant_kind(spec, carried.options) != "standard":
        return False
    off_channel = any(is_off_channel(use.node, carried.value, spec) for use in uses)
    return is_alone(tensor) or spec.row.onnx_type == "INT32" or off_channel


def _is_wide(carried: Carried) -> bool:
    """Whether a float16 tensor is quantized in float32."""
    return carried.value.dtype == ir.DataType.FLOAT16 and bool(carried.options.UseFP32Scale)


def _in_float32(build: Builder) -> Builder:
    """``build`` between a Cast to float32 and one back, for a float16 tensor whose scales are float32."""

    def wrapped(carried: Carried) -> list[ir.Node]:
        if not _is_wide(carried):
            return build(carried)
        to_float = single(
            carried, "Cast", [carried.value], {"to": int(ir.DataType.FLOAT)}, "", "Float", ir.DataType.FLOAT
        )
        nodes = build(replace(carried, value=to_float.outputs[0]))
        return [to_float, *nodes, _to_half(carried, nodes[-1])]

    return wrapped


def _back_to_float16(build: Builder) -> Builder:
    """``build`` and a Cast to float16, for a float16 constant whose scales are float32."""

    def wrapped(carried: Carried) -> list[ir.Node]:
        if not _is_wide(carried):
            return build(carried)
        source = carried.value
        wide = ir.Value(
            name=source.name, shape=source.shape, type=ir.TensorType(ir.DataType.FLOAT), const_value=source.const_value
        )
        nodes = build(replace(carried, value=wide))
        return [*nodes, _to_half(carried, nodes[-1])]

    return wrapped


def _to_half(carried: Carried, last: ir.Node) -> ir.Node:
    return single(carried, "Cast", [last.outputs[0]], {"to": int(ir.DataType.FLOAT16)}, kind="Half")


def _with_functions(model: ir.Model) -> ir.Model:
    """The functions of our operators, where there are any, so that the model runs without custom kernels."""
    if not any(node.domain in (AMD, OWN) for node in model.graph):
        return model

    def complete(proto: onnx.ModelProto) -> onnx.ModelProto:
        add_functions(proto)
        return proto

    model.graph.sort()
    return through_proto(model, complete)
