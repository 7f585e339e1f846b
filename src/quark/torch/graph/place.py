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
from dataclasses import dataclass, replace

from torch import nn
from torch.fx import GraphModule, Node

from quark.errors import ConfigError, ModelError
from quark.numerics.granularity import Granularity, Tensor
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.graph.calls import is_real, operator, path_of
from quark.torch.graph.operators import JOINS, end_of, inputs_of, inside, is_operator, source
from quark.torch.layers import LayerKind
from quark.torch.matching import Candidate, Match, Matches, bind, check_patterns, choose, find_candidates, is_excluded
from quark.torch.quantized_layer import OWN
from quark.torch.stage import Stages

OPERATOR = LayerKind(nn.Module, None)
Scheme = tuple[Stages, tuple[Granularity, ...]]
Key = tuple[Node, Scheme]


@dataclass(frozen=True)
class Places:
    """The decisions about a graph.

    Attributes:
        layers: the modules whose weights are quantized.
        written: per node whose output is quantized for all its readers, how.
        read: (tensor, reader, how): quantized for that reader alone.
        shared: groups of keys (node that made the values, how) with one quantizer.
        names: of the tensors.
        floats: operators that stay float because no row of the table knows them.
    """

    layers: Matches
    written: Mapping[Node, Scheme]
    read: tuple[tuple[Node, Node, Scheme], ...]
    shared: tuple[tuple[Key, ...], ...]
    names: Mapping[Node, str]
    floats: tuple[str, ...]

    def key(self, tensor: Node, scheme: Scheme) -> Key:
        """What quantizers are told apart by."""
        return source(tensor), scheme


@dataclass(frozen=True)
class Unit:
    """A pattern: a layer or operator, with the activation behind it.

    Attributes:
        start, end: its first and last node.
        candidate: what patterns of the configuration match.
        given: how its tensors are quantized; None where it stays float.
    """

    start: Node
    end: Node
    candidate: Candidate
    given: Match | None

    def scheme(self, slot: str) -> Scheme | None:
        """How the tensors in ``slot`` are quantized."""
        if self.given is None or not self.given.stages[slot]:
            return None
        stages = self.given.stages[slot]
        return stages, tuple(self.given.granularity(slot, stage) for stage in stages)


def place(model: GraphModule, config: QConfig) -> Places:
    """Decide about a lifted graph.

    Raises:
        ConfigError: a pattern that matches nothing, or a tensor that does not fit its configuration.
        ModelError: nothing to quantize.
    """
    names = tensor_names(model)
    layers = {name: layer for layer in find_candidates(model) for name in layer.names}
    units = list(find_units(model, config, layers, names))
    candidates = [*dict.fromkeys(unit.candidate for unit in units), *unused(layers, units)]
    check_patterns(model, config, candidates)
    written = written_by(units)
    read = tuple(reads(units, written))
    given = [unit.given for unit in units if unit.given is not None and unit.candidate.kind is not OPERATOR]
    quantized = tuple(item for item in map(constants_of, given) if any(item.stages.values()))
    quantized = tuple({item.layer: item for item in quantized}.values())
    if not (quantized or written or read):
        raise ModelError(f"nothing to quantize in the graph of {len(candidates)} layers and operators")
    excluded = tuple(layer.name for layer in candidates if is_excluded(layer, config))
    floats = tuple(names[node] for node in model.graph.nodes if stays_float(node))
    return Places(Matches(quantized, excluded, ()), written, read, joined(units, written, read), names, floats)


def find_units(
    model: GraphModule, config: QConfig, layers: Mapping[str, Candidate], names: Mapping[Node, str]
) -> Iterator[Unit]:
    """The patterns of a graph, in order."""
    taken: set[Node] = set()
    for node in model.graph.nodes:
        layer = layers.get(str(node.target)) if node.op == "call_module" else None
        if node in taken or (layer is None and not (is_operator(node) and is_real(node))):
            continue
        end = end_of(node, layer is not None)
        taken |= inside(node, end)
        candidate = layer or Candidate((names[node],), nn.Module(), OPERATOR)
        yield Unit(node, end, candidate, given_to(candidate, config))


def given_to(candidate: Candidate, config: QConfig) -> Match | None:
    """The configuration of a layer or operator; None: it stays float."""
    found, origin = (None, "") if is_excluded(candidate, config) else choose(candidate, config)
    if found is None:
        return None
    if candidate.kind is not OPERATOR:
        return bind(candidate, found, origin, False)
    return Match(candidate, activations_of(found), origin)


def constants_of(found: Match) -> Match:
    """A layer with its weight and bias alone: its activations are the graph's."""
    return replace(found, stages={slot: stages if slot in OWN else () for slot, stages in found.stages.items()})


def activations_of(config: QLayerConfig) -> dict[str, Stages]:
    """The slots that an operator has."""
    return {slot: config.stages(slot) for slot in ("input_tensors", "output_tensors")}


def unused(layers: Mapping[str, Candidate], units: list[Unit]) -> list[Candidate]:
    """Layers that the graph holds and does not call."""
    called = {unit.candidate for unit in units}
    return [layer for layer in dict.fromkeys(layers.values()) if layer not in called]


def written_by(units: list[Unit]) -> dict[Node, Scheme]:
    """The outputs that are quantized for all readers."""
    schemes = ((unit, unit.scheme("output_tensors")) for unit in units if is_real(unit.end))
    return {unit.end: scheme for unit, scheme in schemes if scheme is not None}


def reads(units: list[Unit], written: Mapping[Node, Scheme]) -> Iterator[tuple[Node, Node, Scheme]]:
    """The inputs that are quantized for one reader, because nobody did before."""
    for unit in units:
        scheme = unit.scheme("input_tensors")
        if scheme is None:
            continue
        for tensor in inputs_of(unit.start):
            if is_real(tensor) and source(tensor) not in written:
                yield tensor, unit.start, scheme


def joined(
    units: list[Unit], written: Mapping[Node, Scheme], read: tuple[tuple[Node, Node, Scheme], ...]
) -> tuple[tuple[Key, ...], ...]:
    """Groups of tensors with one static scale each: what concatenations join, and what they make of it."""
    keys = {(source(tensor), scheme) for tensor, _, scheme in read} | set(written.items())
    groups: dict[Key, set[Key]] = {}
    for unit in units:
        if operator(unit.start) not in JOINS:
            continue
        nodes = {source(tensor) for tensor in inputs_of(unit.start)} | {unit.start}
        for scheme in dict.fromkeys(scheme for node, scheme in keys if node in nodes):
            if not is_one_scale(scheme):
                continue
            members = {key for key in keys if key[0] in nodes and key[1] == scheme}
            merged = set().union(members, *(groups.get(key, set()) for key in members))
            groups.update(dict.fromkeys(merged, merged))
    distinct = {id(group): group for group in groups.values() if len(group) > 1}
    order = [*written.items(), *((source(tensor), scheme) for tensor, _, scheme in read)]
    return tuple(tuple(key for key in dict.fromkeys(order) if key in group) for group in distinct.values())


def is_one_scale(scheme: Scheme) -> bool:
    """Whether there is one static scale."""
    (stages, granularities) = scheme
    return len(stages) == 1 and stages[0].calibrated and isinstance(granularities[0], Tensor)


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
