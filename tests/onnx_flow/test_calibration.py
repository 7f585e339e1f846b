"""Calibrated ranges against plain NumPy on the tensors of an unoptimized session."""

from __future__ import annotations

import time
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from tests.onnx_flow import models

from quark.errors import ConfigError, DataError, ModelError
from quark.numerics.affine import Grid
from quark.numerics.formats import get_format
from quark.observers import SEARCHES, Histogram
from quark.onnx import calibration
from quark.onnx.calibration import Request, calibrate, find_ranges, observe
from quark.onnx.graph.run import Extremes

GRID = Grid(get_format("uint8"), symmetric=False)
NAMES = ["x", "c1", "r1", "p1", "a2", "r2", "y"]


@pytest.fixture(scope="module")
def network() -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(models.cnn())


@pytest.fixture(scope="module")
def feeds(network: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    return [models.feeds(network, seed) for seed in range(5)]


@pytest.fixture(scope="module")
def tensors(network: onnx.ModelProto, feeds: list[dict[str, np.ndarray]]) -> dict[str, list[np.ndarray]]:
    """Every tensor of every sample, without graph optimizations."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(network)
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in NAMES if name not in ("x", "y"))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(exposed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    runs = [{**feed, **dict(zip(names, session.run(names, feed), strict=True))} for feed in feeds]
    return {name: [run[name] for run in runs] for name in NAMES}


def requests(method: str, **settings: Any) -> dict[str, Request]:
    return {name: Request(GRID, method, settings) for name in NAMES}


def test_minmax_is_the_minimum_and_the_maximum_over_all_samples(network: Any, feeds: Any, tensors: Any) -> None:
    ranges = calibrate(ir.from_proto(network), requests("minmax"), feeds)
    for name, values in tensors.items():
        expected = min(v.min() for v in values), max(v.max() for v in values)
        np.testing.assert_allclose(ranges[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


def test_the_moving_average_sees_each_sample_as_one(network: Any, feeds: Any, tensors: Any) -> None:
    ranges = calibrate(ir.from_proto(network), requests("moving_minmax", constant=0.5), feeds)
    weights = 0.5 ** np.arange(4, -1, -1)
    for name, values in tensors.items():
        expected = [weights @ [getattr(v, side)() for v in values] / weights.sum() for side in ("min", "max")]
        np.testing.assert_allclose(ranges[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


def test_percentiles_are_those_of_all_values(network: Any, feeds: Any, tensors: Any) -> None:
    ranges = calibrate(ir.from_proto(network), requests("percentile", percentile=99.0), feeds)
    for name, values in tensors.items():
        x = np.concatenate([v.ravel() for v in values])
        threshold = np.sort(np.abs(x))[int(np.ceil(0.99 * x.size)) - 1]
        expected = max(-threshold, x.min()), min(threshold, x.max())
        np.testing.assert_allclose(ranges[name], expected, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("method", ["mse", "entropy", "layerwise_percentile", "non_overflow"])
def test_other_methods_search_on_what_was_streamed(network: Any, feeds: Any, tensors: Any, method: str) -> None:
    ranges = calibrate(ir.from_proto(network), requests(method), feeds)
    search = SEARCHES[method]
    for name, values in tensors.items():
        statistic = search.observe({})
        for value in values:
            statistic.update(value)
        np.testing.assert_allclose(ranges[name], search.find(statistic, GRID, {}), rtol=0.05, err_msg=name)


def test_methods_can_differ_from_tensor_to_tensor(network: Any, feeds: Any, tensors: Any) -> None:
    mixed = {"r1": Request(GRID), "a2": Request(GRID, "percentile", {"percentile": 90.0})}
    ranges = calibrate(ir.from_proto(network), mixed, feeds)
    assert list(ranges) == ["r1", "a2"]
    np.testing.assert_allclose(ranges["r1"][1], max(v.max() for v in tensors["r1"]), rtol=1e-5)
    assert ranges["a2"][1] < 0.9 * max(v.max() for v in tensors["a2"])


def test_parts_of_the_data_can_be_observed_apart_and_merged(network: Any, feeds: Any) -> None:
    wanted = {**requests("percentile", percentile=99.5), "r2": Request(GRID)}
    model = ir.from_proto(network)
    first, second = observe(model, wanted, feeds[:2]), observe(model, wanted, feeds[2:])
    for name in wanted:
        first[name].merge(second[name])
    assert find_ranges(wanted, first) == calibrate(model, wanted, feeds)


def test_two_runs_are_equal(network: Any, feeds: Any) -> None:
    model = ir.from_proto(network)
    assert calibrate(model, requests("mse"), feeds) == calibrate(model, requests("mse"), feeds)


def test_the_model_comes_back_unchanged(network: Any, feeds: Any) -> None:
    model = ir.from_proto(network)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    calibrate(model, requests("percentile"), feeds)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_progress_hears_of_every_sample(network: Any, feeds: Any) -> None:
    model, heard = ir.from_proto(network), []
    calibrate(model, {"r1": Request(GRID)}, feeds, progress=lambda done, total: heard.append((done, total)))
    assert heard == [(k + 1, 5) for k in range(5)]
    heard.clear()
    calibrate(model, {"r1": Request(GRID)}, iter(feeds), progress=lambda done, total: heard.append((done, total)))
    assert heard[-1] == (5, None)


@pytest.mark.parametrize("method", ["minmax", "percentile"])
def test_memory_does_not_grow_with_the_number_of_samples(method: str) -> None:
    model = ir.from_proto(
        onnx.shape_inference.infer_shapes(
            models.model("g (float[N, 64, 64, 64] x) => (float[N, 64, 64, 64] y) { r = Relu (x)  y = Neg (r) }")
        )
    )
    sample = np.random.default_rng(0).standard_normal((1, 64, 64, 64)).astype(np.float32)
    peaks = []
    for count in (4, 40):
        tracemalloc.start()
        calibrate(model, {"r": Request(GRID, method)}, ({"x": sample + k} for k in range(count)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 8 * sample.nbytes, "36 more samples must not need the memory of 8"


def test_counting_is_at_most_one_sample_behind(monkeypatch: pytest.MonkeyPatch, network: Any, feeds: Any) -> None:
    given, counted, behind = [], [], []
    count = calibration._count

    def slowly(statistics: Any, values: Any, index: int) -> None:
        time.sleep(0.02)
        count(statistics, values, index)
        counted.append(index)

    def reader() -> Iterator[Any]:
        for feed in feeds * 3:
            given.append(feed)
            behind.append(len(given) - len(counted) // calibration.COUNTERS)
            yield feed

    monkeypatch.setattr(calibration, "_count", slowly)
    calibrate(ir.from_proto(network), requests("percentile"), reader())
    assert len(counted) == 15 * calibration.COUNTERS
    assert max(behind) <= 2, "one is counted while the next runs, and no third is read"


# ---- errors ----------------------------------------------------------------------------------------------------------


def roots() -> ir.Model:
    """Square roots, then a Max that swallows a NaN, and a reciprocal."""
    graph = "g (float[N] x) => (float[N] y) { s = Sqrt (x)  i = Reciprocal (s)  y = Max (i, s) }"
    return ir.from_proto(onnx.shape_inference.infer_shapes(models.model(graph)))


@pytest.mark.parametrize(
    ("lo", "hi", "has_nan", "what"),
    [
        (-1.0, 1.0, True, "NaN"),  # a runtime whose minimum passes over NaN
        (np.inf, -np.inf, True, "NaN"),  # nothing else was there
        (np.nan, np.nan, True, "NaN"),
        (-np.inf, 1.0, False, "infinite values"),
        (-1.0, np.inf, False, "infinite values"),
    ],
)
def test_extremes_that_are_not_finite_are_not_counted(lo: float, hi: float, has_nan: bool, what: str) -> None:
    counted: dict[str, Any] = {}
    with pytest.raises(DataError, match=rf"'t' becomes not finite on calibration sample 3 \({what}\)"):
        calibration._add_extremes(counted, {"t": Extremes(lo, hi, has_nan)}, 3)
    calibration._add_extremes(counted, {"t": Extremes(np.inf, -np.inf, False)}, 3)  # an empty tensor: nothing to count


@pytest.mark.parametrize("method", ["minmax", "moving_minmax", "percentile", "mse"])
@pytest.mark.parametrize(("bad", "tensor", "what"), [(-1.0, "s", "NaN"), (0.0, "i", "infinite")])
def test_activations_that_are_not_finite_are_named(method: str, bad: float, tensor: str, what: str) -> None:
    good, spoilt = np.float32([1, 4, 9, 16]), np.float32([1, 4, bad, 16])
    message = rf"activation '{tensor}' becomes not finite on calibration sample 2 \(.*{what}.*exclude the node"
    with pytest.raises(DataError, match=message):
        calibrate(roots(), {tensor: Request(GRID, method)}, [{"x": x} for x in (good, good, spoilt, good)])


def test_an_error_in_the_last_sample_is_not_lost() -> None:
    with pytest.raises(DataError, match="calibration sample 1"):
        calibrate(roots(), {"s": Request(GRID, "percentile")}, [{"x": np.float32([1])}, {"x": np.float32([-1])}])


def test_samples_are_checked_before_they_are_run(network: Any) -> None:
    model = ir.from_proto(network)
    with pytest.raises(DataError, match="sample 0 lacks the input 'x'; it has nothing"):
        calibrate(model, requests("minmax"), [{}])
    with pytest.raises(DataError, match="gave no sample"):
        calibrate(model, requests("percentile"), [])
    with pytest.raises(DataError, match=r"sample 0, input 'x'.*NaN"):
        calibrate(model, requests("minmax"), [{"x": np.full((1, 3, 16, 16), np.nan, np.float32)}])


def test_a_sample_that_cannot_run_is_numbered() -> None:
    graph = "g (float[A] x, float[B] z) => (float[C] y) { y = Add (x, z) }"
    model = ir.from_proto(onnx.shape_inference.infer_shapes(models.model(graph)))
    sides = [np.zeros(2, np.float32), np.zeros(3, np.float32)]
    with pytest.raises(DataError, match=r"sample 1: the model does not run on this sample"):
        calibrate(model, {"y": Request(GRID)}, [{"x": sides[0], "z": sides[0]}, {"x": sides[0], "z": sides[1]}])


def test_tensors_that_do_not_exist_are_named(network: Any, feeds: Any) -> None:
    with pytest.raises(ModelError, match=r"no tensor 'r_1'.*Did you mean 'r1'"):
        calibrate(ir.from_proto(network), {"r_1": Request(GRID)}, feeds)


def test_requests_are_checked_when_they_are_made() -> None:
    with pytest.raises(ConfigError, match=r"unknown calibration method 'percentil'\. Did you mean 'percentile'"):
        Request(GRID, "percentil")
    with pytest.raises(ConfigError, match=r"'percent'.*Allowed: .*percentile, symmetric"):
        Request(GRID, "percentile", {"percent": 99})


def test_a_tensor_that_is_always_empty_gets_an_empty_range() -> None:
    graph = "g (float[N] x, float[M] w) => (float[N] y, float[M] z) { y = Relu (x) z = Relu (w) }"
    model = ir.from_proto(onnx.shape_inference.infer_shapes(models.model(graph)))
    feed = {"x": np.empty(0, np.float32), "w": np.ones(1, np.float32)}
    for method in ("minmax", "percentile"):
        assert calibrate(model, {"y": Request(GRID, method)}, [feed]) == {"y": (0.0, 0.0)}


def test_histograms_hold_every_value_once(network: Any, feeds: Any, tensors: Any) -> None:
    statistics = observe(ir.from_proto(network), requests("percentile"), feeds)
    for name, statistic in statistics.items():
        assert isinstance(statistic, Histogram)
        assert statistic.count == statistic.bins()[2].sum() == sum(v.size for v in tensors[name])


@pytest.mark.parametrize("method", SEARCHES)
@pytest.mark.parametrize("processors", [1, 2])
def test_one_sample_is_in_memory_where_nothing_is_won_by_two(
    network: Any, feeds: Any, monkeypatch: pytest.MonkeyPatch, method: str, processors: int
) -> None:
    settings = {"grid": GRID} if "grid" in SEARCHES[method].settings else {}
    quick = isinstance(SEARCHES[method].observe(settings), calibration.LIGHT)
    handed_out: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []
    run = calibration.Runner.run

    def watched(self: Any, feed: Any) -> Any:
        alive.append(sum(one() is not None for one in handed_out))
        found = run(self, feed)
        handed_out.extend(weakref.ref(array) for name, array in found.values.items() if name not in feed)
        return found

    monkeypatch.setattr(calibration.Runner, "run", watched)
    monkeypatch.setattr(calibration, "lent", lambda: processors)
    observe(ir.from_proto(network), requests(method, **settings), feeds)
    assert len(alive) == len(feeds)
    assert alive == [0] * len(feeds) or (processors > 1 and not quick)
