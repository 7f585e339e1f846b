"""The nodes that a configuration may name, and the options that are lists of such names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx
import onnx_ir as ir

from quark.config.job import Job
from quark.config.options import Options
from quark.config.rules import Decision, NodeInfo
from quark.errors import ConfigError, nearest, unknown

#: Options that list node names, and options that list operator types.
NAME_LISTS = ("NodesToQuantize", "NodesToExcludeOutputQuantization")
TYPE_LISTS = (
    "OpTypesToQuantize",
    "ExtraOpTypesToQuantize",
    "OpTypesToExcludeOutputQuantization",
    "QDQOpTypePerChannelSupportToAxis",
    "CopySharedInit",
    "CopyBiasInit",
)


def known_nodes(model: ir.Model) -> list[NodeInfo]:
    """What rules may ask about every node of a model."""
    return [_info(node) for node in model.graph]


def bound(model: ir.Model, job: Job, before: Sequence[NodeInfo] = ()) -> Mapping[str, Decision]:
    """What the rules of the job say about every node of the main graph.

    Raises:
        ConfigError: a name or pattern of the configuration matches nothing, neither here nor in ``before``.
    """
    now = known_nodes(model)
    decisions = job.rules.bind(now, before)
    check_lists(job.options, [*before, *now])
    return decisions


def known_tensors(model: ir.Model) -> frozenset[str]:
    """The names of all tensors, those of bodies of If and Loop included."""
    found = {str(value.name) for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        found.update(str(value.name) for value in node.outputs)
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                body = attribute.as_graph()
                found.update(str(value.name) for value in (*body.inputs, *body.initializers.values()))
    return frozenset(found)


def check_names(model: ir.Model, job: Job, nodes: Sequence[NodeInfo], tensors: Collection[str]) -> None:
    """Raise for what the configuration names and the model does not have, before any data are read.

    Args:
        model: after the graph passes.
        nodes, tensors: what there was before them; names that a pass has folded away are no mistake.

    Raises:
        ConfigError: the field, the name and the nearest one that exists.
    """
    bound(model, job, nodes)
    if job.options.TensorQuantOverrides:
        known = {*tensors, *known_tensors(model)}
        for name in job.options.TensorQuantOverrides:
            if name not in known:
                raise ConfigError(unknown("tensor in TensorQuantOverrides", name, sorted(known)))


def _info(node: ir.Node) -> NodeInfo:
    producers = [value.producer() for value in node.inputs if value is not None]
    reads = any(value is not None and value.is_graph_input() and not value.is_initializer() for value in node.inputs)
    return NodeInfo(node.name or "", node.op_type, tuple(p.name or "" for p in producers if p is not None), reads)


def check_lists(options: Options, nodes: Sequence[NodeInfo]) -> None:
    """Raise for names in options that no node has, and for operator types that neither ONNX nor the model has.

    (A type that only this model lacks is no mistake: one configuration serves many models.)

    Raises:
        ConfigError: the option, the name and the nearest one that exists.
    """
    names, types = {node.name for node in nodes}, {node.op_type for node in nodes}
    for option in NAME_LISTS:
        _check(option, "node name", getattr(options, option), names)
    asked = {option: list(getattr(options, option) or ()) for option in TYPE_LISTS}
    asked["RemoveQDQBetweenOps"] = [op_type for pair in options.RemoveQDQBetweenOps for op_type in pair]
    if not types.issuperset(op_type for listed in asked.values() for op_type in listed):
        types |= {schema.name for schema in onnx.defs.get_all_schemas()}
    for option, listed in asked.items():
        _check(option, "operator type", listed, types)


def channel_axis(options: Options, node: ir.Node, rank: int, own: int) -> int:
    """The axis of a weight's channels: what ``QDQOpTypePerChannelSupportToAxis`` says, or the operator's own.

    Raises:
        ConfigError: the weight has no such axis.
    """
    axis = options.QDQOpTypePerChannelSupportToAxis.get(node.op_type, own)
    if not -rank <= axis < rank:
        raise ConfigError(
            f"QDQOpTypePerChannelSupportToAxis: the weight of {node.op_type} {node.name!r} has the axes "
            f"{-rank}..{rank - 1}, not {axis}"
        )
    return axis % rank


def _check(option: str, kind: str, given: Iterable[str], known: set[str]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"{option}: the {kind} {name!r} matches no node of the model.{nearest(name, known)}")
