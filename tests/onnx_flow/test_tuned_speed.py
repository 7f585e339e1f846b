"""TuneSpeed: this machine's timings divide the model, and what they found is repeated without timing, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.wrapped import DRESSES

from quark.config.plan import Plan
from quark.config.plan_diff import read_plan
from quark.errors import ConfigError
from quark.onnx import Config, ModelQuantizer, get_default_config, tuned_speed
from quark.onnx.config_file import config_of, read_values
from quark.onnx.result import Result
from quark.onnx.search import save_plan, search
from quark.search.target import SearchGoal


def net() -> onnx.ModelProto:
    """Four layers that could be in either form."""
    graph = """
    net (float[N, 3, 16, 16] x) => (float[N, 5] y) {
        a = Conv <pads = [1, 1, 1, 1]> (x, w0)
        b = Relu (a)
        c = Conv <pads = [1, 1, 1, 1]> (b, w1)
        d = Sigmoid (c)
        e = GlobalAveragePool (d)
        f = Flatten (e)
        y = Gemm (f, w2)
    }"""
    shapes = {"w0": (8, 3, 3, 3), "w1": (8, 8, 3, 3), "w2": (8, 5)}
    made = models.model(graph, {name: models.normal(*shape, scale=0.2) for name, shape in shapes.items()})
    for node in made.graph.node:
        node.name = f"node_{node.output[0]}"
    return made


DIVISIONS = (tuned_speed.INTEGERS, tuned_speed.TABLE, tuned_speed.KERNELS, tuned_speed.FLOAT)
FEEDS = [{"x": models.normal(1, 3, 16, 16, seed=seed)} for seed in range(4)]


def made(plan: Plan | None = None, **options: Any) -> Result:
    config = get_default_config("A8W8_CPU")
    config.extra_options |= {"PrintSummary": False, **options}
    return ModelQuantizer(Config(global_quant_config=config)).run(net(), None, FEEDS, plan=plan)


def fastest(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Timings in which the division called ``name`` is far ahead; how often anything was timed."""
    calls = []

    def seconds(paths: Mapping[str, Path], *args: object) -> dict[str, float]:
        calls.append(len(paths))
        return {one: 1.0 if one == name else 2.0 for one in paths}

    monkeypatch.setattr(tuned_speed, "quiet_seconds", seconds)
    return calls


def nodes_in_float(result: Result) -> list[str]:
    return [name for name, node in result.plan.nodes.items() if not node.quantized]


@pytest.mark.parametrize("name", DIVISIONS)
def test_the_fastest_division_is_taken_and_made_again_without_timing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # in float, then in integers: one node is faster each way
    kernels = iter([{"node_a": 9e-3, "node_c": 1e-3}, {"node_a": 1e-3, "node_c": 9e-3}])
    monkeypatch.setattr(tuned_speed, "_node_seconds", lambda *args: next(kernels))
    calls = fastest(monkeypatch, name)
    first = made(TuneSpeed=True)
    assert len(calls) == 1 and first.plan.tuned["chosen"] in (name, tuned_speed.TABLE)
    tuned = first.plan.tuned["TunedFloat"]
    assert set(tuned) <= set(nodes_in_float(first))
    if name == tuned_speed.KERNELS:
        assert "node_c" in tuned and "node_a" not in tuned
    if name == tuned_speed.INTEGERS:
        assert not tuned and nodes_in_float(first) == []
    if name == tuned_speed.FLOAT:  # nothing is faster in integers: what comes back is the float model, and says so
        assert len(tuned) >= len(net().graph.node)
        assert not any(node.op_type == "QuantizeLinear" for node in first.proto.graph.node)  # type: ignore[union-attr]
    followed = Plan.from_json(first.plan.to_json())
    for again in (made(TunedFloat=tuned), made(followed), made(followed, TuneSpeed=True)):
        assert len(calls) == 1 and again.proto is not None and first.proto is not None
        assert again.proto.SerializeToString() == first.proto.SerializeToString()


@pytest.mark.parametrize("dress", ["in_a_branch", "in_a_loop", "in_a_function"])
@pytest.mark.parametrize("name", [tuned_speed.INTEGERS, tuned_speed.FLOAT])
def test_bodies_are_timed_too(name: str, dress: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were all in integers with TuneSpeed, whatever was faster; now its names there make the same bytes again."""
    dressed = [DRESSES[dress](net(), feed) for feed in FEEDS]
    monkeypatch.setattr(
        tuned_speed, "_node_seconds", lambda *args: {}
    )  # or a busy machine makes two divisions the same
    fastest(monkeypatch, name)

    def quantized(**options: Any) -> Result:
        config = get_default_config("A8W8_CPU")
        config.extra_options |= {"PrintSummary": False, **options}
        return ModelQuantizer(Config(global_quant_config=config)).run(
            dressed[0][0], None, [feed for _, feed in dressed]
        )

    first = quantized(TuneSpeed=True)
    layers = {name for name, node in first.plan.nodes.items() if node.op_type in ("Conv", "Gemm")}
    assert len(layers) == 3 and layers & {*nodes_in_float(first)} == (layers if name == tuned_speed.FLOAT else set())
    if dress != "in_a_function":  # which is inlined
        assert [set(one["milliseconds"]) for one in first.plan.tuned["bodies"].values()] == [{*DIVISIONS}]
    again = quantized(TunedFloat=first.plan.tuned["TunedFloat"])
    assert again.proto.SerializeToString() == first.proto.SerializeToString()  # type: ignore[union-attr]


def test_the_plan_says_what_was_measured_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fastest(monkeypatch, tuned_speed.INTEGERS)
    result = made(TuneSpeed=True)
    (tmp_path / "plan.json").write_text(result.plan.to_json(), encoding="utf-8")
    told = read_plan(tmp_path / "plan.json").tuned
    assert told == result.plan.tuned and told["processor"] == tuned_speed.processor() and told["threads"] >= 1
    assert set(told["milliseconds"]) == set(DIVISIONS)
    [line] = [one.refused[0] for one in result.passes if one.name == "tune_speed"]
    assert told["processor"] in line and "good for" in line
    damaged = {**json.loads(result.plan.to_json()), "tuned": {"TunedFloat": 3}}
    (tmp_path / "other.json").write_text(json.dumps(damaged), encoding="utf-8")
    with pytest.raises(ConfigError, match="TunedFloat"):
        read_plan(tmp_path / "other.json")
    assert made(result.plan).plan.tuned == told, "who carries a plan out says where its decisions were measured"


def test_a_resumed_job_does_not_time_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = fastest(monkeypatch, tuned_speed.INTEGERS)
    path = str(tmp_path / "state.json")
    first, again = made(TuneSpeed=True, SaveAndRestore=path), made(TuneSpeed=True, SaveAndRestore=path)
    assert len(calls) == 1 and first.plan.tuned == again.plan.tuned
    assert first.proto.SerializeToString() == again.proto.SerializeToString()  # type: ignore[union-attr]


def test_kernels_are_timed_for_real() -> None:
    """Nothing replaced: four divisions that ran, and a model that answers."""
    result = made(TuneSpeed=True)
    assert all(value > 0 for value in result.plan.tuned["milliseconds"].values())
    answer = models.session(result.proto).run(None, FEEDS[0])[0]  # type: ignore[arg-type]
    wanted = models.session(net()).run(None, FEEDS[0])[0]
    assert np.abs(answer - wanted).max() < 0.1 * np.abs(wanted).max()


def test_what_cannot_be_tuned_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"node in TunedFloat 'Conv_99'"):
        made(TunedFloat=["Conv_99"])
    with pytest.raises(ConfigError, match="TuneSpeed times static integer kernels"):
        made(TuneSpeed=True, WeightsOnly=True)


def test_a_search_times_every_plan_once_and_its_file_repeats_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = fastest(monkeypatch, tuned_speed.INTEGERS)
    onnx.save(net(), tmp_path / "m.onnx")
    values = {"preset": "A8W8_CPU", "options": {"TuneSpeed": True}}
    found = search(tmp_path / "m.onnx", values, FEEDS, ["A8W8_CPU"], SearchGoal(budget="size", limit=1e9))
    assert found.settings == {"TuneSpeed": False, "TunedFloat": []}
    assert len(calls) == 1  # measured on the samples that choose and on those that report
    save_plan(tmp_path / "plan.yaml", values, found, None, "size")
    config = config_of(read_values(tmp_path / "plan.yaml"))
    ModelQuantizer(Config(config)).run(tmp_path / "m.onnx", tmp_path / "q.onnx", FEEDS)
    assert len(calls) == 1
