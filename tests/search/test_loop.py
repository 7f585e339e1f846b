"""Targets, the loop around the solver, ledgers and plan files, on made-up sensitivities."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from quark.errors import ConfigError
from quark.search.loop import Question, cheapest, within
from quark.search.plan_file import check_kind, read_config, write_plan
from quark.search.target import METRICS, parse_target
from quark.search.values import Study, Trial

LOSSES = {"low": 4.0, "middle": 1.0, "high": 0.01}
SIZES = {"low": 1.0, "middle": 2.0, "high": 4.0}


def study(layers: int = 6) -> Study:
    """Later layers are ten times as sensitive as the ones before them."""
    trials = [
        Trial(f"layer{k}", "Conv", name, LOSSES[name] * 10.0**-k, {}, {"size": SIZES[name], "bits": SIZES[name]})
        for k in range(layers)
        for name in LOSSES
    ]
    return Study(tuple(trials), "sqnr", 4)


def truth(plan: Sequence[str], worse: float = 1.0) -> float:
    """What a model would measure: the sum of the losses, times what adding up does not know; as a mean divergence."""
    return worse * sum(LOSSES[name] * 10.0**-k for k, name in enumerate(plan))


def size(plan: Sequence[str]) -> float:
    return sum(SIZES[name] for name in plan)


@pytest.mark.parametrize("worse", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("bound", [0.2, 1.5, 3.0])
def test_the_cheapest_plan_that_holds_is_found_although_losses_do_not_add_up(worse: float, bound: float) -> None:
    found, tried = cheapest(study(), Question(parse_target(f"kl<={bound}", METRICS), "size"), lambda p: truth(p, worse))
    possible = [plan for plan in itertools.product(LOSSES, repeat=6) if truth(plan, worse) <= bound]
    assert tried[found] == truth(found, worse) <= bound
    assert size(found) == min(map(size, possible))
    assert len(tried) <= 9 + len(LOSSES)


def test_a_metric_that_is_no_sum_is_reached_too() -> None:
    target = parse_target("top1>=0.9", METRICS, function=True)
    assert parse_target("cosine>=5", METRICS, function=True).value == 5, "a metric of one's own has a range of its own"
    found, tried = cheapest(study(), Question(target, "size"), lambda plan: 1 - math.sqrt(truth(plan)) / 10)
    assert tried[found] >= 0.9 and size(found) < size(["high"] * 6)


def test_the_cheapest_of_all_is_taken_where_it_is_good_enough() -> None:
    found, tried = cheapest(study(), Question(parse_target("perplexity<=99", METRICS), "size"), truth)
    assert set(found) == {"low"} and len(tried) <= 2


def test_an_unreachable_target_gives_the_plan_that_comes_nearest() -> None:
    found, tried = cheapest(study(), Question(parse_target("kl<=0.001", METRICS), "size"), truth)
    assert set(found) == {"high"} and tried[found] == min(tried.values()) > 0.001


def test_the_same_for_all_layers_may_be_better_than_the_least_sum_of_losses() -> None:
    """Losses do not quite add up: before a target is called out of reach, the uniform plans are measured."""
    mixed = [
        Trial("layer0", "Conv", name, loss, {}, {"size": 1.0, "bits": 1.0}) for name, loss in (("a", 1.0), ("b", 2.0))
    ]
    mixed += [
        Trial("layer1", "Conv", name, loss, {}, {"size": 1.0, "bits": 1.0}) for name, loss in (("a", 2.0), ("b", 1.0))
    ]
    target, values = parse_target("kl<=0.5", METRICS), {("a", "b"): 2.0, ("a", "a"): 0.6, ("b", "b"): 0.4}
    found, tried = cheapest(Study(tuple(mixed), "sqnr", 1), Question(target, "size"), lambda plan: values[tuple(plan)])
    assert found == ("b", "b") and tried == values


def test_a_limit_gives_the_most_precise_plan_within_it() -> None:
    found = within(study(), "size", 10.0)
    best = min(truth(plan) for plan in itertools.product(LOSSES, repeat=6) if size(plan) <= 10)
    assert truth(found) == pytest.approx(best)
    with pytest.raises(ConfigError, match="cheapest plan of these candidates has size 6"):
        within(study(), "size", 5.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sqnr=30", "write a metric"),
        ("sqnr>=much", "'much' is not a number"),
        ("sqnr<=30", "sqnr>=30"),
        ("kl>=0.1", "kl<=0.1"),
        ("cosine>=1.5", "cosine is from -1 to 1, and never 1.5"),
        ("perplexity<=0.5", "perplexity is 1 or more, and never 0.5"),
        ("sqnr>=-inf", "every model has a sqnr of -inf or more"),
        ("snqr>=30", "Did you mean 'sqnr'"),
        ("top1>=0.85", "--metric FILE.py:FUNCTION"),
    ],
)
def test_targets_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_target(text, METRICS)
    assert words in str(error.value)


def test_nan_meets_nothing() -> None:
    for text in ("sqnr>=-1e30", "kl<=1e30"):
        assert not parse_target(text, METRICS).met(math.nan)


# ---- plan files ------------------------------------------------------------------------------------------------------

HOSTILE = ["/body/body.0/Conv", "a: b", "yes", "1.5", "#x", "'q\"", "x" * 200, "ü", "- a", "{b}", "^/layer/.*", "null"]


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_any_name_survives_a_plan_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"plan.{kind}"
    layers = dict.fromkeys(HOSTILE, "A8W8")
    write_plan(path, {"preset": "A16W8", "layers": layers}, {"yes": "alone 3 dB"}, ["what it is"])
    assert read_config(path, ("preset", "layers")) == {"preset": "A16W8", "layers": layers}
    if kind == "yaml":
        assert "# alone 3 dB" in path.read_text(encoding="utf-8") and path.read_text().startswith("# what it is")


def test_mistakes_in_a_configuration_file_are_named(tmp_path: Path) -> None:
    for text, words in (
        ("layerz: {}", "Did you mean 'layers'"),
        ('{"by": "", "tensors": [], "nodes": []}', "--plan-from "),
        ("layers: {a: b, a: c}", "'a' is given twice"),
        ("[1]", "must hold a mapping"),
        ("a: [", "is not valid YAML"),
    ):
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError) as error:
            read_config(path, ("layers",))
        assert words in str(error.value), text
    with pytest.raises(ConfigError, match="does not exist"):
        read_config(tmp_path / "none.yaml", ())
    with pytest.raises(ConfigError, match=r"ends in \.yaml"):
        check_kind(tmp_path / "plan.txt", "--output")
