"""The Plan that a quantized model was made by, read off its graph: models of ours and of other tools.

Every quantizer of a tensor becomes a row with the name that the tensor has in the float model, its type, granularity,
scale and zero point (``given``; results where they follow from others, as a bias's do). How a scale was found is not in
a graph, so rows name no method; reasons are those that a model of ours carries.

Not handled, and refused: quantizers in bodies of If and Loop, MatMulNBits, operators on codes (QLinearConv, …), one
tensor quantized in two ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from quark.config.plan import Plan, Role, TensorPlan
from quark.config.tensor import TensorSpec
from quark.errors import ConfigError, ModelError
from quark.ir.surgery import attribute, constant_array, input_at, int_attribute, ints_attribute, is_constant
from quark.numerics.blocks import BLOCKS
from quark.numerics.formats import FORMATS, Int, get_format
from quark.numerics.granularity import Channel, Granularity, Group, Tensor
from quark.onnx.explain import bases, decisions
from quark.onnx.graph.model import load
from quark.onnx.graph.quantized import (
    DEQUANTIZE,
    FUSED,
    QUANTIZE,
    QUANTIZERS,
    STORED,
    all_nodes_in_graphs,
    code_type,
    dequantizer,
    parameters,
)
from quark.onnx.qdq.biases import layer_of
from quark.operators.block_operators import operator_of

REASON = "the quantized model has it so"
_FORMATS = {row.onnx_type: name for name, row in reversed(FORMATS.items()) if getattr(row, "onnx_type", None)}
_HALVES = {int(ir.DataType.BFLOAT16): "bfloat16", int(ir.DataType.FLOAT16): "float16"}
#: Operators on codes or on stored codes; beside them those whose names begin with ``QLinear``.
_REFUSED = frozenset(
    [
        "ConvInteger",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul",
        "GatherBlockQuantized",
        "MatMulBnb4",
        "MatMulFpQ4",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "QAttention",
        "QEmbedLayerNormalization",
        "QGemm",
        "QMoE",
    ]
)
Sides = tuple[np.ndarray, np.ndarray]
_CODES = ("_quantized", "_codes")  # what a constant's codes are called after its name, here and in ONNX Runtime


def plan_of(path: str | Path) -> Plan:
    """The plan of a quantized model.

    Raises:
        ModelError: nothing in it is quantized, or in a way that a plan cannot hold; the node is named.
    """
    model = load(path)
    plan, told = Plan(read_from=str(path)), decisions(model)
    for node, row in rows_of(model):
        if isinstance(row, ModelError):
            raise ModelError(f"{str(path)!r}: {row}")
        if node.graph is not model.graph:
            raise ModelError(f"{str(path)!r}: {node.name!r} quantizes in a body of If or Loop; a plan holds one graph")
        known = plan.tensors.get(row.name)
        if known is not None and _how(known) != _how(row):
            raise ModelError(f"{str(path)!r}: the tensor {row.name!r} is quantized in two ways; a plan holds one")
        if known is not None and known.readers is not None and row.readers is not None:
            row = replace(row, readers=known.readers | row.readers)
        _, _, reason = told.get(row.name, "").partition(", because ")
        plan.put(replace(row, reason=reason.partition("; ")[0] or REASON, group=row.name))
    if not plan.tensors:
        raise ModelError(f"{str(path)!r} is not quantized: no node in it quantizes or dequantizes a tensor")
    return plan


def explain_graph(path: str | Path, name: str) -> str:
    """How a tensor of a quantized model is quantized, in one line, where the model says nothing about itself.

    Raises:
        ModelError: as ``plan_of``.
        ConfigError: nothing of this name is quantized; the nearest name is shown.
    """
    plan = plan_of(path)
    return plan.explain(next((one for one in (name, *bases(name)) if one in plan.tensors), name))


def stored_row(value: ir.Value) -> tuple[TensorPlan, Sides, np.ndarray] | None:
    """The row of a constant that a DequantizeLinear makes ``value`` of, its scale and zero point, and its codes; None
    where it is no such constant, or none that a plan can hold."""
    node = dequantizer(value)
    source = None if node is None else input_at(node, 0)
    codes = constant_array(source)
    if node is None or source is None or codes is None:
        return None
    try:
        row = _row(node, source, "weight")
    except (ModelError, ConfigError):
        return None
    return None if row.given is None else (row, row.given, codes)


def _how(row: TensorPlan) -> tuple[object, ...]:
    return row.role, row.spec, *([] if row.given is None else (np.asarray(side).tolist() for side in row.given))


def rows_of(model: ir.Model, constants: bool = True) -> Iterator[tuple[ir.Node, TensorPlan | ModelError]]:
    """The nodes of all graphs that quantize or dequantize, each with its row, or why a plan cannot hold it.

    Args:
        constants: whether stored codes are looked at.
    """
    for node in all_nodes_in_graphs(model):
        source = input_at(node, 0)
        if node.op_type in _REFUSED or node.op_type.startswith("QLinear"):
            yield node, ModelError(f"a plan holds no {node.op_type}, which is the node {node.name!r}")
        elif source is not None and (constants or not is_constant(source)):
            try:
                yield from ((node, row) for row in _rows(node, source, constants))
            except (ModelError, ConfigError) as error:
                yield node, ModelError(str(error))


def _rows(node: ir.Node, source: ir.Value, constants: bool) -> Iterator[TensorPlan]:
    if node.op_type in QUANTIZERS:
        role: Role = "weight" if is_constant(source) else "activation"
        yield _row(node, source, role)
    elif node.op_type in DEQUANTIZE | STORED and is_constant(source):
        yield _row(node, source, "bias" if source.dtype == ir.DataType.INT32 else "weight")
    elif node.op_type in DEQUANTIZE and constants and (lookup := _lookup(source)) is not None:
        yield _table(node, lookup)
    elif node.op_type == "Cast":
        yield from _cast(node, source)


def _row(node: ir.Node, source: ir.Value, role: Role) -> TensorPlan:
    """The decision that a quantizer, or a dequantizer of codes, carries out."""
    name = _name(node, source)
    if node.op_type == "DynamicQuantizeLinear":
        spec = TensorSpec("uint8", symmetric=False, dynamic=True)
        return TensorPlan(name, role, spec, REASON, readers=_readers(node, source))
    if (block := _block_format(node)) is not None:
        above = _tensor_scale(node)
        return TensorPlan(name, role, _in_blocks(node, block), REASON, readers=_readers(node, source), given=above)
    format = str(attribute(node, "format") or _FORMATS.get(code_type(node), code_type(node).lower()))
    found = parameters(node)
    if format not in FORMATS or found is None:
        what = f"codes of the type {format}" if found is not None else "a scale that is computed"
        raise ModelError(f"a plan holds no {what}, which the node {node.name!r} has")
    spec = spec_of(format, *found, granularity_of(node, found[0]))
    if role == "weight" and node.op_type in DEQUANTIZE:
        spec = replace(spec, narrow=_is_narrow(spec, constant_array(source)))
    if role == "bias":
        scale, zero_point = _given(*found)  # results, which are found anew: its input and its weight give them
        row = TensorPlan(name, role, spec, REASON, readers=_readers(node, source), bias_of=_layer(node))
        return replace(row, scale=scale, zero_point=zero_point)
    return TensorPlan(name, role, spec, REASON, readers=_readers(node, source), given=_given(*found))


def spec_of(format: str, scale: np.ndarray, zero_point: np.ndarray, granularity: Granularity) -> TensorSpec:
    """How a tensor of these parameters is quantized."""
    row = get_format(format)
    middle = row.middle if isinstance(row, Int) else 0
    exact = bool((np.frexp(scale)[0] == 0.5).all()) and not row.unit_scale
    symmetric = not row.has_zero_point or bool((zero_point == middle).all())
    return TensorSpec(format, symmetric, granularity=granularity, scale_rule="power_of_two" if exact else "float32")


def _given(scale: np.ndarray, zero_point: np.ndarray) -> Sides:
    return scale.astype(np.float32), zero_point.astype(np.int32)


def granularity_of(node: ir.Node, scale: np.ndarray) -> Granularity:
    """Which elements share a scale, by the attributes of a Q or DQ."""
    axis, size = int_attribute(node, "axis", 1), int_attribute(node, "block_size", 0)
    if scale.size == 1 and not size:
        return Tensor()
    return Group(axis, size) if size else Channel(axis)


def _is_narrow(spec: TensorSpec, codes: np.ndarray | None) -> bool:
    """Whether no code of a constant is the lowest one: what ours leave out of symmetric integers."""
    row = get_format(spec.format)
    return codes is None or not isinstance(row, Int) or not bool((codes == row.min).any())


def _block_format(node: ir.Node) -> str | None:
    """The block format whose operator has the attributes of a node; None where there are no blocks."""
    format = attribute(node, "format")
    if node.op_type == "BlockDequantize" or format in BLOCKS:
        return str(format)
    if node.op_type not in FUSED or node.op_type == "QuantizeDequantize":
        return None
    for name, row in BLOCKS.items():
        try:
            operator = operator_of(replace(row, size=int_attribute(node, "block_size", row.size)))
        except ConfigError:
            continue
        if operator.name == node.op_type and all(attribute(node, key) == at for key, at in operator.attributes.items()):
            return name
    raise ModelError(f"no format has the blocks of the node {node.name!r} ({node.op_type}): a plan cannot hold it")


def _in_blocks(node: ir.Node, format: str) -> TensorSpec:
    if (row := BLOCKS.get(format)) is None:
        raise ModelError(f"a plan holds no blocks of the type {format}, which the node {node.name!r} has")
    return TensorSpec(
        format, granularity=Group(int_attribute(node, "axis", 1), int_attribute(node, "block_size", row.size))
    )


def _tensor_scale(node: ir.Node) -> Sides | None:
    """The scale that the scales of all blocks are multiples of; None where they are no multiples of any."""
    value = input_at(node, 1 if node.op_type == "BlockQuantizeDequantize" else 3)
    if value is None:
        return None
    if (scale := constant_array(value)) is None:
        raise ModelError(f"a plan holds no scale that is computed, which the node {node.name!r} has")
    return _given(scale, np.zeros(scale.shape))


def _cast(node: ir.Node, source: ir.Value) -> Iterator[TensorPlan]:
    """A tensor rounded to a 16-bit float by a pair of Casts, or a constant's codes behind Cast, Sub and Mul."""
    format = _HALVES.get(int_attribute(node, "to", 0))
    readers = [use.node for use in node.outputs[0].uses()]
    if is_constant(source):
        kind = _FORMATS.get(source.dtype.name if source.dtype is not None else "")
        if kind is None or not str(source.name).endswith(_CODES):
            return
        yield _folded(node, source, kind)
    elif format is not None and readers and all(one.op_type == "Cast" for one in readers):
        yield TensorPlan(
            _base(str(source.name)), "activation", TensorSpec(format), REASON, readers=_readers(node, source)
        )


def _folded(node: ir.Node, source: ir.Value, format: str) -> TensorPlan:
    """Codes behind Cast, Sub and Mul: the operands are the zero point and the scale, laid out along one axis."""
    operands, last = {"Sub": np.zeros(()), "Mul": np.ones(())}, node
    granularity: Granularity = Tensor()
    while (
        step := next((use.node for use in last.outputs[0].uses() if use.node.op_type in operands), None)
    ) is not None:
        beside = input_at(step, 1)
        gather = None if beside is None else beside.producer()
        if gather is not None and gather.op_type == "Gather":
            beside, index = input_at(gather, 0), constant_array(input_at(gather, 1))
            size = int((np.asarray(index) == 0).sum())
            granularity = Group(int_attribute(gather, "axis", 0), size)
        if (values := constant_array(beside)) is None:
            break
        if values.size > 1 and not isinstance(granularity, Group):
            granularity, values = Channel(int(np.argmax(values.shape))), values.reshape(-1)
        operands[step.op_type], last = values if values.size > 1 else values.reshape(()), step
    ours = f"{str(node.name).removesuffix('_DequantizeLinear')}_Transpose"  # codes laid out otherwise than the constant
    turn = next((use.node for use in last.outputs[0].uses() if use.node.name == ours), None)
    if turn is not None and isinstance(granularity, Channel):
        granularity, last = Channel((ints_attribute(turn, "perm") or [0]).index(granularity.axis)), turn
    scale, zero_point = np.broadcast_arrays(operands["Mul"], operands["Sub"])
    spec = spec_of(format, scale.astype(np.float64), zero_point.astype(np.int64), granularity)
    spec = replace(spec, narrow=_is_narrow(spec, constant_array(source)))
    name = _base(str(source.name))
    return TensorPlan(name, "weight", spec, REASON, readers=_readers(last, source), given=_given(scale, zero_point))


def _lookup(codes: ir.Value) -> ir.Node | None:
    """The Gather that takes rows of a constant's codes."""
    maker = codes.producer()
    return maker if maker is not None and maker.op_type == "Gather" and is_constant(input_at(maker, 0)) else None


def _table(node: ir.Node, lookup: ir.Node) -> TensorPlan:
    """A table of codes: their scale, or the scales of their rows that are taken beside them."""
    found, table = parameters(node), lookup.inputs[0]
    if found is None or table is None:
        raise ModelError(f"a plan holds no scale that is computed, which the node {node.name!r} has")
    scale, zero_point = found
    granularity: Granularity = Tensor()
    for use in node.outputs[0].uses():
        beside = [_lookup(value) for value in use.node.inputs if value is not None]
        rows = next((constant_array(one.inputs[0]) for one in beside if one is not None), None)
        if use.node.op_type == "Mul" and rows is not None:
            scale = scale * rows.reshape(-1).astype(np.float64)
            granularity, zero_point = Channel(0), np.broadcast_to(zero_point, scale.shape)
    spec = spec_of(_FORMATS[code_type(node)], scale, zero_point, granularity)
    spec = replace(spec, narrow=_is_narrow(spec, constant_array(table)))
    given = _given(scale, zero_point)
    return TensorPlan(
        _base(str(table.name)), "weight", spec, REASON, readers=frozenset([str(lookup.name)]), given=given
    )


def _name(node: ir.Node, source: ir.Value) -> str:
    """What the plan calls the tensor: of what is quantized already and anew, what its own nodes are called after."""
    before = source.producer()
    if before is not None and before.op_type in DEQUANTIZE | FUSED:
        name = str(node.outputs[0].name)
        kind = "QuantizeLinear" if node.op_type in QUANTIZE else node.op_type
        return name.removesuffix(f"_{kind}_Output")
    return _base(str(source.name))


def _base(name: str) -> str:
    """What the tensor is called in the float model."""
    for suffix in (*_CODES, "_QuantizeLinear_Input"):
        name = name.removesuffix(suffix)
    return name


def _quantized(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes that read what comes out of a quantizer's last node."""
    for use in node.outputs[0].uses():
        if use.node.op_type in DEQUANTIZE or (use.node.op_type == "Cast" and node.op_type == "Cast"):
            yield from _quantized(use.node)
        else:
            yield use.node


def _readers(node: ir.Node, source: ir.Value) -> frozenset[str] | None:
    """The nodes that read the quantized values, None where nothing reads the float ones."""
    if all(use.node.op_type == node.op_type for use in source.uses()):
        return None
    return frozenset(str(reader.name) for reader in _quantized(node))


def _layer(node: ir.Node) -> tuple[str, str] | None:
    """The input and the weight of the node that adds a bias."""
    for reader in _quantized(node):
        sources = [_source(value) for value in layer_of(reader).inputs[:2]]
        if all(sources):
            return str(sources[0]), str(sources[1])
    return None


def _source(value: ir.Value | None) -> str | None:
    """The float tensor whose quantized values these are."""
    last = dequantizer(value)
    first = None if last is None else input_at(last, 0)
    made = None if first is None else first.producer()
    if made is not None and made.op_type in QUANTIZE:
        first = input_at(made, 0)
    return None if first is None else _base(str(first.name))
