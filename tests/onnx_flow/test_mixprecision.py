"""Automatic mixed precision: every field has its effect, and what it promises holds on the model that comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.errors import ConfigError
from quark.measure.outputs import metric_of
from quark.onnx import (
    AutoMixprecisionConfig,
    CalibMethod,
    Config,
    Int4Spec,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    get_default_config,
)
from quark.onnx.algorithms import mixprecision
from quark.onnx.flow import Result
from quark.onnx.quantization.config.algorithm import from_dict
from quark.onnx.quantization.config.mixprecision import METRICS
from quark.search.changes import chosen_of, pairs_of
from quark.search.values import Trial


def net() -> onnx.ModelProto:
    """Layers of which two read one tensor and two share a weight, others between them, and a second output."""
    graph = """
    net (float[N, 12] x) => (float[N, 6] y, float[N, 6] z) {
        a = Gemm <transB = 1> (x, w1, b1)
        r = Relu (a)
        left = MatMul (r, w2)
        t = Tanh (r)
        right = MatMul (t, w2)
        s = Add (left, right)
        m = Mul (s, c)
        p = Add (s, m)
        y = Gemm <transB = 1> (p, w3, b3)
        z = Gemm <transB = 1> (r, w4, b4)
    }"""
    weights = {
        "w1": models.normal(10, 12), "b1": models.normal(10), "w2": models.normal(10, 8), "w3": models.normal(6, 8) * 3,
        "b3": models.normal(6), "w4": models.normal(6, 10, seed=5), "b4": models.normal(6), "c": models.normal(8),
    }  # fmt: skip
    made = models.model(graph, weights, opset=21)
    names = ["first", "relu", "left", "tanh", "right", "add", "mul", "plus", "third", "last"]
    for node, name in zip(made.graph.node, names, strict=True):
        node.name = name
    return made


NET = net()
SAMPLES = [{"x": models.normal(4, 12, seed=seed)} for seed in range(6)]
WIDE = Int16Spec(calibration_method=CalibMethod.MinMax)
NARROW = Int8Spec(calibration_method=CalibMethod.MinMax)
TINY = Int4Spec(calibration_method=CalibMethod.MinMax)
INT8 = QLayerConfig(NARROW, NARROW)
INT16 = QLayerConfig(WIDE, WIDE)


def run(base: QLayerConfig = INT16, target: Any = INT8, model: onnx.ModelProto = NET, **fields: Any) -> Result:
    options = fields.pop("options", {})
    algorithm = AutoMixprecisionConfig(target, **fields)
    config = QConfig(base, algo_config=[algorithm], extra_options={"PrintSummary": False, **options})
    return ModelQuantizer(config).run(model, None, SAMPLES)


def formats(result: Result) -> dict[str, str]:
    return {tensor.name: tensor.spec.format for tensor in result.plan.tensors.values()}


def outputs(model: onnx.ModelProto, number: int = 0) -> list[np.ndarray]:
    session = models.session(model)
    return [session.run(None, feed)[number] for feed in SAMPLES]


def l2(result: Result, number: int = 0, samples: int = 6) -> float:
    assert result.proto is not None
    pairs = list(zip(outputs(NET, number), outputs(result.proto, number), strict=True))[:samples]
    return float(np.mean([np.sqrt(np.square(x - y).sum()) for x, y in pairs]))


def test_all_layers_are_chosen_by_default_and_the_rest_stays_wide() -> None:
    result = run()
    assert result.mixed is not None and set(result.mixed.chosen) == {"first", "left", "third", "last"}
    found = formats(result)
    assert {found[name] for name in ("x", "w1", "w2", "w3", "w4", "r")} == {"int8"}
    onnx.checker.check_model(result.proto, full_check=True)


def test_without_a_threshold_nothing_is_chosen_and_the_ranking_is_told() -> None:
    result = run(metric_threshold=None)
    assert result.mixed is not None and not result.mixed.chosen
    assert set(formats(result).values()) <= {"int16", "int32"}
    values = [score.metrics["value"] for score in result.mixed.scores]
    assert len(values) == 4 and values == sorted(values) and values[0] < values[-1]
    rows = result.mixed.tables()[0].rows
    assert [row[2] for row in rows] == ["no"] * 4


def test_speed_stops_before_the_metric_is_worse_than_the_threshold() -> None:
    ranking = run(metric_threshold=None).mixed.scores
    order = [score.layer for score in ranking]
    curve = [l2(run(include_layers=order[:count], shared_param_mode="unshare" if count == 9 else "propagate"))
             for count in range(1, 5)]  # fmt: skip
    bound = (curve[1] + curve[2]) / 2
    result = run(metric_threshold=bound)
    assert list(result.mixed.chosen) == order[:2]
    assert result.mixed.metric == pytest.approx(l2(result), rel=1e-5) and l2(result) <= bound < curve[2]


def test_a_score_is_the_metric_with_that_layer_alone() -> None:
    mixed = run(metric_threshold=None).mixed
    for score in mixed.scores:
        alone = l2(run(include_layers=list(mixed.groups[score.layer])))
        assert score.metrics["value"] == pytest.approx(alone, rel=1e-5)


def test_quality_goes_on_until_the_metric_is_good_enough() -> None:
    coarse, fine = QLayerConfig(TINY, TINY), INT16
    plain, best = l2(run(coarse, fine, metric_threshold=None)), l2(run(coarse, fine))
    bound = (plain + best) / 2
    result = run(coarse, fine, metric_threshold=bound, metric_optimize_object="quality")
    assert best <= l2(result) <= bound < plain and 0 < len(result.mixed.chosen) <= 4
    one_less = list(result.mixed.chosen)[:-1]
    assert not one_less or l2(run(coarse, fine, include_layers=one_less)) > bound


@pytest.mark.parametrize("metric", ["l2", "sqnr", "kl"])
@pytest.mark.parametrize("wanted", ["speed", "quality"])
def test_as_many_layers_as_one_at_a_time_would_find_in_a_few_steps(wanted: str, metric: str) -> None:
    """Energies of layers that add up, nearly: noise that is taken on (speed), or got rid of (quality)."""
    random = np.random.default_rng(3)
    for _ in range(20):
        energies = np.sort(random.lognormal(size=24)) * 1e-3
        energies, sign = (energies, 1) if wanted == "speed" else (energies[::-1], -1)
        base = 1e-3 if wanted == "speed" else energies.sum() * 1.1
        of_energy = {"l2": np.sqrt, "sqnr": lambda e: -10 * np.log10(e), "kl": float}[metric]

        def energy_of(names: Any, base: float = base, energies: Any = energies, sign: int = sign) -> float:
            parts = energies[[int(name) for name in names]]
            return base + sign * float(parts.sum()) * (1 + 0.02 * np.sin(len(parts)))

        bound = float(of_energy(energy_of(range(random.integers(24)))))
        config = AutoMixprecisionConfig(metric_default=metric, metric_threshold=bound, metric_optimize_object=wanted)
        seen: set[int] = set()

        def value(chosen: Any, seen: set[int] = seen, energy_of: Any = energy_of, of_energy: Any = of_energy) -> float:
            seen.add(len(chosen))
            return float(of_energy(energy_of([name for name, _ in chosen])))

        decider = mixprecision._Decider(None, None, config, (), None, None, {})  # type: ignore[arg-type]
        alone = {str(k): float(of_energy(energy_of([str(k)]))) for k in range(24)}
        scores = tuple(Trial(name, "", "0", decider._loss(one), {"value": one}) for name, one in alone.items())
        made = chosen_of(scores, value, decider._loss, bound, wanted == "speed")
        assert len(seen) <= 8
        chosen, each = made.trials, [value(pairs_of(scores[:k])) for k in range(25)]
        good = [one >= bound if metric == "sqnr" else one <= bound for one in each]
        assert list(chosen) == list(scores[: len(chosen)]) and good[len(chosen)] and made.value == each[len(chosen)]
        near = len(chosen) + (1 if wanted == "speed" else -1)
        assert not 0 <= near <= 24 or not good[near]


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_its_formula(name: str) -> None:
    x, y = np.array([[1.0, 2.0], [0.5, -1.0]]), np.array([[1.1, 1.7], [0.5, -1.2]])
    p, q = (np.exp(v) / np.exp(v).sum(-1, keepdims=True) for v in (x, y))
    noise = ((x - y) ** 2).sum()
    expected = {
        "l2": np.sqrt(noise),
        "kl": (p * np.log(p / q)).sum(-1).mean(),
        "cosine": 1 - (x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()),
        "sqnr": 10 * np.log10((x**2).sum() / noise),
        "psnr": 10 * np.log10(np.abs(x).max() ** 2 / (noise / 4)),
    }[name]
    assert metric_of(name, [(x, y)]) == pytest.approx(expected)


def test_more_decibels_are_better() -> None:
    scores = run(metric_threshold=None, metric_default="sqnr").mixed.scores
    assert [score.metrics["value"] for score in scores] == sorted(
        (score.metrics["value"] for score in scores), reverse=True
    )
    assert run(metric_default="sqnr", metric_threshold=1e3).mixed.chosen == ()
    assert len(run(metric_default="sqnr", metric_threshold=1.0).mixed.chosen) == 4


def test_what_may_be_chosen(tmp_path: Path) -> None:
    chosen = lambda **fields: set(run(**fields).mixed.chosen)  # noqa: E731
    assert chosen(target_op_type=["MatMul"]) == {"left"}
    assert chosen(include_layers=["^first|third$"]) == {"first", "third"}
    assert chosen(exclude_layers=["third", "last"]) == {"first", "left"}
    path = tmp_path / "parts.json"
    parts = [{"name": "head", "start_nodes": ["plus"], "end_nodes": ["third"]}]
    path.write_text(json.dumps({"quantized": False, "num_subgraphs": 1, "subgraphs": parts}))
    result = run(subgraph_json=path)
    assert result.mixed.chosen == ("head",) and formats(result)["w3"] == "int8"
    assert formats(result)["p"] == "int8" and formats(result)["w1"] == "int16"


def test_each_layer_gets_the_best_of_several_targets_or_the_one_that_names_it() -> None:
    result = run(target=[QLayerConfig(TINY, TINY), INT8])
    assert {formats(result)[name] for name in ("w1", "w2", "w3", "w4")} == {"int8"}
    named = run(target={INT8: ["MatMul"], QLayerConfig(TINY, TINY): ["first"]})
    found = formats(named)
    assert (found["w1"], found["w2"], found["w3"]) == ("int4", "int8", "int16")
    assert formats(run(target="int8/int4"))["w1"] == "int4"


def test_layers_that_the_configuration_names_are_not_touched() -> None:
    config = QConfig(
        INT16,
        specific_layer_config={QLayerConfig(WIDE, WIDE): ["third"]},
        exclude=["last"],
        algo_config=[AutoMixprecisionConfig(INT8)],
        extra_options={"PrintSummary": False},
    )
    result = ModelQuantizer(config).run(NET, None, SAMPLES)
    assert set(result.mixed.chosen) == {"first", "left"} and formats(result)["w3"] == "int16"


def test_the_model_is_prepared_for_the_types_of_the_targets() -> None:
    """int16 needs a higher opset than int8, and the first layer may get it."""
    model = net()
    model.opset_import[0].version = 13
    result = run(INT8, INT16, model, metric_threshold=None)
    assert len(result.mixed.scores) == 4
    chosen = run(INT8, INT16, model, include_layers=["third"])
    onnx.checker.check_model(chosen.proto, full_check=True)
    assert l2(chosen) < l2(run(INT8, INT16, model, metric_threshold=None))


def test_layers_of_one_weight_go_together_or_get_copies() -> None:
    assert ("left", "right") in run(metric_threshold=None).mixed.groups.values()
    result = run(shared_param_mode="unshare", include_layers=["left"])
    assert result.mixed.chosen == ("left",)
    assert {formats(result)[name] for name in formats(result) if name.startswith("w2")} == {"int8", "int16"}


def test_a_pair_of_its_own_leaves_the_other_readers_theirs() -> None:
    fields = {"include_layers": ["left"], "shared_param_mode": "unshare"}
    assert formats(run(**fields))["r"] == "int8"
    result = run(**fields, no_input_qdq_shared=True)
    assert formats(result)["r"] == "int16" and formats(result)["r_left"] == "int8"
    onnx.checker.check_model(result.proto, full_check=True)
    assert not any(node.op_type == "Identity" for node in result.proto.graph.node)
    assert l2(result, number=1) < l2(run(**fields), number=1) / 2  # the reader beside it loses nothing


def test_two_pairs_where_precisions_meet() -> None:
    count = lambda result: sum(node.op_type == "QuantizeLinear" for node in result.proto.graph.node)  # noqa: E731
    assert count(run(dual_quant_nodes=True)) > count(run())


def test_the_output_and_the_samples_that_are_measured() -> None:
    by_output = [
        {one.layer: one.metrics["value"] for one in run(metric_threshold=None, metric_output_index=number).mixed.scores}
        for number in (0, 1)
    ]
    assert by_output[0]["last"] < by_output[0]["third"] and by_output[1]["third"] < by_output[1]["last"]
    few = run(metric_threshold=None, data_size=2)
    assert {one.layer: one.metrics["value"] for one in few.mixed.scores}["first"] == pytest.approx(
        l2(run(include_layers=["first"]), samples=2), rel=1e-5
    )


def test_functions_of_the_user() -> None:
    seen: list[tuple[int, ...]] = []

    def distance(reference: np.ndarray, value: np.ndarray) -> float:
        seen.append(reference.shape)
        return float(np.abs(reference - value).max())

    result = run(metric_threshold=None, metric_distance_fn=distance)
    assert seen == [(4, 6)] * 6 * 4
    alone = outputs(run(include_layers=["first"]).proto)
    expected = np.mean([np.abs(x - y).max() for x, y in zip(outputs(NET), alone, strict=True)])
    values = {one.layer: one.metrics["value"] for one in result.mixed.scores}
    assert values["first"] == pytest.approx(expected, rel=1e-5)

    def merit(path: str) -> float:
        return float(np.mean(outputs(onnx.load(path))[0]))

    scores = run(metric_threshold=None, metric_evaluate_fn=merit).mixed.scores
    gap = abs(np.mean(outputs(run(include_layers=["third"]).proto)[0]) - np.mean(outputs(NET)[0]))
    assert {one.layer: one.metrics["value"] for one in scores}["third"] == pytest.approx(gap, rel=1e-3)


def test_a_layer_whose_metric_is_no_number_comes_last_and_is_not_chosen() -> None:
    """The second best layer by the norm of the error is broken by the user's function."""
    first, second, third, _ = run(metric_threshold=None).mixed.scores
    low, high = (
        np.sqrt(one.metrics["value"] * two.metrics["value"]) for one, two in ((first, second), (second, third))
    )

    def distance(path: str) -> float:
        pairs = zip(outputs(NET), outputs(onnx.load(path)), strict=True)
        found = float(np.mean([np.sqrt(np.square(x - y).sum()) for x, y in pairs]))
        return np.nan if low < found < high else found

    scores = run(metric_threshold=None, metric_evaluate_fn=distance).mixed.scores
    names = [one.layer for one in scores]
    assert np.isnan(scores[-1].metrics["value"]) and names[0] == first.layer and names[-1] == second.layer
    assert list(run(metric_threshold=1e9, metric_evaluate_fn=distance).mixed.chosen) == names[:-1]


def test_finished_measurements_are_kept_and_workers_change_nothing(tmp_path: Path) -> None:
    calls = []

    def distance(reference: np.ndarray, value: np.ndarray) -> float:
        calls.append(1)
        return float(np.square(reference - value).sum())

    fields: dict[str, Any] = {"metric_distance_fn": distance, "sensitivity_cache_file": tmp_path / "scores.json"}
    first = run(metric_threshold=None, worker_num=2, **fields)
    count = len(calls)
    again = run(metric_threshold=1e9, **fields)
    assert count and len(calls) - count == 6 * 2  # nothing chosen, and all of them: no single layer
    assert [one.metrics for one in first.mixed.scores] == [one.metrics for one in again.mixed.scores]
    with pytest.raises(ConfigError, match="belongs to another"):
        run(metric_threshold=None, data_size=3, **fields)


def test_it_resumes_with_save_and_restore(tmp_path: Path) -> None:
    options = {"SaveAndRestore": str(tmp_path / "state.json")}
    calls = []

    def distance(reference: np.ndarray, value: np.ndarray) -> float:
        calls.append(1)
        return float(np.abs(reference - value).sum())

    first = run(metric_threshold=0.5, metric_distance_fn=distance, options=options)
    count = len(calls)
    again = run(metric_threshold=0.5, metric_distance_fn=distance, options=options)
    assert count and len(calls) == count
    assert first.proto.SerializeToString() == again.proto.SerializeToString()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target_layer_config": "A8W9"}, "target_layer_config"),
        ({"target_layer_config": []}, "target_layer_config"),
        ({"target_op_type": []}, "target_op_type"),
        ({"target_op_type": "Conv"}, "target_op_type"),
        ({"include_layers": "first"}, "include_layers"),
        ({"data_size": -1}, "data_size"),
        ({"metric_output_index": 1.5}, "metric_output_index"),
        ({"metric_default": "l3"}, "metric_default"),
        ({"metric_threshold": "low"}, "metric_threshold"),
        ({"metric_optimize_object": "size"}, "metric_optimize_object"),
        ({"metric_distance_fn": 3}, "metric_distance_fn"),
        ({"metric_distance_fn": max, "metric_evaluate_fn": max}, "metric_evaluate_fn"),
        ({"worker_num": 0}, "worker_num"),
        ({"dual_quant_nodes": 1}, "dual_quant_nodes"),
        ({"no_input_qdq_shared": "yes"}, "no_input_qdq_shared"),
        ({"shared_param_mode": "copy"}, "shared_param_mode"),
        ({"subgraph_json": "missing.json"}, "subgraph_json"),
    ],
)
def test_bad_settings_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AutoMixprecisionConfig(**{"target_layer_config": INT8, **fields})


def test_what_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="metric_output_index is 2"):
        run(metric_threshold=None, metric_output_index=2)
    with pytest.raises(ConfigError, match="metric_output_index is 2"):
        run(metric_output_index=2)  # without a threshold nothing is measured; the setting is wrong all the same
    with pytest.raises(ConfigError, match="sensitivity_cache_file=5 must be"):
        run(sensitivity_cache_file=5)
    with pytest.raises(ConfigError, match=r"exclude_layers.*'frist'.*first"):
        run(exclude_layers=["frist"])
    with pytest.raises(ConfigError, match="no quantized layer may be chosen"):
        run(target_op_type=["Conv"])
    with pytest.raises(ConfigError, match="static quantization"):
        config = QConfig(use_dynamic_quant=True, algo_config=[AutoMixprecisionConfig(INT8)])
        ModelQuantizer(config).run(NET, None, SAMPLES)


@pytest.mark.parametrize(
    ("name", "other", "layers"),
    [("S16S16_MIXED_S8S8", "int16", "int8"), ("BF16_MIXED_BFP16", "bfloat16", "bfp16"),
     ("BF16_MIXED_MXINT8", "bfloat16", "mxint8")],
)  # fmt: skip
def test_a_mixed_preset_has_both_precisions(name: str, other: str, layers: str) -> None:
    config = get_default_config(name)
    config.extra_options["PrintSummary"] = False
    result = ModelQuantizer(Config(config)).run(NET, None, SAMPLES)
    found = formats(result)
    assert found["w1"] == layers and other in found.values()
    scale = np.abs(np.concatenate(outputs(NET))).max()
    assert max(np.abs(x - y).max() for x, y in zip(outputs(NET), outputs(result.proto), strict=True)) < 0.1 * scale


def test_it_can_be_written_in_a_configuration_file() -> None:
    entry = {"name": "auto_mixprecision", "target_layer_config": "A8W8", "metric_threshold": 0.5}
    made = from_dict(entry)
    assert made == AutoMixprecisionConfig("A8W8", metric_threshold=0.5) and made.to_dict()["metric_threshold"] == 0.5
