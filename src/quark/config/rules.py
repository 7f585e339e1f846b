"""Which node gets which specs, and why.

A user writes names, ``^regular.*expressions``, operator types and subgraphs; ``Rules.bind`` resolves them once against
the nodes of a model into one dictionary, so that asking for a node is a lookup and every answer carries its reason.
Later rules win. A name or pattern that the user wrote and that matches nothing is an error, raised before any work; an
operator type that the model lacks is none, because one configuration serves many models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from quark.config.tensor import LayerSpec
from quark.dataclass import dataclass
from quark.errors import ConfigError, nearest


@dataclass(frozen=True)
class NodeInfo:
    """What a rule may ask about a node: its unique name, its operator type, the names of the nodes that feed it.

    ``stands_for``: the nodes in whose place a graph pass has put it; what is said of them holds for it.
    """

    name: str
    op_type: str
    producers: tuple[str, ...] = ()
    reads_graph_input: bool = False
    stands_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subgraph:
    """All nodes from the start nodes to the end nodes, both included."""

    start: tuple[str, ...]
    end: tuple[str, ...]


Selector = str | Subgraph


@dataclass(frozen=True)
class Rule:
    """``layer`` for the nodes that ``selectors`` name; ``None`` keeps them in float.

    ``by_type`` reads the selectors as operator types; ``source`` names the field of the user's configuration;
    ``inputs`` keeps tensors that only such float nodes read in float, too; ``own_inputs`` gives nodes a pair of
    their own in front of tensors that others read too; ``outputs`` means that the user has written down what the
    outputs become, so that it holds behind an activation function of the same kernel, too. ``written`` names the slots
    (inputs, outputs) of which the entry says something: the others keep the rank of the global configuration.
    """

    selectors: tuple[Selector, ...]
    layer: LayerSpec | None
    source: str
    by_type: bool = False
    strict: bool = True
    inputs: bool = False
    own_inputs: bool = False
    outputs: bool = False
    written: frozenset[str] = frozenset(["inputs", "outputs"])


@dataclass(frozen=True)
class Decision:
    """The specs of a node (``None``: it stays float), the reason in words, and its rank: that of later entries is
    higher, and wins where two nodes share a tensor. The global configuration has rank 0. ``inputs``: its inputs stay
    float with it; ``own_inputs``: it reads tensors that others read too through pairs of its own; ``outputs``: what its
    outputs become is written down; ``written``: the slots that the rank holds for."""

    layer: LayerSpec | None
    reason: str
    rank: int = 0
    inputs: bool = False
    own_inputs: bool = False
    outputs: bool = False
    written: frozenset[str] = frozenset(["inputs", "outputs"])

    def rank_of(self, slot: str) -> int:
        """The rank of what is said about the inputs or the outputs: 0 where the entry leaves them open."""
        return self.rank if slot in self.written else 0


@dataclass(frozen=True)
class Rules:
    """The global layer and the rules that refine it, in order of rising priority."""

    default: LayerSpec
    rules: tuple[Rule, ...] = ()

    def bind(self, nodes: Iterable[NodeInfo], before: Iterable[NodeInfo] = ()) -> Mapping[str, Decision]:
        """Decide for every node.

        Args:
            nodes: of the model as it is quantized.
            before: of the model as the user knows it, where graph passes have changed it since: what a selector finds
                there counts as well, so that a name that a pass has folded away is not an error.

        Raises:
            ConfigError: a name or pattern matches no node (the nearest name is shown), or a subgraph is not closed.
        """
        nodes, before = list(nodes), list(before)
        decisions = {node.name: Decision(self.default, "global_config") for node in nodes}
        instead: dict[str, list[str]] = {}  # one node may have become several, and one may stand for several
        for node in nodes:
            for name in node.stands_for:
                instead.setdefault(name, []).append(node.name)
        for rank, rule in enumerate(self.rules, start=1):
            for selector in rule.selectors:
                reason = f"{rule.source}: {_written(selector)}"
                for known in _found(selector, nodes, before, rule):
                    for name in decisions.keys() & {known, *instead.get(known, ())}:
                        decisions[name] = Decision(
                            rule.layer, reason, rank, rule.inputs, rule.own_inputs, rule.outputs, rule.written
                        )
        return decisions


def _found(selector: Selector, nodes: list[NodeInfo], before: list[NodeInfo], rule: Rule) -> list[str]:
    """The nodes that a selector names in either form of the model; an error where it names none in both."""
    if not before:
        return _select(selector, nodes, rule)
    if isinstance(selector, Subgraph):
        there = {node.name for node in nodes} >= {*selector.start, *selector.end}
        return [*_select(selector, before, rule), *(_select(selector, nodes, rule) if there else [])]
    found = [name for form in (before, nodes) for name in _select(selector, form, replace(rule, strict=False))]
    return found or _select(selector, before, rule)


def _written(selector: Selector) -> str:
    return selector if isinstance(selector, str) else f"({list(selector.start)}, {list(selector.end)})"


def _select(selector: Selector, nodes: list[NodeInfo], rule: Rule) -> list[str]:
    if isinstance(selector, Subgraph):
        return _subgraph(selector, {node.name: node for node in nodes}, rule.source)
    if rule.by_type:  # whether a type exists at all is for the flow to say, which knows the operators
        return [node.name for node in nodes if node.op_type == selector]
    if selector.startswith("^"):
        found = [node.name for node in nodes if _compiled(selector, rule.source).search(node.name)]
        known = []
    else:
        found = [node.name for node in nodes if node.name == selector]
        known = [node.name for node in nodes]
    if not found and rule.strict:
        kind = "pattern" if selector.startswith("^") else "node name"
        raise ConfigError(
            f"{rule.source}: the {kind} {selector!r} matches no node of the model.{nearest(selector, known)}"
        )
    return found


def _compiled(pattern: str, source: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{source}: {pattern!r} is not a regular expression: {error}") from error


def _subgraph(selector: Subgraph, nodes: dict[str, NodeInfo], source: str) -> list[str]:
    """Walk producers from every end node back to the start nodes; every input is followed, in any operand order.

    What lies before the start nodes stays outside, also where a residual connection leads past them. A branch that
    comes from there, and not from a start node, is an error: whether it belongs to the subgraph is for the user to say.
    """
    for name in (*selector.start, *selector.end):
        if name not in nodes:
            raise ConfigError(f"{source}: the node name {name!r} matches no node of the model.{nearest(name, nodes)}")
    fed = _fed_by(selector.start, nodes)
    outside = _feeding(selector.start, nodes) - fed
    stray = next((name for name in selector.end if name not in fed), None)
    if stray is not None:
        raise ConfigError(
            f"{source}: the subgraph {_written(selector)} is not closed: no start node leads to its end node {stray!r}"
        )
    inside: dict[str, None] = dict.fromkeys(selector.start)
    pending = [name for name in selector.end if name not in inside]
    while pending:
        name = pending.pop()
        if name in inside:
            continue
        inside[name] = None
        node = nodes[name]
        foreign = [producer for producer in node.producers if producer in outside]
        if name not in fed and (foreign or node.reads_graph_input):
            read = "a graph input" if node.reads_graph_input else f"{foreign[0]!r}, which lies before the start nodes"
            raise ConfigError(
                f"{source}: the subgraph {_written(selector)} is not closed: {name!r} leads into it and reads {read}; "
                f"name {name!r} among the start nodes"
            )
        pending += [producer for producer in node.producers if producer not in inside and producer not in outside]
    return list(inside)


def _feeding(names: tuple[str, ...], nodes: dict[str, NodeInfo]) -> set[str]:
    """The nodes that these read from, directly or not."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        fresh = [producer for producer in nodes[pending.pop()].producers if producer not in found]
        found.update(fresh)
        pending += fresh
    return found


def _fed_by(names: tuple[str, ...], nodes: dict[str, NodeInfo]) -> set[str]:
    """These nodes and those that read from them, directly or not."""
    readers: dict[str, list[str]] = {}
    for node in nodes.values():
        for producer in node.producers:
            readers.setdefault(producer, []).append(node.name)
    found, pending = set(names), list(names)
    while pending:
        fresh = [reader for reader in readers.get(pending.pop(), ()) if reader not in found]
        found.update(fresh)
        pending += fresh
    return found
