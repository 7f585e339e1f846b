"""Models and their functions: which functions a model needs, and a model made to run on any runtime.

``add_functions`` works on every model with operators of our two domains, those of other tools too: nodes without an
overload name get one from what the model says about their tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import numpy as np
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from quark.errors import ModelError
from quark.operators.registry import DOMAIN, OPERATORS, OWN_DOMAIN, VERSION, function_for, get_operator, overload
from quark.operators.views import NodeFacts

#: The IR version from which functions and nodes have overload names.
OVERLOADS_FROM_IR = 10


class KnownValue(NamedTuple):
    """What a model says about one of its values; ``constant`` where it is an initializer held in the model itself."""

    elem_type: str
    shape: tuple[int | None, ...] | None
    constant: TensorProto | None = None

    @property
    def finite(self) -> bool:
        """Whether the value is a constant without infinity and NaN."""
        return self.constant is not None and bool(np.isfinite(numpy_helper.to_array(self.constant)).all())


def required_functions(model: ModelProto) -> list[FunctionProto]:
    """The functions that ``model`` calls and does not have, one per operator and overload, in order of first use.

    Raises:
        ModelError: an opset below 13, or a node without an overload name (``add_functions`` gives it one).
        ConfigError: an attribute that the operator does not have.
    """
    opset = _opset(model)
    have = {(f.domain, f.name, f.overload) for f in model.functions}
    wanted: dict[tuple[str, str, str], FunctionProto] = {}
    for node in _our_nodes(model.graph):
        key = (node.domain, node.op_type, node.overload)
        if key in have or key in wanted:
            continue
        _, found, label = node.overload.partition("@")
        if not found:
            raise ModelError(f"node {node.name!r} ({node.op_type}) has no overload name")
        wanted[key] = function_for(node.op_type, _attributes(node), opset, label)
    return list(wanted.values())


def add_functions(model: ModelProto) -> None:
    """Give ``model`` (changed in place) the functions of all its operators, so that it runs without custom kernels.

    Every attribute is written on every node, as compilers expect; nodes without an overload name get one; the two
    domains are imported, and the IR version is raised to 10.

    Raises:
        ModelError: an opset below 13, an axis that a tensor does not have, a zero point of unknown type.
        ConfigError: an attribute that the operator does not have, or a value that it does not take.
    """
    _opset(model)
    known = known_values(model.graph)
    for node in _our_nodes(model.graph):
        _write_defaults(node)
        if not node.overload:
            node.overload = overload(node.op_type, _attributes(node), site_of(node, known))
        if node.op_type.endswith("QuantizeDequantize") and node.input[0] in known:
            known.setdefault(node.output[0], known[node.input[0]]._replace(constant=None))
    model.functions.extend(required_functions(model))
    imported = {entry.domain for entry in model.opset_import}
    used = {node.domain for node in _our_nodes(model.graph)}
    model.opset_import.extend(helper.make_opsetid(domain, VERSION) for domain in sorted(used - imported))
    if used:
        model.ir_version = max(model.ir_version, OVERLOADS_FROM_IR)


def site_of(node: NodeProto, known: dict[str, KnownValue]) -> NodeFacts:
    """What ``known`` says about the tensors of ``node``."""
    x = known.get(node.input[0], KnownValue("FLOAT", None))
    if node.op_type in ("BFPQuantizeDequantize", "MXQuantizeDequantize", "BlockQuantizeDequantize"):
        return NodeFacts(x.shape, x.elem_type, finite=x.finite)
    if node.op_type in ("BlockDequantize", "ExtendedInstanceNormalization", "ExtendedLSTM"):
        return NodeFacts()
    scale = known.get(node.input[1], KnownValue("FLOAT", None))
    per_axis = scale.shape is not None and None not in scale.shape and prod(n or 0 for n in scale.shape) != 1
    if not node.op_type.startswith("Extended"):
        return NodeFacts(x.shape, x.elem_type, per_axis)
    if node.input[2] not in known:
        raise ModelError(f"node {node.name!r}: the type of its zero point {node.input[2]!r} is not known")
    side = scale if node.op_type == "ExtendedDequantizeLinear" else x
    return NodeFacts(x.shape, side.elem_type, per_axis, known[node.input[2]].elem_type)


def known_values(graph: GraphProto) -> dict[str, KnownValue]:
    """Type and shape of every value that ``graph`` and the graphs inside it describe."""
    known: dict[str, KnownValue] = {}
    for inside in _graphs(graph):
        for tensor in inside.initializer:
            held = tensor if tensor.data_location != TensorProto.EXTERNAL else None
            known[tensor.name] = KnownValue(TensorProto.DataType.Name(tensor.data_type), tuple(tensor.dims), held)
        for value in (*inside.input, *inside.value_info, *inside.output):
            if value.type.HasField("tensor_type"):
                known.setdefault(value.name, _described(value))
        for node in inside.node:
            for attribute in node.attribute:
                if node.op_type == "Constant" and attribute.name == "value":
                    kind = TensorProto.DataType.Name(attribute.t.data_type)
                    known[node.output[0]] = KnownValue(kind, tuple(attribute.t.dims))
    return known


def _described(value: ValueInfoProto) -> KnownValue:
    tensor = value.type.tensor_type
    elem_type = TensorProto.DataType.Name(tensor.elem_type)
    if not tensor.HasField("shape"):
        return KnownValue(elem_type, None)
    return KnownValue(elem_type, tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim))


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _graphs(attribute.g)
            elif attribute.type == AttributeProto.GRAPHS:
                for inside in attribute.graphs:
                    yield from _graphs(inside)


def _our_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for inside in _graphs(graph):
        for node in inside.node:
            if node.domain in (DOMAIN, OWN_DOMAIN) and node.op_type in OPERATORS:
                yield node


def _attributes(node: NodeProto) -> dict[str, float | str]:
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def _write_defaults(node: NodeProto) -> None:
    """Write the attributes that ``node`` leaves to their defaults."""
    given = {attribute.name for attribute in node.attribute}
    defaults = get_operator(node.op_type).attributes
    node.attribute.extend(helper.make_attribute(k, value) for k, value in defaults.items() if k not in given)


def _opset(model: ModelProto) -> int:
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
