"""Which node gets which specs, and why.

A user writes names, ``^regular.*expressions``, operator types and subgraphs; ``Rules.bind`` resolves them once against
the nodes of a model into one dictionary, so that asking for a node is a lookup and every answer carries its reason.
Later rules win. A name or pattern that the user wrote and that matches nothing is an error, raised before any work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quark.config.tensor import LayerSpec
from quark.errors import ConfigError, nearest


@dataclass(frozen=True)
class NodeInfo:
    """What a rule may ask about a node: its unique name, its operator type, the names of the nodes that feed it."""

    name: str
    op_type: str
    producers: tuple[str, ...] = ()
    reads_graph_input: bool = False


@dataclass(frozen=True)
class Subgraph:
    """All nodes from the start nodes to the end nodes, both included."""

    start: tuple[str, ...]
    end: tuple[str, ...]


Selector = str | Subgraph


@dataclass(frozen=True)
class Rule:
    """``layer`` for the nodes that ``selectors`` name; ``None`` keeps them in float.

    ``by_type`` reads the selectors as operator types; ``source`` names the field of the user's configuration.
    """

    selectors: tuple[Selector, ...]
    layer: LayerSpec | None
    source: str
    by_type: bool = False
    strict: bool = True


@dataclass(frozen=True)
class Decision:
    """The specs of a node (``None``: it stays float) and the reason in words."""

    layer: LayerSpec | None
    reason: str


@dataclass(frozen=True)
class Rules:
    """The global layer and the rules that refine it, in order of rising priority."""

    default: LayerSpec
    rules: tuple[Rule, ...] = ()

    def bind(self, nodes: Iterable[NodeInfo]) -> Mapping[str, Decision]:
        """Decide for every node.

        Raises:
            ConfigError: a selector matches no node (the nearest name is shown), or a subgraph is not closed.
        """
        nodes = list(nodes)
        decisions = {node.name: Decision(self.default, "global_config") for node in nodes}
        for rule in self.rules:
            for selector in rule.selectors:
                names = _select(selector, nodes, rule)
                for name in names:
                    decisions[name] = Decision(rule.layer, f"{rule.source}: {_written(selector)}")
        return decisions


def _written(selector: Selector) -> str:
    return selector if isinstance(selector, str) else f"({list(selector.start)}, {list(selector.end)})"


def _select(selector: Selector, nodes: list[NodeInfo], rule: Rule) -> list[str]:
    if isinstance(selector, Subgraph):
        return _subgraph(selector, {node.name: node for node in nodes}, rule.source)
    if rule.by_type:
        found = [node.name for node in nodes if node.op_type == selector]
        known = sorted({node.op_type for node in nodes})
    elif selector.startswith("^"):
        found = [node.name for node in nodes if _compiled(selector, rule.source).search(node.name)]
        known = []
    else:
        found = [node.name for node in nodes if node.name == selector]
        known = [node.name for node in nodes]
    if not found and rule.strict:
        kind = "operator type" if rule.by_type else "pattern" if selector.startswith("^") else "node name"
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
    """Walk producers from every end node back to the start nodes; every input is followed, in any operand order."""
    for name in (*selector.start, *selector.end):
        if name not in nodes:
            raise ConfigError(f"{source}: the node name {name!r} matches no node of the model.{nearest(name, nodes)}")
    inside: dict[str, None] = dict.fromkeys(selector.start)
    pending = [name for name in selector.end if name not in inside]
    while pending:
        name = pending.pop()
        if name in inside:
            continue
        inside[name] = None
        node = nodes[name]
        if node.reads_graph_input:
            raise ConfigError(
                f"{source}: the subgraph {_written(selector)} is not closed: {name!r} reads a graph input "
                f"before any start node is reached"
            )
        pending += [producer for producer in node.producers if producer not in inside]
    return list(inside)
