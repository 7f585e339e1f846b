"""Rules: which node gets which specs, with the reason, and errors for what matches nothing."""

import pytest

from quark.config.rules import NodeInfo, Rule, Rules, Subgraph
from quark.config.tensor import LayerSpec, TensorSpec
from quark.errors import ConfigError

GLOBAL = LayerSpec(TensorSpec("int8"), TensorSpec("int8"))
WIDE = LayerSpec(TensorSpec("int16"), TensorSpec("int8"))
#       a -> b -> d
#       a -> c -> d (Add of both branches) -> e
NODES = [
    NodeInfo("a", "Conv", (), reads_graph_input=True),
    NodeInfo("b", "Conv", ("a",)),
    NodeInfo("c", "Relu", ("a",)),
    NodeInfo("d", "Add", ("b", "c")),
    NodeInfo("e", "MatMul", ("d",)),
]


def decide(*rules: Rule) -> dict[str, tuple[LayerSpec | None, str]]:
    return {name: (d.layer, d.reason) for name, d in Rules(GLOBAL, rules).bind(NODES).items()}


def test_without_rules_every_node_follows_the_global_one() -> None:
    assert set(decide().values()) == {(GLOBAL, "global_config")}


def test_the_last_rule_wins_and_leaves_its_name_as_the_reason() -> None:
    found = decide(Rule(("Conv",), WIDE, "layer_type_config", by_type=True), Rule(("b",), None, "exclude"))
    assert found["a"] == (WIDE, "layer_type_config: Conv")
    assert found["b"] == (None, "exclude: b")
    assert found["c"] == (GLOBAL, "global_config")


def test_patterns_are_searched_from_the_start() -> None:
    assert decide(Rule(("^[ab]$",), WIDE, "specific_layer_config"))["b"][0] is WIDE


@pytest.mark.parametrize("producers", [("b", "c"), ("c", "b")])
def test_a_subgraph_holds_every_branch_in_any_operand_order(producers: tuple[str, str]) -> None:
    nodes = [*NODES[:3], NodeInfo("d", "Add", producers), NODES[4]]
    found = Rules(GLOBAL, (Rule((Subgraph(("b", "c"), ("d",)),), None, "exclude"),)).bind(nodes)
    assert {name for name, decision in found.items() if decision.layer is None} == {"b", "c", "d"}


def chosen(*pairs: tuple[str, str, tuple[str, ...]], start: tuple[str, ...], end: tuple[str, ...]) -> set[str]:
    """Names in the subgraph; a node whose producers hold "" reads a graph input."""
    nodes = [NodeInfo(n, op, tuple(p for p in producers if p), "" in producers) for n, op, producers in pairs]
    found = Rules(GLOBAL, (Rule((Subgraph(start, end),), None, "exclude"),)).bind(nodes)
    return {name for name, decision in found.items() if decision.layer is None}


@pytest.mark.parametrize("operands", [("stem", "c2"), ("c2", "stem"), ("", "c2"), ("stem", "c2", "")])
def test_a_residual_connection_past_the_start_stays_outside(operands: tuple[str, ...]) -> None:
    block = ("c1", "Conv", ("stem",)), ("c2", "Conv", ("c1",)), ("add", "Add", operands)
    nodes = ("stem", "Conv", ("",)), *block, ("head", "Gemm", ("add",))
    assert chosen(*nodes, start=("c1",), end=("add",)) == {"c1", "c2", "add"}


def test_nodes_between_two_start_nodes_are_inside() -> None:
    nodes = ("a", "Conv", ("",)), ("b", "Relu", ("a",)), ("c", "Conv", ("b",)), ("d", "Add", ("b", "c"))
    assert chosen(*nodes, start=("a", "c"), end=("d",)) == {"a", "b", "c", "d"}


def test_a_branch_that_comes_from_before_the_start_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not closed: 'c' leads into it and reads 'a', which .* name 'c' among"):
        decide(Rule((Subgraph(("b",), ("d",)),), None, "exclude"))


def test_a_branch_that_reads_a_graph_input_is_refused() -> None:
    nodes = ("a", "Conv", ("",)), ("b", "Relu", ("a",)), ("other", "Conv", ("",)), ("d", "Add", ("b", "other"))
    with pytest.raises(ConfigError, match="'other' leads into it and reads a graph input; name 'other' among"):
        chosen(*nodes, start=("b",), end=("d",))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule(("^x.*",), None, "exclude"), "exclude: the pattern '\\^x.\\*' matches no node"),
        (Rule(("^(",), None, "exclude"), "not a regular expression"),
        (Rule((Subgraph(("b",), ("z",)),), None, "exclude"), "'z' matches no node"),
    ],
)
def test_what_matches_nothing_is_an_error_that_names_it(rule: Rule, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decide(rule)
