"""The nodes that a configuration may name, and the options that are lists of such names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from quark.config.job import Job
from quark.config.options import Options
from quark.config.rules import Decision, NodeInfo
from quark.errors import ConfigError, nearest, unknown
from quark.ir.surgery import STANDS_FOR, name_of
from quark.ir.walk import bodies, nodes_within
from quark.onnx.qdq import slots
from quark.onnx.qdq.op_type_names import check_types, tell_absent

#: Options that list node names, and options that list operator types.
NAME_LISTS = ("NodesToQuantize", "NodesToExcludeOutputQuantization")
TYPE_LISTS = (
    "OpTypesToQuantize",
    "ExtraOpTypesToQuantize",
    "OpTypesToExcludeOutputQuantization",
    "QDQOpTypePerChannelSupportToAxis",
    "CalibPassthroughOpTypes",
    "CopySharedInit",
    "CopyBiasInit",
)
#: Fields of whose types it is told where the model has none: they say what becomes of nodes. (Presets fill the others.)
TOLD = ("layer_type_config", "OpTypesToQuantize", "ExtraOpTypesToQuantize")


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
    check_lists(job, [*before, *now])
    return decisions


def known_tensors(model: ir.Model) -> frozenset[str]:
    """The names of all tensors, those of bodies of If and Loop included."""
    found = {str(value.name) for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for node in nodes_within(model.graph):
        found.update(str(value.name) for value in node.outputs)
        for body in bodies(node):
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
    told = {name: types for name, types in _asked_types(job).items() if name in TOLD}
    tell_absent(told, {node.op_type for node in (*nodes, *known_nodes(model))})
    if job.options.TensorQuantOverrides:
        known = {*tensors, *known_tensors(model)}
        for name in job.options.TensorQuantOverrides:
            if name not in known:
                raise ConfigError(unknown("tensor in TensorQuantOverrides", name, sorted(known)))


def _info(node: ir.Node) -> NodeInfo:
    producers = [value.producer() for value in node.inputs if value is not None]
    reads = any(value is not None and value.is_graph_input() and not value.is_initializer() for value in node.inputs)
    fed_by = tuple(name_of(one) for one in producers if one is not None)
    return NodeInfo(name_of(node), node.op_type, fed_by, reads, tuple(node.meta.get(STANDS_FOR, ())))


def passed_over(node: ir.Node, options: Options) -> str | None:
    """Why a node stays float, whatever it computes: an algorithm has added it, or options list others."""
    if slots.STAYS_FLOAT in node.meta:
        return str(node.meta[slots.STAYS_FLOAT])
    if options.NodesToQuantize and node.name not in options.NodesToQuantize:
        return "NodesToQuantize does not name it"
    chosen = options.OpTypesToQuantize
    if chosen and node.op_type not in (*chosen, *options.ExtraOpTypesToQuantize):
        return f"{node.op_type} is not among the operator types to quantize"
    return None


def check_lists(job: Job, nodes: Sequence[NodeInfo]) -> None:
    """Raise for names in options that no node has, and for operator types that exist nowhere.

    Raises:
        ConfigError: the field or option, the name and the nearest one that exists.
    """
    names, options = {node.name for node in nodes}, job.options
    for option in NAME_LISTS:
        for name in getattr(options, option):
            if name not in names:
                raise ConfigError(
                    f"{option}: the node name {name!r} matches no node of the model.{nearest(name, names)}"
                )
    check_types(_asked_types(job), {node.op_type for node in nodes}, bool(options.UserCustomOpLibPath))


def _asked_types(job: Job) -> dict[str, list[Any]]:
    """The operator types that a job names, by field or option."""
    asked: dict[str, list[Any]] = {option: list(getattr(job.options, option) or ()) for option in TYPE_LISTS}
    asked["RemoveQDQBetweenOps"] = [op_type for pair in job.options.RemoveQDQBetweenOps for op_type in pair]
    for rule in job.rules.rules:
        if rule.by_type:
            asked.setdefault(rule.source, []).extend(rule.selectors)
    for entry in job.algorithms:
        asked.setdefault("target_op_type", []).extend(getattr(entry, "target_op_type", ()))
    return asked


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
