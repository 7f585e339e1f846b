"""Lift a model to a newer opset, so that the rest of the flow meets one form of every operator.

Each node whose operator changed between the two opsets goes through the adapters of
:mod:`quark.onnx.graph.adapters`; after that, every node is held against the operator schema of the new opset.
Subgraphs and model-local functions are lifted with the graph; nodes of other domains are not touched; weights are
never read. Models below opset 6 are first brought to 6 by ``onnx.version_converter``.

Why not ``onnx.version_converter`` throughout: it does not enter subgraphs, it copies all weights (1.1 s and three
copies on ResNet-50 shapes, where this takes 10 ms and none), and it gets several operators wrong (see the tests).

Not handled: see :mod:`quark.onnx.graph.adapters`. For older opsets see
:mod:`quark.onnx.graph.lower`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache

import onnx
import onnx_ir as ir

from quark.errors import ModelError
from quark.ir.surgery import Names, input_at, label, name_nodes, opset
from quark.ir.walk import all_nodes, nodes_within
from quark.onnx.graph.adapters import ADAPTERS, TYPED, AdapterTarget, Refused
from quark.onnx.graph.admission import registered
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.graph.weightless import through_proto

OLDEST = 6
"""The first opset that the adapters read. (ONNX Runtime itself runs 7 and up.)"""


def lift(model: ir.Model, version: int) -> ir.Model:
    """``model`` in opset ``version`` or the higher one it has.

    Args:
        model: Edited in place (models below opset 7 are rebuilt).
        version: The wanted version of the default operator set. A function of a higher one lifts the graph to its own.

    Returns:
        The lifted model; ``model`` itself, untouched, when its opset is high enough already and its functions share it.

    Raises:
        ModelError: A node has no equivalent in the new opset; the message names it and the reason.
    """
    newest = onnx.defs.onnx_opset_version()
    if version > newest:
        raise ModelError(f"opset {version} is not known; the installed onnx {onnx.__version__} knows up to {newest}")
    if "" not in model.graph.opset_imports and model.ir_version >= 3:
        model.graph.opset_imports[""] = version  # every node is of another domain
    starts = [start for _, start in _bodies(model)]
    if len(set(starts)) > 1:  # what calls a function and the function itself: one opset, or it cannot be inlined
        version = max(version, *starts)
    if min(starts) >= version:
        return model
    if opset(model) < OLDEST:
        model = _to_oldest(model)
    _lift_nodes(model, version)
    _lift_imports(model, version)
    name_nodes(model)
    return model


def _to_oldest(model: ir.Model) -> ir.Model:
    """Opset 6, in which attributes got the names that they have since."""
    try:
        return through_proto(model, lambda proto: onnx.version_converter.convert_version(proto, OLDEST))
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"the model (opset {opset(model)}) cannot be lifted to opset {OLDEST}: {error}") from error


def _lift_nodes(model: ir.Model, version: int) -> None:
    if opset(model) < 7 or any(_type_is_missing(node) for node in all_nodes(model)):
        infer_shapes(model)
    target = AdapterTarget(model.graph, Names(model))
    for body, start in _bodies(model):
        nodes = [node for node in nodes_within(body) if node.domain == ""]
        for node in nodes:
            try:
                _adapt(node, start, version, target)
            except Refused as reason:
                wish = f"node {label(node)} cannot be lifted from opset {start} to {version}"
                raise ModelError(f"{wish}: {reason}") from None


def _bodies(model: ir.Model) -> Iterator[tuple[ir.Graph | ir.Function, int]]:
    """The graph and the functions, each with its opset: a function has its own."""
    yield model.graph, opset(model)
    for function in model.functions.values():
        if "" in function.opset_imports:
            yield function, function.opset_imports[""]


def _type_is_missing(node: ir.Node) -> bool:
    data = input_at(node, 0)
    return data is not None and node.op_type in TYPED and (data.type is None or data.shape is None)


def _adapt(node: ir.Node, start: int, version: int, target: AdapterTarget) -> None:
    """Apply the changes between ``start`` (excluded) and ``version``; an operator may change its name on the way."""
    at = start
    while (change := _next_change(node.op_type, at, version)) is not None:
        at = change
        dict(ADAPTERS[node.op_type])[change](node, target)
    reason = misfit(node, version, start)
    if reason is not None:
        raise Refused(reason)


def _next_change(op_type: str, after: int, version: int) -> int | None:
    return next((at for at, _ in ADAPTERS.get(op_type, ()) if after < at <= version), None)


@cache
def schema_of(op_type: str, version: int) -> onnx.defs.OpSchema | None:
    """The form of an operator of the default domain in an opset, None where it has none."""
    try:
        return onnx.defs.get_schema(op_type, version, "")
    except onnx.defs.SchemaError:
        return None


def misfit(node: ir.Node, version: int, start: int, left_out: Collection[str] = ()) -> str | None:
    """Why a node of the default domain is not valid in opset ``version``, None where it is.

    An operator that was deprecated after opset ``start`` does not fit; one that was deprecated before does, as it did.
    One that ONNX does not have in ``start`` either is the runtime's own (SimplifiedLayerNormalization), in any opset.

    Args:
        left_out: attributes that the node will not have.
    """
    schema = schema_of(node.op_type, version)
    if schema is None and schema_of(node.op_type, start) is None and ("", node.op_type) in registered():
        return None
    if schema is None or (schema.deprecated and schema.since_version > start):
        return f"opset {version} has no operator {node.op_type}"
    unknown = [name for name in node.attributes if name not in schema.attributes and name not in left_out]
    if unknown:
        return f"{node.op_type} has no attribute {unknown[0]!r} in opset {version}"
    required = [name for name, attr in schema.attributes.items() if attr.required and name not in node.attributes]
    if required:
        return f"{node.op_type} needs the attribute {required[0]!r} in opset {version}"
    if not schema.min_input <= len(node.inputs) <= schema.max_input:
        return f"{node.op_type} takes {schema.min_input} to {schema.max_input} inputs, not {len(node.inputs)}"
    if not schema.min_output <= len(node.outputs) <= schema.max_output:
        return f"{node.op_type} has {schema.min_output} to {schema.max_output} outputs, not {len(node.outputs)}"
    return None


def _lift_imports(model: ir.Model, version: int) -> None:
    model.graph.opset_imports[""] = version
    for function in model.functions.values():
        if function.opset_imports.get("", version) < version:
            function.opset_imports[""] = version
