"""How large the file of a quantized model will be, before any number is known.

    bytes = graph without its large weights (nodes, names, shapes) + large constants that stay
          + quantized constants at bits / 8 per element, their scales and zero points
          + for each tensor what the nodes that carry it take: a + b · (length of its name)
          + functions of our operators, once each + the decisions that travel with the model

a and b come from emission itself, on a model of one tensor with that spec, rank and axis of blocks, under a short name
and a long one.

Not handled: nodes that the NPU's simulation adds, and what dynamic and few-bit modes write beside the codes (taken as
two nodes each); the bodies of If and Loop, which are taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import field, replace

import numpy as np
import onnx
import onnx_ir as ir

from quark.config.job import Job
from quark.config.options import Options
from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import TensorSpec
from quark.dataclass import dataclass
from quark.ir.surgery import all_values
from quark.numerics.blocks import Block
from quark.numerics.granularity import Group
from quark.onnx.explain import packed
from quark.onnx.graph.shapes import leave_unsaid
from quark.onnx.graph.weightless import LARGE, light_proto
from quark.onnx.qdq.emit import emit
from quark.onnx.qdq.initializers import LONGEST

#: Bytes of what a dynamic or few-bit constant needs beside its codes.
OTHER = 240
#: Bytes of the name of the producer and of the key of the decisions.
HEADER = 44
#: Lengths of the names that the cost of a name is measured with; the rank of a tensor of which none is known.
SHORT, LONG, RANK = 8, 40, 4


@dataclass(frozen=True)
class Cost:
    """Bytes that carrying one tensor adds to a graph.

    Attributes:
        fixed, per_letter: of the nodes, their parameters, and what is said of their results.
        shared: the part of it that tensors of one scale have once.
        functions: name -> bytes of the functions that the nodes call.
    """

    fixed: float
    per_letter: float
    shared: float = 0.0
    functions: dict[str, int] = field(default_factory=dict)


def predicted_bytes(model: ir.Model, plan: Plan, job: Job, stated: Collection[str] | None = None) -> int:
    """Size of the file, with its external data, that the plan makes of the prepared ``model``.

    Args:
        stated: the tensors whose types are written; ``None`` for all.
    """
    total: float = len(_light(model, stated).SerializeToString()) + len(packed(plan)) + HEADER
    values = {str(value.name): value for value in all_values(model)}
    costs: dict[tuple[TensorSpec, str, tuple[int, ...], int], Cost] = {}
    functions: dict[str, int] = {}
    seen: set[str] = set()
    for tensor in plan:
        value = values[tensor.name]
        length = len(tensor.name) if len(tensor.name) > LONGEST else 0  # names of nodes are shortened beyond it
        key = (replace(tensor.spec, settings=()), tensor.role, _like(value, tensor.spec), length)
        cost = costs.get(key) or costs.setdefault(key, _cost(tensor, key[2], job, length))
        functions |= cost.functions
        dedicated = job.options.DedicatedQDQPair and tensor.role == "activation"
        pairs = max(1, _readers(value, tensor)) if dedicated else 1
        total += pairs * (cost.fixed + cost.per_letter * len(tensor.name)) - (pairs - 1) * cost.shared
        if tensor.role == "activation":
            total -= cost.shared if tensor.group in seen else 0
            seen.add(tensor.group)
    return int(total + sum(functions.values()) + _constants(model, plan, job.options))


def _light(model: ir.Model, stated: Collection[str] | None) -> onnx.ModelProto:
    """The model without its large weights, and without the types of tensors that are not written."""
    light = light_proto(model)
    named = [info for info in light.graph.value_info if info.name not in model.graph.initializers]
    kept = [info for info in named if stated is None or info.name in stated]
    del light.graph.value_info[:]
    light.graph.value_info.extend(kept)
    return light


def _readers(value: ir.Value, tensor: TensorPlan) -> int:
    return sum(tensor.readers is None or use.node.name in tensor.readers for use in value.uses())


def _like(value: ir.Value, spec: TensorSpec) -> tuple[int, ...]:
    """The shape of a small tensor that is carried alike: of the same rank, as long along the axis of blocks."""
    shape = [1] * RANK if value.shape is None else [size if isinstance(size, int) else 1 for size in value.shape]
    axis = spec.granularity.axis if isinstance(spec.granularity, Group) else None
    axis = None if axis is None or not shape else axis % len(shape)
    return tuple(size if position == axis else 1 for position, size in enumerate(shape))


def _constants(model: ir.Model, plan: Plan, options: Options) -> int:
    """Bytes of the data of constants; those of small float ones are in the graph already."""
    total = 0
    for name, value in model.graph.initializers.items():
        source, tensor = value.const_value, plan.tensors.get(name)
        if source is None:
            continue
        here = source.nbytes if source.nbytes <= LARGE else 0
        total += (source.nbytes if tensor is None else _stored(tensor, source, options)) - here
    return total


def _stored(tensor: TensorPlan, source: ir.TensorProtocol, options: Options) -> int:
    """Bytes of a constant and its scales."""
    row, granularity, shape = tensor.spec.row, tensor.spec.granularity, tuple(source.shape.numpy())
    rounded = options.EnableVaimlBF16 and tensor.spec.row.onnx_type == "BFLOAT16"
    if rounded or (options.AddQDQPairToWeight and tensor.role == "weight"):
        return int(source.nbytes)
    if isinstance(row, Block):
        beside = (row.bits - row.element.bits) * row.size / 8  # scale and shifts of a block
        blocks = math.prod(granularity.grid(shape)) if shape else 1
        return math.ceil(source.size * row.element.bits / 8 + blocks * float(beside))
    zero = row.bits / 8 if row.has_zero_point else 0
    return math.ceil(source.size * float(row.bits) / 8 + math.prod(granularity.parameter_shape(shape)) * (4 + zero))


def _cost(tensor: TensorPlan, shape: tuple[int, ...], job: Job, length: int) -> Cost:
    """What carrying such a tensor costs, measured on a model of one of this shape.

    Args:
        length: of its name, where that is a long one; 0 for any other.
    """
    if job.mode != "static":
        return Cost(OTHER, 0.0)
    if length:
        fixed, shared, functions = _added(tensor, shape, job.options, length)
        return Cost(fixed, 0.0, shared, functions)
    short, shared, functions = _added(tensor, shape, job.options, SHORT)
    long, _, _ = _added(tensor, shape, job.options, LONG)
    per_letter = (long - short) / (LONG - SHORT)
    return Cost(short - SHORT * per_letter, per_letter, shared, functions)


def _added(
    tensor: TensorPlan, shape: tuple[int, ...], options: Options, length: int
) -> tuple[int, int, dict[str, int]]:
    """Bytes that emission adds to a graph whose one quantized tensor has a name of this length, without the data of
    constants; bytes of the parameters of an activation; the functions."""
    plain, model, name = _one_tensor(tensor, shape, length), _one_tensor(tensor, shape, length), "t" * length
    leave_unsaid(plain)
    options = options.changed({"UseFP32Scale": False, "DedicatedQDQPair": False})
    made = emit(model, Plan({name: _with_parameters(tensor, name, shape)}), options)
    leave_unsaid(made)
    functions = {str(key): len(ir.to_proto(one).SerializeToString()) for key, one in made.functions.items()}
    parameters = made.graph.initializers if tensor.role == "activation" else {}
    tensors = [value.const_value for value in parameters.values() if value.const_value is not None]
    shared = sum(2 + len(ir.to_proto(tensor).SerializeToString()) for tensor in tensors)
    return _graph_bytes(made) - _graph_bytes(plain), shared, functions


def _with_parameters(tensor: TensorPlan, name: str, shape: tuple[int, ...]) -> TensorPlan:
    """The plan of a tensor of another name and shape, with some scale."""
    unit = tensor.spec.row.unit_scale
    form = () if unit else tensor.spec.granularity.parameter_shape(shape)
    scale, zero_point = np.ones(form, np.float32), np.zeros(form, np.int32)
    return replace(tensor, name=name, group=name, readers=None, bias_of=None, scale=scale, zero_point=zero_point)


def _graph_bytes(model: ir.Model) -> int:
    """Bytes of the graph, without the data of its constants."""
    data = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    return len(ir.to_proto(model.graph).SerializeToString()) - data


def _one_tensor(tensor: TensorPlan, shape: tuple[int, ...], length: int) -> ir.Model:
    """y = Relu(t) with t = Relu(x), or with the constant t."""
    name, kind = "t" * length, ir.TensorType(ir.DataType.FLOAT)
    x, value, y = (ir.Value(name=one, shape=ir.Shape(shape), type=kind) for one in ("x", name, "y"))
    nodes = [ir.node("Relu", [x], outputs=[value])] if tensor.role == "activation" else []
    nodes.append(ir.node("Relu", [value], outputs=[y], name="reader"))
    graph = ir.Graph([x], [y], nodes=nodes, name="one", opset_imports={"": 21})
    if tensor.role != "activation":
        value.const_value = ir.tensor(np.zeros(shape, np.float32), name=name)
        graph.register_initializer(value)
    return ir.Model(graph, ir_version=10)
