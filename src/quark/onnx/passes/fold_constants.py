"""Compute now what does not depend on the inputs.

Exporters write shapes as programs: Shape → Gather → Unsqueeze → Concat → Reshape. Where shape inference knows the
shape (or the one dimension that is picked), the program is a constant. So is every other node whose inputs are all
constants. All of them are evaluated together, in one run of ONNX Runtime, so that the result is what the runtime would
have computed.

Left alone: nodes whose result is much larger than what it is made from (a file should not grow), random operators,
nodes with subgraphs, and QuantizeLinear and DequantizeLinear (in a quantized model they carry meaning).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from quark.ir.surgery import Names, add_initializer, attribute, constant_array, int_attribute, is_constant, label
from quark.ir.walk import bodies
from quark.onnx.graph.model import suitable_ir_version
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.session import RUNTIME_ERRORS, quiet_options
from quark.onnx.graph.shapes import infer_shapes, static_shape

SMALL = 64 * 1024
"""Bytes that a result may have even when it is larger than what it is made from."""
RANDOM = frozenset(
    ["Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"]
)
LEFT_ALONE = RANDOM | {"Constant", "DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear"}


def run(model: ir.Model) -> PassReport:
    """Fold until nothing more can be, in place."""
    graph = model.graph
    if not any(_reads_shape(node) or _casts_like(node) or _is_fixed(node, set()) for node in graph):
        return PassReport("fold_constants")
    graph.sort()
    fired, refused = 0, []
    while True:
        infer_shapes(model)
        count = _name_types(graph) + _fold_shapes(graph, Names(model))
        candidates = list(_candidates(graph))
        refused = [f"{label(node)} stays: {reason}" for node, reason in candidates if reason]
        count += _evaluate(model, [node for node, reason in candidates if not reason], refused)
        fired += count
        if not count:
            return PassReport("fold_constants", fired, tuple(refused))


# ---- types -----------------------------------------------------------------------------------------------------------


def _casts_like(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type == "CastLike"


def _name_types(graph: ir.Graph) -> int:
    """A CastLike reads a tensor for its type alone: where that is known it is a Cast, which constants can be behind.

    Functions of exporters that are written for any type make them, for biases, paddings and bounds.
    """
    fired = 0
    for node in list(graph):
        like = node.inputs[1] if _casts_like(node) else None
        if like is None or like.dtype is None:
            continue
        node.op_type = "Cast"
        node.resize_inputs(1)
        node.attributes["to"] = ir.AttrInt64("to", int(like.dtype))
        fired += 1
    return fired


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _reads_shape(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in ("Shape", "Size") and node.inputs[0] is not None


def _fold_shapes(graph: ir.Graph, names: Names) -> int:
    """Replace known shapes, and known dimensions that are picked out of a shape, by initializers."""
    fired = 0
    for node in [node for node in graph if _reads_shape(node)]:
        sizes = _sizes(node)
        if sizes is None:
            continue
        if None not in sizes:
            array = np.array(sizes, np.int64)
            fired += _become(
                node.outputs[0], array if node.op_type == "Shape" else np.array(array.prod()), graph, names
            )
        else:
            fired += sum(_fold_pick(reader, sizes, graph, names) for reader in _readers(node.outputs[0]))
    return fired


def _sizes(node: ir.Node) -> list[int | None] | None:
    """What a Shape or Size node reads: sizes with None for an unknown one, None where the rank is unknown."""
    data = node.inputs[0]
    if data is None or data.shape is None:
        return None
    sizes = [size if isinstance(size, int) else None for size in data.shape]
    end = attribute(node, "end")
    return sizes[int_attribute(node, "start", 0) : end if isinstance(end, int) else None]


def _readers(value: ir.Value) -> list[ir.Node]:
    return [use.node for use in value.uses() if use.idx == 0]


def _fold_pick(node: ir.Node, sizes: Sequence[int | None], graph: ir.Graph, names: Names) -> bool:
    """A Gather or Slice that picks only known sizes out of a shape."""
    picked = _picked(node)
    if picked is None or node.graph is not graph:
        return False
    try:
        indices = np.arange(len(sizes))[picked]
    except IndexError:  # an invalid model: for the runtime to report
        return False
    chosen = [sizes[k] for k in np.atleast_1d(indices)]
    if None in chosen:
        return False
    return _become(node.outputs[0], np.array(chosen, np.int64).reshape(np.shape(indices)), graph, names)


def _picked(node: ir.Node) -> np.ndarray | slice | None:
    """Which elements of a vector a Gather or Slice with constant arguments takes, as an index."""
    arguments = [constant_array(value) for value in node.inputs[1:]]
    if node.domain != "" or not arguments or any(array is None for array in arguments):
        return None
    if node.op_type == "Gather":
        return arguments[0]
    if node.op_type == "Slice" and all(array is not None and array.size == 1 for array in arguments):
        numbers = [int(array.reshape(-1)[0]) for array in arguments if array is not None]
        return slice(numbers[0], numbers[1], numbers[3] if len(numbers) > 3 else 1)
    return None


def _become(value: ir.Value, array: np.ndarray, graph: ir.Graph, names: Names) -> bool:
    """``value`` is computed no more: an initializer takes its place and its name. A graph output stays as it is."""
    node = value.producer()
    if value.is_graph_output() or node is None or node.graph is not graph:
        return False
    name = str(value.name)
    value.name = names.fresh(f"{name}_folded")
    value.replace_all_uses_with(add_initializer(graph, np.asarray(array), name))
    if not any(output.uses() or output.is_graph_output() for output in node.outputs):
        graph.remove(node, safe=True)
    return True


# ---- everything else -------------------------------------------------------------------------------------------------


def _is_fixed(node: ir.Node, fixed: set[ir.Value]) -> bool:
    """All inputs are constants, or come from nodes in ``fixed``, and the operator always gives the same result."""
    if node.domain != "" or node.op_type in LEFT_ALONE or not node.inputs:
        return False
    if bodies(node):
        return False
    return all(value is None or value in fixed or is_constant(value) for value in node.inputs)


def _candidates(graph: ir.Graph) -> Iterator[tuple[ir.Node, str | None]]:
    """Nodes with a fixed result, in order, each with the reason why it is not folded (None where it is)."""
    fixed: set[ir.Value] = set()
    for node in graph:
        if not _is_fixed(node, fixed):
            continue
        reason = _refusal(node)
        if reason is None:
            fixed.update(node.outputs)
        yield node, reason


def _refusal(node: ir.Node) -> str | None:
    if any(value.is_graph_output() for value in node.outputs):
        return "its result is a graph output"
    if not all(_runtime_type(value) for value in (*node.inputs, *node.outputs) if value is not None and value.name):
        return "it works on a type that NumPy lacks, or on a type that is unknown"
    sizes = [_bytes(value) for value in node.outputs if value.name]
    made_from = sum(_bytes(value) or 0 for value in node.inputs)
    if any(size is None for size in sizes):
        return "the shape of its result is unknown"
    largest = max((size for size in sizes if size is not None), default=0)
    return (
        None if largest <= max(SMALL, made_from) else f"its result ({largest} bytes) is larger than what it is made of"
    )


def _runtime_type(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype != ir.DataType.STRING and value.dtype.numpy().kind in "biuf"


def _bytes(value: ir.Value | None) -> int | None:
    shape = static_shape(value)
    if value is None or shape is None or value.dtype is None:
        return None
    return int(np.prod(shape, dtype=np.int64) * value.dtype.itemsize)


def _evaluate(model: ir.Model, nodes: Sequence[ir.Node], refused: list[str]) -> int:
    """Run ``nodes`` (in order) and put initializers in the place of the results that others read."""
    inside = set(nodes)
    results = [value for node in nodes for value in node.outputs if any(use.node not in inside for use in value.uses())]
    if not results:
        return 0
    try:
        arrays = _run(model, nodes, results)
    except RUNTIME_ERRORS as error:
        refused.append(f"{len(nodes)} nodes with constant inputs stay: ONNX Runtime does not run them ({error})")
        return 0
    names = Names(model)
    for value, array in zip(results, arrays, strict=True):
        _become(value, array, model.graph, names)
    _remove_dead(nodes)
    return len(nodes)


def _remove_dead(nodes: Sequence[ir.Node]) -> None:
    for node in reversed(nodes):
        if node.graph is not None and not any(value.uses() for value in node.outputs):
            node.graph.remove(node, safe=True)


def _run(model: ir.Model, nodes: Sequence[ir.Node], results: Sequence[ir.Value]) -> list[np.ndarray]:
    """The values of ``results``. Constants go in as feeds, so that none of them is serialized."""
    read = {value.name: value for node in nodes for value in node.inputs if value is not None and is_constant(value)}
    feeds = {str(name): value.const_value.numpy() for name, value in read.items() if value.const_value is not None}
    graph = onnx.GraphProto(name="constants", node=[ir.to_proto(node) for node in nodes])
    graph.input.extend(_typed(name, array.dtype) for name, array in feeds.items())
    graph.output.extend(_typed(str(value.name), value.dtype.numpy()) for value in results if value.dtype is not None)
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in model.graph.opset_imports.items()]
    proto = onnx.helper.make_model(graph, opset_imports=imports, ir_version=suitable_ir_version(model))
    options = quiet_options()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run([value.name for value in results], feeds)


def _typed(name: str, dtype: np.dtype) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None)
