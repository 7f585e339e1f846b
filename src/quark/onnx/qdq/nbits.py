"""``UseMatMulNBits``: weights in few bits, in groups with a scale each; activations stay float.

    MatMul, Gemm   -> com.microsoft MatMulNBits           codes [N, groups, group size x bits / 8]
    Gather         -> com.microsoft GatherBlockQuantized  codes [rows, columns x bits / 8]

ONNX Runtime runs both on any processor, with 2, 4 and 8 bits. What a weight becomes is the business of
``nbits_algorithms``; this module chooses the nodes and writes them.

Not handled: stacked matrices (a constant of more than two axes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.config.job import Job
from quark.config.nbits import NBits, parse_nbits
from quark.config.options import Options
from quark.config.plan import NodePlan, Plan, TensorPlan
from quark.config.rules import NodeInfo
from quark.config.tensor import TensorSpec
from quark.errors import ModelError, check_name
from quark.ir.surgery import (
    Names,
    add_initializer,
    float_attribute,
    input_at,
    int_attribute,
    is_constant,
    let_go,
    name_of,
    operand,
    remove_unused,
    take_over,
    tensor_of,
)
from quark.numerics.granularity import Group
from quark.numerics.packing import pack
from quark.onnx.qdq import slots
from quark.onnx.qdq.angles import NoData
from quark.onnx.qdq.nbits_algorithms import ALGORITHMS, WeightGroups, on_grid
from quark.onnx.qdq.selection import bound, passed_over

MICROSOFT = "com.microsoft"
#: operator -> position of its weight.
WEIGHTS = {"MatMul": 1, "Gemm": 1, "Gather": 0}


def place_nbits(model: ir.Model, job: Job, before: Sequence[NodeInfo] = ()) -> Plan:
    """The Plan: which weights are stored in few bits.

    Raises:
        ConfigError: an algorithm that is not there, or a name that matches nothing.
    """
    nbits = parse_nbits(job.options.MatMulNBitsParams)
    check_name("Algorithm in MatMulNBitsParams", nbits.Algorithm, ALGORITHMS)
    plan, decisions, left = Plan(), bound(model, job, before), NoData.of(model).nodes
    for node in model.graph:
        decision = decisions[name_of(node)]
        why = decision.reason if decision.layer is None else _why_float(node, nbits, job.options, left.get(node))
        plan.nodes[name_of(node)] = NodePlan(name_of(node), node.op_type, why is None, why or "UseMatMulNBits")
        if why is None:
            _add(node, nbits, plan)
    return plan


def _why_float(node: ir.Node, nbits: NBits, options: Options, no_data: str | None) -> str | None:
    if slots.STAYS_FLOAT not in node.meta and (node.domain not in ("", "ai.onnx") or node.op_type not in WEIGHTS):
        return "UseMatMulNBits stores the weights of MatMul, Gemm and Gather only"
    if (listed := passed_over(node, options)) is not None:
        return listed
    weight = input_at(node, WEIGHTS[node.op_type])
    if weight is None or not (slots.is_float(weight) and is_constant(weight)):
        return slots.in_float64(node) or "it has no constant weight"
    if no_data is not None:
        return no_data
    if len(weight.shape or ()) != 2:
        return f"its weight has {len(weight.shape or ())} axes, and the operator takes a matrix"
    if node.op_type == "Gemm" and (int_attribute(node, "transA", 0) or _scaled(node)):
        return "it transposes its first input or scales its product"
    if node.op_type == "Gather":
        return _why_not_gather(node, weight, nbits)
    return None


def _scaled(node: ir.Node) -> bool:
    return float_attribute(node, "alpha", 1.0) != 1.0 or float_attribute(node, "beta", 1.0) != 1.0


def _why_not_gather(node: ir.Node, table: ir.Value, nbits: NBits) -> str | None:
    columns = (table.shape or (0, 0))[1]
    if int_attribute(node, "axis", 0) != 0:
        return "it gathers columns"
    if not isinstance(columns, int) or columns * nbits.Bits % 8:
        return f"its rows of {columns} codes of {nbits.Bits} bits fill no whole bytes"
    return None


def _add(node: ir.Node, nbits: NBits, plan: Plan) -> None:
    value = node.inputs[WEIGHTS[node.op_type]]
    name = "" if value is None else name_of(value)
    rows = node.op_type == "Gather" or bool(int_attribute(node, "transB", 0))
    spec = TensorSpec(f"uint{nbits.Bits}", nbits.Symmetric, granularity=Group(1 if rows else 0, nbits.GroupSize))
    because = f"UseMatMulNBits ({nbits.Algorithm}): {node.op_type} {node.name!r}"
    plan.read_by(name_of(node), TensorPlan(name, "weight", spec, because, name))


def no_parameters(model: ir.Model, plan: Plan, ranges: object, options: Options) -> None:
    """Scales come with the codes, when they are written."""


# ---- writing ---------------------------------------------------------------------------------------------------------

Written = tuple[ir.Value, ir.Value, ir.Value | None]


def emit_nbits(model: ir.Model, plan: Plan, options: Options) -> ir.Model:
    """Rewrite the chosen nodes of ``model``, which is used up; the scales go into ``plan``."""
    nbits, names = parse_nbits(options.MatMulNBitsParams), Names(model)
    done: dict[tuple[str, bool], Written] = {}
    for node in list(model.graph):
        if not plan.nodes[name_of(node)].quantized:
            continue
        weight = operand(node, WEIGHTS[node.op_type])
        rows = node.op_type == "Gather" or bool(int_attribute(node, "transB", 0))
        key = name_of(weight), rows
        if key not in done:
            done[key] = _write(model, names, plan, weight, nbits, rows)
        (_gather if node.op_type == "Gather" else _product)(model, names, node, done[key], nbits)
    model.graph.opset_imports.setdefault(MICROSOFT, 1)
    remove_unused(model)
    return model


def _write(model: ir.Model, names: Names, plan: Plan, weight: ir.Value, nbits: NBits, rows: bool) -> Written:
    """Codes, scales and zero points of one weight as initializers; the float values are let go."""
    source = tensor_of(weight)
    values = source.numpy()
    if not np.isfinite(values).all():
        raise ModelError(f"the constant {weight.name!r} holds NaN or infinity; such a weight cannot be quantized")
    tensor = plan.tensors[name_of(weight)]
    blocked = tensor.spec.granularity
    planned = isinstance(blocked, Group) and blocked.axis == int(rows)  # a reader that takes it turned has its own
    blocks = _blocks(values if rows else values.T, nbits, tensor if planned else None)
    del values
    let_go(source)
    middle = np.full(blocks.scales.shape, 1 << (nbits.Bits - 1), np.uint8)
    points = middle if blocks.zero_points is None else blocks.zero_points
    if planned:
        plan.put(replace(tensor, scale=blocks.scales, zero_point=points))

    def add(array: np.ndarray, label: str) -> ir.Value:
        return add_initializer(model.graph, array, names.fresh(f"{weight.name}_{label}"))

    half = weight.dtype == ir.DataType.FLOAT16
    scales, zeros = add(blocks.scales.astype(np.float16 if half else np.float32), "scales"), blocks.zero_points
    kept = None if zeros is None else add(np.asarray(pack(zeros, nbits.Bits)), "zero_points")
    return add(np.asarray(pack(blocks.codes, nbits.Bits)), f"Q{nbits.Bits}"), scales, kept


def _blocks(values: np.ndarray, nbits: NBits, tensor: TensorPlan | None) -> WeightGroups:
    """The codes under the parameters of the Plan, where it has any; by the chosen algorithm otherwise."""
    if tensor is None or tensor.scale is None or tensor.zero_point is None:
        return ALGORITHMS[nbits.Algorithm].run(values, nbits)
    codes = on_grid(values, nbits, tensor.scale, tensor.zero_point)
    return WeightGroups(codes, tensor.scale, None if nbits.Symmetric else tensor.zero_point.astype(np.uint8))


def _product(model: ir.Model, names: Names, node: ir.Node, written: Written, nbits: NBits) -> None:
    """MatMulNBits for MatMul and Gemm; the bias of a Gemm is added."""
    codes, scales, points = written
    shape, bias = tensor_of(operand(node, 1)).shape.numpy(), input_at(node, 2)
    turned = bool(int_attribute(node, "transB", 0))
    sizes = {"K": shape[1 if turned else 0], "N": shape[0 if turned else 1]}
    numbers = {**sizes, "bits": nbits.Bits, "block_size": nbits.GroupSize}
    if nbits.AccuracyLevel:
        numbers["accuracy_level"] = nbits.AccuracyLevel
    attributes = [ir.AttrInt64(name, int(value)) for name, value in numbers.items()]
    output = ir.Value(name=names.fresh(f"{node.name}_Q{nbits.Bits}_Output"))
    inputs = [node.inputs[0], codes, scales, *([points] if points is not None else [])]
    name = f"{node.name}_Q{nbits.Bits}"
    model.graph.insert_before(node, ir.Node(MICROSOFT, "MatMulNBits", inputs, attributes, outputs=[output], name=name))
    if bias is not None:
        added = ir.Value(name=names.fresh(f"{name}_Add_Output"))
        model.graph.insert_before(node, ir.Node("", "Add", [output, bias], outputs=[added], name=f"{name}_Add"))
        output = added
    take_over(output, node.outputs[0])


def _gather(model: ir.Model, names: Names, node: ir.Node, written: Written, nbits: NBits) -> None:
    """GatherBlockQuantized: blocks run along the rows of the table; a last block that is cut short is stored short."""
    codes, scales, points = written
    columns = int(tensor_of(operand(node, WEIGHTS["Gather"])).shape.numpy()[1])
    flat, matrix = _rows(model, names, codes, columns * nbits.Bits // 8), _rows(model, names, scales)
    numbers = {"bits": nbits.Bits, "block_size": nbits.GroupSize, "gather_axis": 0, "quantize_axis": 1}
    attributes = [ir.AttrInt64(name, value) for name, value in numbers.items()]
    inputs = [flat, node.inputs[1], matrix, *([points] if points is not None else [])]
    output, name = ir.Value(name=names.fresh(f"{node.name}_Output")), f"{node.name}_Q{nbits.Bits}"
    new = ir.Node(MICROSOFT, "GatherBlockQuantized", inputs, attributes, outputs=[output], name=name)
    model.graph.insert_before(node, new)
    take_over(output, node.outputs[0])


def _rows(model: ir.Model, names: Names, value: ir.Value, width: int | None = None) -> ir.Value:
    """The initializer as [rows, the first ``width`` of the rest]; as it is where it is that already."""
    array = tensor_of(value).numpy()
    rows = np.ascontiguousarray(array.reshape(len(array), -1)[:, :width])
    if rows.shape == array.shape:
        return value
    return add_initializer(model.graph, rows, names.fresh(f"{value.name}_rows"))
