"""Which tensors of a graph are quantized, by which configuration, and which of them share a quantizer.

A tensor is quantized where it is made, if ``output_tensors`` says so for the operator that makes it; else where it is
read, if ``input_tensors`` says so for the operator that reads it. Of a pattern (layer, addition; with the activation
behind it) the first operator's configuration counts, and the tensor between the two stays float. Tensors that only move
or select values have the quantizer of the tensor that they come from; all that a concatenation joins share one.

Layers are called as in the model (``features.3.squeeze``), operators by the module that calls them and their kind
(``layer1.0.add``); ``exclude`` and ``layer_quant_config`` take both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn
from torch.fx import GraphModule, Node

from quark.config.plan import NodePlan, Plan
from quark.dataclass import dataclass
from quark.errors import ConfigError, ModelError
from quark.numerics.granularity import Tensor
from quark.torch.config.model import QConfig
from quark.torch.graph.calls import is_real, operator, path_of
from quark.torch.graph.floats import LeftFloat, float_nodes
from quark.torch.graph.operators import JOINS, end_of, inputs_of, inside, is_operator, source
from quark.torch.layers import LayerKind
from quark.torch.matching import (
    ACTIVATIONS,
    UNNAMED,
    Candidate,
    Matches,
    bind,
    check_patterns,
    choose,
    excluded_by,
    find_candidates,
    is_excluded,
)
from quark.torch.plan_rows import ROLES, put, tensor_name
from quark.torch.quantized_layer import OWN
from quark.torch.stage import Stages

OPERATOR = LayerKind(nn.Module, None)
UNKNOWN = "no row of the table knows the operator"
Key = tuple[Node, Stages]
Read = tuple[Node, Node, Stages]


@dataclass(frozen=True)
class Spot:
    """Where a row of the plan is in the graph.

    Attributes:
        tensor: the values that are quantized.
        readers: the nodes for which they are; empty: for all.
    """

    tensor: Node
    readers: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Places:
    """The decisions about a graph: a plan, and where its activations are.

    Attributes:
        layers: the plan, and the modules whose weights are quantized.
        spots: by the names of rows.
        names: of the tensors.
    """

    layers: Matches
    spots: Mapping[str, Spot]
    names: Mapping[Node, str]

    def quantizer_of(self, row: str) -> tuple[str, str]:
        """The row whose quantizer a row has, and the name of the tensor that this one was made for."""
        group = self.layers.plan.tensors[row].group
        return group, self.names[source(self.spots[group].tensor)]


@dataclass(frozen=True)
class Pattern:
    """A pattern: a layer or operator, with the activation behind it.

    Attributes:
        start, end: its first and last node.
        candidate: what patterns of the configuration match.
        stages: by slot what runs; empty where it stays float.
        reason: the field of the configuration that decided.
    """

    start: Node
    end: Node
    candidate: Candidate
    stages: Mapping[str, Stages]
    reason: str


def place(model: GraphModule, config: QConfig) -> Places:
    """Decide about a lifted graph.

    Raises:
        ConfigError: a pattern that matches nothing, or a tensor that does not fit its configuration.
        ModelError: nothing to quantize.
    """
    names = tensor_names(model)
    layers = {name: layer for layer in find_candidates(model) for name in layer.names}
    floats = float_nodes(model)
    units = list(find_units(model, config, layers, names, floats.nodes))
    candidates = [*dict.fromkeys(unit.candidate for unit in units), *unused(layers, units)]
    check_patterns(model, config, candidates)
    plan = Plan()
    for unit in units:
        put_constants(plan, unit)
    spots = activations(plan, units, names, floats)
    if not plan.tensors:
        raise ModelError(f"nothing to quantize in the graph of {len(candidates)} layers and operators")
    for layer in candidates:
        if is_excluded(layer, config):
            plan.floats[tensor_name(layer.name, "weight")] = excluded_by(layer, config)
    for node in filter(stays_float, model.graph.nodes):
        plan.nodes[names[node]] = NodePlan(names[node], operator(node) or str(node.target), False, UNKNOWN)
    return Places(Matches(plan, tuple(dict.fromkeys(layers.values()))), spots, names)


def put_constants(plan: Plan, unit: Pattern) -> None:
    """Write the decisions about a unit into the plan, and the rows of its weight and bias."""
    layer, kind = unit.candidate, operator(unit.start) or type(unit.candidate.module).__name__
    plan.nodes[layer.name] = NodePlan(layer.name, kind, any(unit.stages.values()), unit.reason)
    for slot in OWN if layer.kind is not OPERATOR else ():
        put(plan, tensor_name(layer.name, slot), ROLES[slot], unit.stages.get(slot, ()), unit.reason)


def activations(plan: Plan, units: list[Pattern], names: Mapping[Node, str], floats: LeftFloat) -> dict[str, Spot]:
    """Write the rows of the activations into the plan; where each is."""
    written, spots = written_by(units, floats), {}
    read = tuple(reads(units, written, floats))
    first = {key: group[0] for group in joined(units, written, read) for key in group}
    found: dict[Key, list[Node]] = {key: [] for key in written.items()}
    for tensor, reader, stages in read:
        found.setdefault((tensor, stages), []).append(reader)
    groups: dict[Key, str] = {}
    reasons = {unit.end: unit.reason for unit in units} | {unit.start: unit.reason for unit in units}
    for (tensor, stages), readers in found.items():
        base = name = names[tensor]
        number = 1
        while name in plan.tensors:
            number += 1
            name = f"{base} ({number})"
        key = source(tensor), stages
        group = groups.setdefault(first.get(key, key), name)
        alone = frozenset(names[reader] for reader in readers) or None
        reason = reasons[readers[0] if readers else tensor]
        put(plan, name, "activation", stages, reason)
        plan.put(replace(plan.tensors[name], group=group, readers=alone))
        spots[name] = Spot(tensor, tuple(readers))
    return spots


def find_units(
    model: GraphModule,
    config: QConfig,
    layers: Mapping[str, Candidate],
    names: Mapping[Node, str],
    floats: Mapping[Node, str],
) -> Iterator[Pattern]:
    """The patterns of a graph, in order; nothing runs in those that stay float, whatever the configuration says."""
    taken: set[Node] = set()
    for node in model.graph.nodes:
        layer = layers.get(str(node.target)) if node.op == "call_module" else None
        if node in taken or (layer is None and not (is_operator(node) and is_real(node))):
            continue
        end = end_of(node, layer is not None)
        taken |= inside(node, end)
        candidate = layer or Candidate((names[node],), nn.Module(), OPERATOR)
        found = ({}, floats[node]) if node in floats else given_to(candidate, config)
        yield Pattern(node, end, candidate, *found)


def given_to(candidate: Candidate, config: QConfig) -> tuple[Mapping[str, Stages], str]:
    """What runs on the tensors of a layer or operator, and the reason; nothing: it stays float."""
    if is_excluded(candidate, config):
        return {}, excluded_by(candidate, config)
    found, origin = choose(candidate, config)
    if found is None:
        return {}, UNNAMED
    if candidate.kind is not OPERATOR:
        return bind(candidate, found, origin, False), origin
    return {slot: found.stages(slot) for slot in ACTIVATIONS}, origin


def unused(layers: Mapping[str, Candidate], units: list[Pattern]) -> list[Candidate]:
    """Layers that the graph holds and does not call."""
    called = {unit.candidate for unit in units}
    return [layer for layer in dict.fromkeys(layers.values()) if layer not in called]


def written_by(units: list[Pattern], floats: LeftFloat) -> dict[Node, Stages]:
    """The outputs that are quantized for all readers."""
    found = ((unit, unit.stages.get("output_tensors", ())) for unit in units if is_real(unit.end))
    left = {*floats.nodes, *floats.tensors}
    return {unit.end: stages for unit, stages in found if stages and unit.end not in left}


def reads(units: list[Pattern], written: Mapping[Node, Stages], floats: LeftFloat) -> Iterator[Read]:
    """The inputs that are quantized for one reader, because nobody did before."""
    for unit in units:
        stages = unit.stages.get("input_tensors", ())
        for tensor in inputs_of(unit.start) if stages else ():
            plain = tensor in floats.tensors or (unit.start, tensor) in floats.divisors
            if is_real(tensor) and source(tensor) not in written and not plain:
                yield tensor, unit.start, stages


def joined(units: list[Pattern], written: Mapping[Node, Stages], read: tuple[Read, ...]) -> tuple[tuple[Key, ...], ...]:
    """Groups of tensors with one static scale each: what concatenations join, and what they make of it."""
    keys = {(source(tensor), stages) for tensor, _, stages in read} | set(written.items())
    groups: dict[Key, set[Key]] = {}
    for unit in units:
        if operator(unit.start) not in JOINS:
            continue
        nodes = {source(tensor) for tensor in inputs_of(unit.start)} | {unit.start}
        for stages in dict.fromkeys(stages for node, stages in keys if node in nodes):
            if not is_one_scale(stages):
                continue
            members = {key for key in keys if key[0] in nodes and key[1] == stages}
            merged = set().union(members, *(groups.get(key, set()) for key in members))
            groups.update(dict.fromkeys(merged, merged))
    distinct = {id(group): group for group in groups.values() if len(group) > 1}
    order = [*written.items(), *((source(tensor), stages) for tensor, _, stages in read)]
    return tuple(tuple(key for key in dict.fromkeys(order) if key in group) for group in distinct.values())


def is_one_scale(stages: Stages) -> bool:
    """Whether there is one static scale."""
    return len(stages) == 1 and stages[0].calibrated and isinstance(stages[0].spec.granularity, Tensor)


def stays_float(node: Node) -> bool:
    """Whether a node computes real numbers and no row of the table knows it."""
    known = is_operator(node) or source(node) is not node
    return node.op == "call_function" and is_real(node) and not known


def tensor_names(model: GraphModule) -> dict[Node, str]:
    """A name for every node: that of its layer, or the module that calls it and the kind of operator."""
    names: dict[Node, str] = {}
    taken = {name for name, _ in model.named_modules()}
    for node in model.graph.nodes:
        kind = operator(node)
        if not kind:
            names[node] = str(node.target) if node.op in ("call_module", "get_attr") else node.name
            continue
        base = name = ".".join(part for part in (path_of(node), kind.lstrip("_")) if part)
        number = 1
        while name in taken:
            number += 1
            name = f"{base}_{number}"
        taken.add(name)
        names[node] = name
    return names


EAGER = "quant_mode=eager_mode has it"
ELSEWHERE = {  # fields of eager mode: why a graph does not have them, and what works
    "kv_cache_quant_config": "a graph has no cache object. Keys and values are quantized where they are made: "
    "layer_quant_config={'*k_proj': QLayerConfig(output_tensors=...)}, with the weight's spec beside it; after rotary "
    f"embedding {EAGER}",
    "softmax_quant_spec": "in a graph softmax is an operator as any other: "
    "layer_quant_config={'*softmax': QLayerConfig(output_tensors=...)}, with a model whose attention is written out "
    "(attn_implementation='eager')",
    "algo_config": "algorithms change and tune the layers of a model, one decoder block after the other, and a graph "
    f"has no blocks; {EAGER}",
    "shared_scale_groups": f"weights in a graph have scales of their own; {EAGER}",
}


def check_config(config: QConfig) -> None:
    """Fields that belong to eager mode are not set.

    Raises:
        ConfigError: one is; why, and what works.
    """
    for name, reason in ELSEWHERE.items():
        if getattr(config, name):
            raise ConfigError(f"{name} belongs to eager_mode and cannot be set with quant_mode=fx_graph_mode: {reason}")
