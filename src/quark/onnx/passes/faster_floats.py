"""Forms of the same arithmetic that float kernels run faster, in a graph that is quantized (FasterForms).

    PRelu(x, s)                       =  Max(x, s · x), or Relu(x) + s · Min(x, 0) where not all 0 < s ≤ 1
    Elu(x)                            =  Max(x, α · (exp(Min(x, 0)) - 1)), where α is not above 1
    Softplus(x)                       =  Relu(x) + log(1 + exp(-|x|))
    Mish(x), x · Tanh(Softplus(x))    =  x · n / (n + 2) with n = e · (e + 2), e = exp(Min(x, 20))
    Reciprocal(Sqrt(mean + ε))        =  1 / Sqrt(mean + ε), which is fused into an RMS normalization
    LayerNormalization(Add(a, b))     =  LayerNormalization(Sum(a, b)), which is not fused
    f(d), g(d) of a DequantizeLinear  =  f(Sum(d)), g(Sum(d)), which copies instead of dequantizing twice
    MatMul(d, e) of two of them       =  MatMul(Sum(d), e), which stays in float, where that is faster
    MaxPool of codes of a float x     =  codes of MaxPool(x), which is in the layout of x

Microseconds for 32 x 64 x 64, one thread, ONNX Runtime 1.31: PRelu 516 and 38 (55), Elu 190 and 67, Softplus 1224 and
249, Mish 1319 and 122; RMS normalization of 197 x 768 that is written with a Reciprocal 82 and 32; Add and
LayerNormalization of 197 x 768 fused into SkipLayerNormalization 599, apart 74; scores of 1728 x 1728 from 16 channels
2135 in integers, 1060 in float, where the kernel also multiplies by the scale behind them (948 of its own otherwise);
MaxPool of 64 x 112 x 112 behind a Pad 3427 of codes, 108 in float.
What is fused by the runtime computes one element at a time; elementary functions and sums run over vectors.

These are for float kernels: between QuantizeLinear and DequantizeLinear each new tensor would be rounded, so this
happens to the finished graph. Results differ by float32's rounding. Not handled: other element types, fewer than
``ENOUGH`` elements, or one in the last axis, over which a scalar is slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import numpy as np
import onnx_ir as ir

from quark.ir.runtime_faults import lowest_code
from quark.ir.surgery import (
    Names,
    constant_array,
    float_attribute,
    input_at,
    is_constant,
    nodes_of,
    sole_consumer,
)
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import NodeWriter, insert_behind, rewrite_each
from quark.onnx.qdq.slower import float_is_faster

#: From so many elements on the kernels that are saved count more than the calls that are added.
ENOUGH = 4096
#: What an axis of unknown size counts as.
FREE = 64
#: exp(20)² is a float32, and Mish(20) = 20 in float32.
_LARGEST = 20.0
#: What has no kernel that reads codes and makes numbers; a MatMul does.
_ELEMENTWISE = (
    "Abs",
    "Add",
    "Div",
    "Erf",
    "Exp",
    "Max",
    "Min",
    "Mul",
    "Neg",
    "Pow",
    "ReduceMean",
    "Sigmoid",
    "Sub",
    "Tanh",
)


#: Whose integer kernels compute in the layout of convolutions, or are carried into it.
_IN_LAYOUT = frozenset(
    [
        *("Add", "AveragePool", "Concat", "Conv", "LeakyRelu", "MaxPool"),
        *("Mul", "Resize", "Sigmoid", "Slice", "Split", "Transpose"),
    ]
)
#: Behind which the runtime puts a DequantizeLinear that is before them.
_MOVES = frozenset(["Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Split", "Slice", "Gather"])


def run(model: ir.Model) -> PassReport:
    """Rewrite a quantized ``model`` in place."""
    report = PassReport("faster_floats")
    for kind, fits, write in _FORMS:
        look, rewrite = partial(_fitting, fits), partial(_rewrite, write)
        report += rewrite_each(model, report.name, nodes_of(model, kind), look, rewrite)
    shared = nodes_of(model, "DequantizeLinear")
    return report + rewrite_each(model, report.name, shared, partial(_fitting, _is_shared), _share)


def _fitting(fits: Callable[[ir.Node], bool], node: ir.Node) -> ir.Node | None:
    return node if fits(node) else None


def _rewrite(write: Callable[[NodeWriter, ir.Node], None], node: ir.Node, _: ir.Node, names: Names) -> None:
    writer = NodeWriter(node, "", names)
    write(writer, node)
    writer.stand_for()


# ---- activation functions --------------------------------------------------------------------------------------------


def _large(node: ir.Node) -> bool:
    """Whether a node makes enough float32 numbers, in rows of several."""
    made = node.outputs[0]
    if made.dtype != ir.DataType.FLOAT or made.shape is None or not len(made.shape):
        return False
    sizes = [size if isinstance(size, int) else 1 if axis == 0 else FREE for axis, size in enumerate(made.shape)]
    return math.prod(sizes) >= ENOUGH and sizes[-1] > 1


def _has_slopes(node: ir.Node) -> bool:
    return _large(node) and is_constant(input_at(node, 1))


def _prelu(writer: NodeWriter, node: ir.Node) -> None:
    x, slope = node.inputs
    values = constant_array(slope)
    if values is not None and values.min() > 0 and values.max() <= 1:
        writer.add("Max", [x, writer.add("Mul", [x, slope])])
    else:
        below = writer.add("Mul", [writer.add("Min", [x, _number(writer, 0)]), slope])
        writer.add("Add", [writer.add("Relu", [x]), below])


def _is_elu(node: ir.Node) -> bool:
    return _large(node) and 0 <= float_attribute(node, "alpha", 1.0) <= 1


def _elu(writer: NodeWriter, node: ir.Node) -> None:
    x, alpha = node.inputs[0], float_attribute(node, "alpha", 1.0)
    power = writer.add("Exp", [writer.add("Min", [x, _number(writer, 0)])])
    below = writer.add("Sub", [power, _number(writer, 1)])
    writer.add("Max", [x, below if alpha == 1 else writer.add("Mul", [below, _number(writer, alpha)])])


def _softplus(writer: NodeWriter, node: ir.Node) -> None:
    x = node.inputs[0]
    power = writer.add("Exp", [writer.add("Neg", [writer.add("Abs", [x])])])
    above = writer.add("Log", [writer.add("Add", [power, _number(writer, 1)])])
    writer.add("Add", [writer.add("Relu", [x]), above])


def _mish_of(node: ir.Node) -> ir.Value | None:
    """x of a Mul that is x · tanh(softplus(x))."""
    for x, other in (node.inputs, node.inputs[::-1]):
        tanh = None if other is None else other.producer()
        inner = None if tanh is None or tanh.op_type != "Tanh" else input_at(tanh, 0)
        softplus = None if inner is None else inner.producer()
        if softplus is not None and softplus.op_type == "Softplus" and softplus.inputs[0] is x:
            return x
    return None


def _is_mish(node: ir.Node) -> bool:
    return _large(node) and _mish_of(node) is not None


def _mish(writer: NodeWriter, node: ir.Node) -> None:
    x, two = node.inputs[0] if node.op_type == "Mish" else _mish_of(node), _number(writer, 2)
    power = writer.add("Exp", [writer.add("Min", [x, _number(writer, _LARGEST)])])
    n = writer.add("Mul", [power, writer.add("Add", [power, two])])
    writer.add("Mul", [x, writer.add("Div", [n, writer.add("Add", [n, two])])])


def _number(writer: NodeWriter, value: float) -> ir.Value:
    return writer.constant(np.array(value, np.float32), f"{value:g}")


# ---- normalizations --------------------------------------------------------------------------------------------------


def _is_root_of_mean(node: ir.Node) -> bool:
    """Whether a Reciprocal is that of Sqrt(mean + ε)."""
    value = node.inputs[0]
    for kind in ("Sqrt", "Add", "ReduceMean"):
        maker = None if value is None else value.producer()
        if maker is None or maker.op_type != kind:
            return False
        value = maker.inputs[0]
    return node.outputs[0].dtype == ir.DataType.FLOAT


def _one_by(writer: NodeWriter, node: ir.Node) -> None:
    writer.add("Div", [_number(writer, 1), node.inputs[0]])


def _is_normalized(node: ir.Node) -> bool:
    """Whether nothing but a LayerNormalization reads an Add of two tensors."""
    made = node.outputs[0]
    if made.dtype != ir.DataType.FLOAT or made.is_graph_output() or any(map(is_constant, node.inputs)):
        return False
    norm = sole_consumer(made)
    return norm is not None and norm.op_type == "LayerNormalization"


def _sum(writer: NodeWriter, node: ir.Node) -> None:
    writer.add("Sum", node.inputs)


# ---- codes that several float nodes read -----------------------------------------------------------------------------


def _is_shared(node: ir.Node) -> bool:
    """Whether several float kernels read what a DequantizeLinear makes of codes that another node makes."""
    return not is_constant(node.inputs[0]) and _large(node) and len(_float_readers(node.outputs[0])) > 1


def _float_readers(value: ir.Value) -> dict[ir.Node, None]:
    """Nodes that compute in float on it: what they make is not quantized."""
    readers = dict.fromkeys(use.node for use in value.uses())
    return {node: None for node in readers if node.op_type in _ELEMENTWISE and not _is_integer(node)}


def _is_integer(node: ir.Node) -> bool:
    """Whether a node may be one kernel with the DequantizeLinears before and the QuantizeLinears behind it."""
    return all(use.node.op_type == "QuantizeLinear" for made in node.outputs for use in made.uses())


def _share(node: ir.Node, _: ir.Node, names: Names) -> None:
    value = node.outputs[0]
    uses = [use for use in value.uses() if use.node in _float_readers(value)]
    copy = ir.node("Sum", [value], name=names.fresh(f"{value.name}_shared"))
    copy.outputs[0].name, copy.outputs[0].type, copy.outputs[0].shape = copy.name, value.type, value.shape
    insert_behind(cast(ir.Graph, node.graph), value, copy)
    for use in uses:
        use.node.replace_input_with(use.idx, copy.outputs[0])


# ---- products that the runtime would compute in integers -------------------------------------------------------------


def _is_product_of_codes(node: ir.Node) -> bool:
    """Whether a MatMul that makes numbers reads two tensors of codes, and is faster in float."""
    return not _is_integer(node) and all(map(_from_codes, node.inputs)) and _large(node) and float_is_faster(node)


def _from_codes(value: ir.Value | None) -> bool:
    """Whether a tensor is dequantized; the runtime looks for that beyond what only moves elements."""
    maker = None if value is None else value.producer()
    while maker is not None and maker.op_type in _MOVES:
        maker = None if maker.inputs[0] is None else maker.inputs[0].producer()
    return maker is not None and maker.op_type == "DequantizeLinear" and not is_constant(maker.inputs[0])


def _in_float(writer: NodeWriter, node: ir.Node) -> None:
    first, second = node.inputs
    writer.add("MatMul", [writer.add("Sum", [first]), second])


# ---- maxima of codes -------------------------------------------------------------------------------------------------


def _pools_float(node: ir.Node) -> bool:
    """Whether a MaxPool reads codes of what a float kernel makes, and its result has the same codes."""
    given, behind = _before_codes(node.inputs[0]), sole_consumer(node.outputs[0])
    alike = given is not None and behind is not None and behind.op_type == "QuantizeLinear"
    if not alike or given is None or behind is None or len(node.outputs) > 1 or lowest_code(behind) is None:
        return False
    first = cast(ir.Node, cast(ir.Value, cast(ir.Node, cast(ir.Value, node.inputs[0]).producer()).inputs[0]).producer())
    pairs = [(constant_array(a), constant_array(b)) for a, b in zip(first.inputs[1:], behind.inputs[1:], strict=True)]
    return all(a is not None and b is not None and np.array_equal(a, b) for a, b in pairs) and not _in_layout(given)


def _before_codes(value: ir.Value | None) -> ir.Value | None:
    """What is quantized and dequantized at once."""
    for kind in ("DequantizeLinear", "QuantizeLinear"):
        maker = None if value is None else value.producer()
        if maker is None or maker.op_type != kind or maker.domain:
            return None
        value = maker.inputs[0]
    return value


def _in_layout(value: ir.Value) -> bool:
    """Whether an integer kernel may make a tensor in the layout of convolutions."""
    maker = value.producer()
    while maker is not None and maker.op_type in ("Relu", "Clip"):
        maker = None if maker.inputs[0] is None else maker.inputs[0].producer()
    read = [] if maker is None else [one.producer() for one in maker.inputs[:2] if one is not None]
    return (
        maker is not None
        and maker.op_type in _IN_LAYOUT
        and all(one is None or one.op_type == "DequantizeLinear" for one in read)
    )


def _pooled(writer: NodeWriter, node: ir.Node) -> None:
    given, behind = cast(ir.Value, _before_codes(node.inputs[0])), cast(ir.Node, sole_consumer(node.outputs[0]))
    maker = given.producer()
    if maker is not None and maker.op_type == "Pad":  # the runtime would join the two, and lose zeros
        given = writer.add("Sum", [given])
    bound = writer.constant(np.array(lowest_code(behind), np.float32), "min")
    writer.add("Clip", [writer.add("MaxPool", [given], node.attributes), bound])


#: Operator, whether a node is to be rewritten, and what writes the other form; in this order.
_FORMS: tuple[tuple[str, Callable[[ir.Node], bool], Callable[[NodeWriter, ir.Node], None]], ...] = (
    ("Mul", _is_mish, _mish),
    ("Mish", _large, _mish),
    ("Softplus", _large, _softplus),
    ("Elu", _is_elu, _elu),
    ("PRelu", _has_slopes, _prelu),
    ("Reciprocal", _is_root_of_mean, _one_by),
    ("Add", _is_normalized, _sum),
    ("MatMul", _is_product_of_codes, _in_float),
    ("MaxPool", _pools_float, _pooled),
)
