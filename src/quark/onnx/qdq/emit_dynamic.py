"""Emission of a dynamic quantization: every quantized node is replaced by its integer form (see ``dynamic``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field

import numpy as np
import onnx_ir as ir

from quark.config.options import Options
from quark.config.plan import Plan
from quark.dataclass import dataclass
from quark.ir.surgery import (
    Names,
    add_initializer,
    all_values,
    constant_array,
    input_at,
    int_attribute,
    let_go,
    name_of,
    operand,
    remove_unused,
    take_over,
    tensor_of,
)
from quark.onnx.graph.rewriting import insert_behind
from quark.onnx.qdq.activation_nodes import QuantizedTensor
from quark.onnx.qdq.dynamic import gemm_factors, kept_attributes
from quark.onnx.qdq.emit import uses_of, write_constant
from quark.onnx.qdq.initializers import ParameterInitializers
from quark.onnx.qdq.node_kinds import onnx_type
from quark.onnx.qdq.recurrent import is_alone, put_dynamic
from quark.onnx.qdq.store import codes_of

Triple = tuple[ir.Value, ir.Value, ir.Value]


@dataclass
class Writer:
    """The graph that is written, and the codes, scales and zero points that are in it already."""

    model: ir.Model
    plan: Plan
    names: Names
    activations: dict[str, Triple] = field(default_factory=dict)
    codes: dict[tuple[str, str], ir.Value] = field(default_factory=dict)

    def constant(self, array: np.ndarray, name: str) -> ir.Value:
        """A new initializer."""
        return add_initializer(self.model.graph, array, self.names.fresh(name))

    def insert(
        self,
        before: ir.Node,
        op_type: str,
        inputs: list[ir.Value | None],
        name: str,
        attributes: Sequence[ir.Attr] = (),
    ) -> ir.Value:
        """A new node in front of ``before``; its output."""
        output = ir.Value(name=self.names.fresh(f"{name}_Output"))
        node = ir.Node("", op_type, inputs, attributes, outputs=[output], name=name)
        self.model.graph.insert_before(before, node)
        return output

    def product(
        self,
        node: ir.Node,
        op_type: str,
        first: Triple,
        second: Triple,
        bias: ir.Value | None,
        attributes: Sequence[ir.Attr] = (),
    ) -> None:
        """Integer product, Cast, Mul by both scales, Add, in the place of ``node``: what ONNX Runtime fuses."""
        inputs: list[ir.Value | None] = [first[0], second[0], first[2], second[2]]
        integer = self.insert(node, op_type, inputs, f"{node.name}_quant", attributes)
        integer.name = self.names.fresh(f"{node.name}_{op_type}_Output")
        to_float = [ir.AttrInt64("to", int(ir.DataType.FLOAT))]
        result = self.insert(node, "Cast", [integer], f"{node.name}_Cast", to_float)
        scales = self.insert(node, "Mul", [first[1], second[1]], f"{node.name}_scales_Mul")
        result = self.insert(node, "Mul", [result, scales], f"{node.name}_Mul")
        if bias is not None:
            result = self.insert(node, "Add", [result, bias], f"{node.name}_Add")
        take_over(result, node.outputs[0])

    def activation(self, value: ir.Value) -> Triple:
        """Codes, scale and zero point of an activation, made once."""
        name = name_of(value)
        if name not in self.activations:
            labels = ("quantized", "scale", "zero_point")
            outputs = [ir.Value(name=self.names.fresh(f"{name}_{label}")) for label in labels]
            node = ir.Node("", "DynamicQuantizeLinear", [value], outputs=outputs, name=f"{name}_QuantizeLinear")
            insert_behind(self.model.graph, value, node)
            self.activations[name] = outputs[0], outputs[1], outputs[2]
        return self.activations[name]

    def weight(
        self, value: ir.Value, form: str = "", arrange: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> ir.Value:
        """The codes of a weight, arranged for one kind of kernel; computed when the file is written."""
        name = name_of(value)
        if (name, form) not in self.codes:
            tensor, source, dtype = self.plan.tensors[name], tensor_of(value), onnx_type(self.plan.tensors[name].spec)
            turn = arrange or (lambda array: array)
            shape = turn(np.broadcast_to(np.uint8(), source.shape.numpy())).shape
            label = self.names.fresh(f"{name}_quantized{form}")

            def compute() -> ir.TensorProtocol:
                codes = turn(codes_of(source.numpy(), tensor).astype(dtype.numpy(), copy=False))
                let_go(source)
                return ir.tensor(np.ascontiguousarray(codes), dtype=dtype)

            lazy = ir.LazyTensor(compute, dtype, ir.Shape(shape), name=label)
            self.codes[name, form] = add_initializer(self.model.graph, lazy, label)
        return self.codes[name, form]

    def zero_point(self, name: str) -> ir.Value:
        """The zero point of a weight: one number where all are equal."""
        tensor = self.plan.tensors[name]
        points = np.asarray(tensor.zero_point).astype(onnx_type(tensor.spec).numpy())
        first = points.reshape(-1)[0] if points.size else points
        return self.constant(np.asarray(first if (points == first).all() else points), f"{name}_zero_point")


def emit_dynamic(model: ir.Model, plan: Plan, options: Options) -> ir.Model:
    """Rewrite the quantized nodes of ``model``, which is used up."""
    writer = Writer(model, plan, Names(model))
    for node in list(model.graph):
        if plan.nodes[name_of(node)].quantized and node.op_type in BUILDERS:
            BUILDERS[node.op_type](writer, node)
    values, parameters = {value.name: value for value in all_values(model)}, ParameterInitializers(model)
    for tensor in filter(is_alone, plan):
        item = QuantizedTensor(tensor, values[tensor.name], parameters, options)
        write_constant(model.graph, item, uses_of(item))
    remove_unused(model)
    return model


def _matmul(writer: Writer, node: ir.Node) -> None:
    data, second = operand(node, 0), operand(node, 1)
    codes, scale, zero_point = writer.activation(data)
    if name_of(second) in writer.plan.tensors and writer.plan.tensors[name_of(second)].role == "weight":
        others = writer.weight(second), _scale(writer, second), writer.zero_point(name_of(second))
    else:
        others = writer.activation(second)
    writer.product(node, "MatMulInteger", (codes, scale, zero_point), others, None)


def _gemm(writer: Writer, node: ir.Node) -> None:
    data, weight, bias = operand(node, 0), operand(node, 1), input_at(node, 2)
    alpha, beta = gemm_factors(node)
    turned = bool(int_attribute(node, "transB", 0))
    codes = writer.weight(weight, "_T", np.transpose) if turned else writer.weight(weight)
    others = codes, _scale(writer, weight, alpha), writer.zero_point(name_of(weight))
    values = constant_array(bias)
    if values is not None and beta != 1.0:
        bias = writer.constant((values * beta).astype(values.dtype), f"{node.name}_bias")
    writer.product(node, "MatMulInteger", writer.activation(data), others, bias)


def _conv(writer: Writer, node: ir.Node) -> None:
    data, weight, bias = operand(node, 0), operand(node, 1), input_at(node, 2)
    channels = (-1, *(1 for _ in (weight.shape or ())[2:]))
    others = writer.weight(weight), _scale(writer, weight, shape=channels), writer.zero_point(name_of(weight))
    values = constant_array(bias)
    if values is not None:
        bias = writer.constant(values.reshape(channels), f"{node.name}_bias")
    writer.product(node, "ConvInteger", writer.activation(data), others, bias, kept_attributes(node))


def _scale(writer: Writer, weight: ir.Value, factor: float = 1.0, shape: tuple[int, ...] | None = None) -> ir.Value:
    """The scale of a weight as the product needs it."""
    found = np.asarray(writer.plan.tensors[name_of(weight)].scale)
    scale = np.asarray(found * np.float32(factor), np.float32)
    return writer.constant(scale.reshape(shape) if shape is not None and scale.ndim else scale, f"{weight.name}_scale")


def _gather(writer: Writer, node: ir.Node) -> None:
    """Codes and the scales of their rows are gathered, then multiplied."""
    table, indices = operand(node, 0), node.inputs[1]
    rows = (-1, *(1 for _ in (table.shape or ())[1:]))
    codes = writer.insert(node, "Gather", [writer.weight(table), indices], f"{node.name}_quant")
    scales = writer.insert(node, "Gather", [_scale(writer, table, shape=rows), indices], f"{node.name}_scale")
    one, zero_point = writer.constant(np.asarray(np.float32(1)), "one"), writer.zero_point(name_of(table))
    counts = writer.insert(node, "DequantizeLinear", [codes, one, zero_point], f"{node.name}_DequantizeLinear")
    take_over(writer.insert(node, "Mul", [counts, scales], f"{node.name}_Mul"), node.outputs[0])


def _lstm(writer: Writer, node: ir.Node) -> None:
    """com.microsoft DynamicQuantizeLSTM: weights [directions, inputs, 4 hidden], a scale per direction."""
    inputs: list[ir.Value | None] = [input_at(node, position) for position in range(8)]
    parameters: list[ir.Value | None] = []
    for position in (1, 2):
        weight = operand(node, position)
        inputs[position] = writer.weight(weight, "_T", lambda array: array.transpose(0, 2, 1))
        tensor = writer.plan.tensors[name_of(weight)]
        points = np.asarray(tensor.zero_point).astype(onnx_type(tensor.spec).numpy())
        parameters += [_scale(writer, weight), writer.constant(points, f"{weight.name}_zero_point")]
    put_dynamic(node, [*inputs, *parameters])


BUILDERS: dict[str, Callable[[Writer, ir.Node], None]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "Gather": _gather,
    "LSTM": _lstm,
}
