"""Tables that Gather takes rows of, such as embeddings: stored as codes, looked up as codes, dequantized afterwards.

    codes [rows, …]      -> Gather(indices) -> DequantizeLinear(1) -> Mul -> the rows in float
    scales [rows, 1, …]  -> Gather(indices) -------------------------^

Nothing is computed on a table, so a scale for every row costs no kernel, and only the rows that are asked for are ever
dequantized. Half of a language model's bytes, and nearly all of a recommender's, are such tables.

Left in float: what is small, or whose rows are so short that their scales weigh what the codes save (boxes, places);
what 8 bits with a scale per row do not hold to ``FAITHFUL`` dB (rows with outliers, masks with -1e38).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan
from quark.config.rules import Decision
from quark.config.tensor import TensorSpec
from quark.errors import ModelError
from quark.ir.surgery import int_attribute, is_constant, let_go, name_of, operand, take_over, tensor_of
from quark.numerics.formats import Int
from quark.numerics.granularity import Channel, Tensor
from quark.numerics.metrics import sqnr
from quark.onnx.graph.shapes import static_shape
from quark.onnx.qdq import slots
from quark.onnx.qdq.activation_nodes import QuantizedTensor
from quark.onnx.qdq.dynamic import add_weight
from quark.onnx.qdq.initializers import shortened, stem
from quark.onnx.qdq.node_kinds import constant_kind, onnx_type
from quark.onnx.qdq.selection import passed_over
from quark.onnx.qdq.store import typed

OPTION = "QuantizeEmbeddings"
REASON = f"{OPTION}: its rows are looked up as codes"
#: Elements of a table, and of a row, from which on codes save more than nodes and scales take.
SMALLEST, SHORTEST = 1 << 12, 8
#: What the codes keep of a table, in dB: beyond what 8-bit activations behind it do.
FAITHFUL = 35.0
#: Rows that the loss is measured on.
_ROWS = 1 << 12
_FORMATS = ("int8", "uint8", "int16", "uint16")
#: Activations of more bits than these get rows of 16.
_BITS = 8


def store_tables(
    model: ir.Model, plan: Plan, job: Job, decisions: Mapping[str, Decision], left: Collection[ir.Node]
) -> None:
    """Add the tables of a model to its plan, in place.

    Args:
        left: nodes that stay float for what they compute.
    """
    if not job.options.QuantizeEmbeddings or job.options.AddQDQPairToWeight:
        return
    suited: dict[str, bool] = {}
    for node in list(model.graph):
        layer = decisions[name_of(node)].layer
        if node.op_type != "Gather" or node in left or passed_over(node, job.options) or not _looks_up_rows(node, 0):
            continue
        if layer is None or layer.weight is None or not isinstance(layer.weight.row, Int):
            continue
        table, spec = node.inputs[0], _for_rows(layer.weight, layer.inputs)
        name = "" if table is None else name_of(table)
        if name not in suited:
            suited[name] = _suits(table, plan, spec)
        if suited[name]:
            plan.nodes[name_of(node)] = replace(plan.nodes[name_of(node)], quantized=True, reason=REASON)
            add_weight(node, operand(node, 0), spec, f"{REASON}: Gather {node.name!r}", plan, model)


def _looks_up_rows(node: ir.Node, position: int) -> bool:
    """Whether a node reads its input at ``position`` by whole rows."""
    return node.op_type == "Gather" and position == 0 and node.domain == "" and int_attribute(node, "axis", 0) == 0


def _suits(table: ir.Value | None, plan: Plan, spec: TensorSpec) -> bool:
    """Whether codes of a table save bytes and keep its values: nothing else may need it in float."""
    if table is None or not is_constant(table) or not slots.is_float(table):
        return False
    shape = static_shape(table) or ()
    if len(shape) < 2 or prod(shape) < SMALLEST or prod(shape[1:]) < SHORTEST or table.is_graph_output():
        return False
    known = plan.tensors.get(name_of(table))
    readers = (known.readers or frozenset()) if known is not None else frozenset()
    here = all(use.node.graph is table.graph for use in table.uses())
    if not here or not all(_looks_up_rows(use.node, use.idx) or use.node.name in readers for use in table.uses()):
        return False
    return _is_faithful(table, spec)


def _is_faithful(table: ir.Value, spec: TensorSpec) -> bool:
    source = tensor_of(table)
    values = source.numpy()
    rows = np.asarray(values[:: max(1, len(values) // _ROWS)], np.float32)
    reach = max(-float(values.min()), float(values.max()))
    del values
    let_go(source)
    limit = np.abs(rows).reshape(len(rows), -1).max(-1)
    if not reach < np.finfo(np.float32).max / 2:
        return False  # infinite, not a number, or would be behind its codes
    scale, zero_point = spec.grid.parameters(-limit, limit)
    return sqnr(rows, spec.coding.fake_quantize(rows, scale, zero_point)) > FAITHFUL


def _for_rows(spec: TensorSpec, inputs: TensorSpec | None) -> TensorSpec:
    """A float scale for every row and no zero point: no kernel has to know them.

    Never fewer than 8 bits, and never fewer than activations have: what is looked up is one.
    """
    wide = inputs is not None and isinstance(inputs.row, Int) and inputs.row.bits > _BITS
    kept = spec.format in _FORMATS and (spec.row.bits > _BITS or not wide)
    format = spec.format if kept else "int16" if wide else "int8"
    return TensorSpec(format, granularity=Channel(0), rounding=spec.rounding)


# ---- writing ---------------------------------------------------------------------------------------------------------


def is_lookup(item: QuantizedTensor, use: Any) -> bool:
    """Whether a reader of a constant can take rows of its codes."""
    tensor = item.tensor
    by_rows = isinstance(tensor.spec.granularity, Tensor) or tensor.spec.granularity == Channel(0)
    kept = (
        by_rows
        and constant_kind(tensor.spec, item.options) == "standard"
        and np.ptp(np.asarray(tensor.zero_point)) == 0
    )
    return kept and not item.options.AddQDQPairToWeight and _looks_up_rows(use.node, use.idx)


def write_lookups(item: QuantizedTensor, nodes: Iterable[ir.Node]) -> None:
    """Let Gather nodes take rows of the codes of a table, and of its scales where it has several."""
    tensor, parameters, rank = item.tensor, item.parameters, len(item.value.shape or ())
    scale, codes = np.asarray(tensor.scale, np.float32), typed(item)
    point = np.asarray(tensor.zero_point).reshape(-1)[0].astype(onnx_type(tensor.spec).numpy())
    zero_point = parameters.add(np.asarray(point), f"{stem(tensor)}_zero_point")
    rows = scale.reshape(-1, *[1] * (rank - 1)) if scale.size > 1 else scale.reshape(())
    scales = parameters.add(rows, f"{stem(tensor)}_scale")
    for node in nodes:
        _write(item, node, (codes, scales, zero_point))


def _write(item: QuantizedTensor, node: ir.Node, stored: tuple[ir.Value, ir.Value, ir.Value]) -> None:
    parameters, rows, graph = item.parameters, node.outputs[0], node.graph
    (codes, scales, zero_point), name = stored, shortened(str(node.name))
    several = (scales.shape or ()) != ()

    def add(op_type: str, inputs: Sequence[ir.Value | None], called: str, to: ir.DataType | None = None) -> ir.Value:
        made = ir.Value(name=parameters.names.fresh(f"{shortened(called)}_Output"))
        attributes = {} if to is None else {"to": int(to)}
        new = ir.node(op_type, inputs, attributes=attributes, outputs=[made], name=called)
        if graph is None:
            raise ModelError(f"the node {node.name!r} is in no graph")
        graph.insert_before(node, new)
        return made

    taken = add("Gather", [codes, node.inputs[1]], str(node.name))
    step = parameters.unit() if several else scales
    result = add("DequantizeLinear", [taken, step, zero_point], f"{name}_DequantizeLinear")
    if several:
        factor = add("Gather", [scales, node.inputs[1]], f"{name}_scale")
        result = add("Mul", [result, factor], f"{name}_Mul")
    if rows.dtype is not None and rows.dtype != ir.DataType.FLOAT:
        result = add("Cast", [result], f"{name}_Cast", rows.dtype)
    take_over(result, rows)
