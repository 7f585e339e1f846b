"""Every range search against its definition, computed on all values at once."""

from __future__ import annotations

import numpy as np
import pytest
from tests.pairs import pairs

from quark.errors import ConfigError
from quark.numerics.affine import Coding, Grid
from quark.numerics.formats import get_format
from quark.observers import SEARCHES, Histogram, mse
from quark.observers.mse import search_rows

INT8 = Grid(get_format("int8"))
UINT8 = Grid(get_format("uint8"), symmetric=False)
INT8_POW2 = Grid(get_format("int8"), scale_rule="power_of_two")
FP8 = Grid(get_format("fp8_e4m3"))
GRIDS = {
    "int8": INT8,
    "uint8": UINT8,
    "int4": Grid(get_format("int4")),
    "int16": Grid(get_format("int16")),
    "int8 pow2": INT8_POW2,
    "uint8 pow2": Grid(get_format("uint8"), symmetric=False, scale_rule="power_of_two"),
    "int16 pow2": Grid(get_format("int16"), scale_rule="power_of_two"),
    "fp8": FP8,
}
METHODS = [name for name in SEARCHES if name != "distribution"]


def data(kind: str = "normal", size: int = 20_000, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    made = {
        "normal": rng.standard_normal(size),
        "relu": np.maximum(rng.standard_normal(size), 0),
        "shifted": rng.uniform(-0.2, 3, size),
        "negative": -np.abs(rng.standard_normal(size)),
        "tailed": rng.standard_t(3, size),
        "outliers": np.where(rng.random(size) < 1e-3, 60, 1) * rng.standard_normal(size),
        "tiny": rng.standard_normal(size) * 1e-7,
        "constant": np.full(size, 2.5),
        "zero": np.zeros(size),
    }
    return made[kind].astype(np.float32)


KINDS = ("normal", "relu", "shifted", "negative", "tailed", "outliers", "tiny", "constant", "zero")


def find(x: np.ndarray, grid: Grid, method: str, **settings: object) -> tuple[float, float]:
    if "grid" in SEARCHES[method].settings:  # a statistic that searches as it goes
        settings["grid"] = grid
    statistic = SEARCHES[method].observe(settings)
    for part in np.array_split(x, 3):
        statistic.update(part)
    return SEARCHES[method].find(statistic, grid, settings)


def error(x: np.ndarray, span: tuple[float, float], grid: Grid, power: int = 2) -> float:
    scale, zero_point = grid.parameters(*span)
    off = np.abs(x - Coding(grid.format).fake_quantize(x, scale, zero_point))
    return float(np.mean(off.astype(np.float64) ** power))


@pytest.mark.parametrize(("method", "kind", "name"), pairs(METHODS, KINDS, GRIDS))
def test_every_search_gives_a_usable_range_on_every_grid(method: str, kind: str, name: str) -> None:
    grid = GRIDS[name]
    if method == "mse_most_common" and grid.scale_rule != "power_of_two":
        with pytest.raises(ConfigError, match="needs power-of-two scales"):
            find(data(kind, 3000), grid, method)
        return
    lo, hi = find(data(kind, 3000), grid, method)
    assert np.isfinite([lo, hi]).all() and lo <= hi
    assert np.all(grid.parameters(lo, hi)[0] > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_minmax(kind: str) -> None:
    x = data(kind)
    assert find(x, INT8, "minmax") == (x.min(), x.max())
    assert find(x, INT8, "minmax", symmetric=True) == (-np.abs(x).max(), np.abs(x).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("percentile", [99.0, 99.9, 99.999, 100.0])
def test_percentile_keeps_that_share_of_the_magnitudes(kind: str, percentile: float) -> None:
    x = data(kind)
    lo, hi = find(x, INT8, "percentile", percentile=percentile)
    threshold = np.sort(np.abs(x))[int(np.ceil(percentile / 100 * x.size - 1e-6)) - 1]
    assert lo == max(-threshold, x.min()) and hi == min(threshold, x.max())


@pytest.mark.parametrize("kind", KINDS)
def test_percentile_without_symmetry_cuts_half_on_each_side(kind: str) -> None:
    x = data(kind)
    ordered = np.sort(x)
    lo, hi = find(x, UINT8, "percentile", percentile=99.0, symmetric=False)
    unit = float(np.abs(x).max()) / 2**15
    assert lo == pytest.approx(float(ordered[int(np.ceil(0.005 * x.size)) - 1]), rel=1 / 2048, abs=unit)
    assert hi == pytest.approx(float(ordered[int(np.ceil(0.995 * x.size)) - 1]), rel=1 / 2048, abs=unit)


def test_a_percentile_outside_its_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Percentile is 101; it must be between 0 and 100"):
        find(data(), INT8, "percentile", percentile=101)


@pytest.mark.parametrize("kind", ["normal", "relu", "shifted", "negative", "tailed", "outliers", "tiny"])
@pytest.mark.parametrize("grid", [GRIDS[name] for name in ("int8", "uint8", "int4", "fp8")])
def test_mse_is_as_good_as_trying_everything(kind: str, grid: Grid) -> None:
    x = data(kind)
    found = error(x, find(x, grid, "mse"), grid)
    tried = [(max(-t, x.min()), min(t, x.max())) for t in np.abs(x).max() * 2.0 ** -np.arange(0, 8, 1 / 16)]
    assert found <= 1.01 * min(error(x, span, grid) for span in tried)


def test_mse_finds_each_side_where_the_zero_point_is_free() -> None:
    x = np.concatenate([data("tailed"), 40 + data("normal", 20_000)])
    free, mirrored = find(x, UINT8, "mse"), find(x, UINT8, "mse", symmetric=True)
    assert error(x, free, UINT8) < error(x, mirrored, UINT8)


@pytest.mark.parametrize("kind", ["normal", "relu", "shifted", "negative", "tailed", "outliers", "tiny"])
@pytest.mark.parametrize("name", ["int8 pow2", "uint8 pow2", "int16 pow2"])
def test_mse_takes_the_best_power_of_two(kind: str, name: str) -> None:
    x, grid = data(kind), GRIDS[name]
    widest = float(np.abs(x).max())
    full, zero_point = grid.parameters(-widest, widest)[0], grid.format.middle
    errors = {}
    for k in range(-1, 9):
        quantized = Coding(grid.format).fake_quantize(x, full / np.float32(2**k), zero_point)
        errors[float(full) / 2**k] = float(np.mean((x - quantized).astype(np.float64) ** 2))
    scale = float(grid.parameters(*find(x, grid, "mse"))[0])
    assert errors[scale] <= 1.01 * min(errors.values())
    assert grid.parameters(*find(x, grid, "mse"))[1] == zero_point


def test_power_of_two_candidates_go_on_while_finer_is_better() -> None:
    x = np.append(0.3 * data("normal"), np.float32(16))
    grid = Grid(get_format("int4"), scale_rule="power_of_two")
    full = float(grid.parameters(-16.0, 16.0)[0])
    assert float(grid.parameters(*find(x, grid, "mse"))[0]) == full / 16
    tried = {k: error(x, (-7 * full / k, 7 * full / k), grid) for k in (1, 2, 4, 8, 16, 32)}
    assert min(tried, key=tried.__getitem__) == 16


@pytest.mark.parametrize("grid", [INT8, INT8_POW2, UINT8], ids=["int8", "pow2", "uint8"])
def test_weight_rows_are_searched_each_for_itself(grid: Grid) -> None:
    rows = np.stack([data(kind, 600) for kind in ("normal", "tailed", "outliers", "tiny", "relu")])
    lo, hi = search_rows(rows.reshape(5, 1, 600), grid)
    assert lo.shape == hi.shape == (5, 1)
    for row, low, high in zip(rows, lo[:, 0], hi[:, 0], strict=True):
        one_low, one_high = search_rows(row[None], grid)
        assert (one_low[0], one_high[0]) == (low, high)
        assert error(row, (low, high), grid) <= error(row, (row.min(), row.max()), grid) * 1.0001


def test_large_weights_of_one_scale_come_out_as_well() -> None:
    x = data("tailed", 200_000)[None]
    lo, hi = search_rows(x, INT8)
    assert lo.shape == hi.shape == (1,)
    tried = [(-t, t) for t in float(np.abs(x).max()) * 2.0 ** -np.arange(0, 4, 1 / 32)]
    assert error(x, (lo[0], hi[0]), INT8) <= 1.01 * min(error(x, span, INT8) for span in tried)


@pytest.mark.parametrize("metric", ["mae", "mse"])
@pytest.mark.parametrize("kind", ["normal", "tailed", "outliers", "relu"])
@pytest.mark.parametrize("grid", [INT8, UINT8], ids=["int8", "uint8"])
def test_layerwise_percentile_takes_the_best_candidate(metric: str, kind: str, grid: Grid) -> None:
    x, power = data(kind), {"mae": 1, "mse": 2}[metric]
    candidates = [90.0, 99.0, 99.9, 99.99, 100.0]
    errors = [error(x, find(x, grid, "percentile", percentile=p), grid, power) for p in candidates]
    found = find(x, grid, "layerwise_percentile", metric=metric, candidates=candidates)
    assert error(x, found, grid, power) <= 1.01 * min(errors)


def test_layerwise_percentile_names_what_it_refuses() -> None:
    with pytest.raises(ConfigError, match=r"unknown LWPMetric 'maee'\. Did you mean 'mae'"):
        find(data(), INT8, "layerwise_percentile", metric="maee")
    with pytest.raises(ConfigError, match="PercentileCandidates is empty"):
        find(data(), INT8, "layerwise_percentile", candidates=[])


@pytest.mark.parametrize("kind", ["normal", "relu", "shifted", "tailed", "outliers"])
def test_entropy_never_quantizes_worse_than_the_full_range(kind: str) -> None:
    x = data(kind, 100_000)
    assert error(x, find(x, INT8, "entropy"), INT8) <= 1.02 * error(x, find(x, INT8, "minmax"), INT8)


def test_entropy_clips_what_little_there_is_far_out() -> None:
    x = np.append(data("normal", 300_000), np.float32([9.0, -9.0]))
    lo, hi = find(x, INT8, "entropy")
    assert 3.2 < hi < 5.5 and -5.5 < lo < -3.2


def test_entropy_does_not_clip_a_uniform_distribution() -> None:
    x = data("shifted", 100_000)
    assert find(x, UINT8, "entropy")[1] > 2.9


def test_entropy_keeps_both_modes() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(-5, 0.2, 3000), rng.normal(2, 0.2, 9000)]).astype(np.float32)
    lo, hi = find(x, INT8, "entropy")
    assert lo < -5 and hi == x.max()


def test_zeros_do_not_move_the_entropy_threshold() -> None:
    x = np.abs(np.random.default_rng(0).laplace(size=100_000)).astype(np.float32)
    threshold = find(x, INT8, "entropy")[1]
    assert threshold < 0.9 * x.max()
    assert find(np.append(x, np.zeros(400_000, np.float32)), INT8, "entropy") == (0.0, threshold)


def test_few_samples_do_not_look_like_outliers() -> None:
    x = data("normal", 500)
    assert find(x, INT8, "entropy")[1] > 0.9 * x.max()


@pytest.mark.parametrize("scenario", ["same", "p3"])
def test_distribution_matches_the_spread_of_the_codes(scenario: str) -> None:
    x = data("normal", 100_000).astype(np.float64) * 3 + 1  # a mean that the spread does not count
    lo, hi = find(x.astype(np.float32), FP8, "distribution", scenario=scenario)
    positive = [m / 8 * 2.0**-6 for m in range(1, 8)]
    positive += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if not (e == 15 and m == 7)]
    codes = np.array([0.0, 0.0, *positive, *(-p for p in positive)])
    bend = (lambda v: v) if scenario == "same" else np.cbrt
    spread = np.std(bend(x)) / np.std(bend(codes))
    assert hi == pytest.approx(448 * (spread if scenario == "same" else spread**3), rel=1e-3)
    assert lo == -hi


def test_distribution_is_for_fp8_and_says_so() -> None:
    with pytest.raises(ConfigError, match=r"Distribution works for the FP8 .*fp8_e5m2, fp8_e4m3.*this tensor is int8"):
        find(data(), INT8, "distribution")
    with pytest.raises(ConfigError, match="unknown Scenario 'sam'"):
        find(data(), FP8, "distribution", scenario="sam")


@pytest.mark.parametrize("widest", [2.5, 1.0, 127.0, 0.9, 3.97])
def test_non_overflow_floors_the_position(widest: float) -> None:
    x = np.float32([-0.5 * widest, 0.1, widest])
    scale = float(INT8_POW2.parameters(*find(x, INT8_POW2, "non_overflow"))[0])
    assert scale == 2.0 ** -np.floor(-np.log2(np.float64(np.float32(widest)) / 127))
    assert 127 * scale >= np.float32(widest)


def test_non_overflow_leaves_float_scales_alone() -> None:
    assert find(data("shifted"), UINT8, "non_overflow", symmetric=False) == find(data("shifted"), UINT8, "minmax")


def test_moving_average_settings_reach_the_statistic() -> None:
    x = [np.float32([0, k]) for k in (1, 2, 3)]
    search = SEARCHES["moving_minmax"]
    statistic = search.observe({"constant": 1.0, "symmetric": True})
    for part in x:
        statistic.update(part)
    assert search.find(statistic, INT8, {"constant": 1.0, "symmetric": True}) == (-3.0, 3.0)


def test_settings_are_checked_by_name() -> None:
    with pytest.raises(ConfigError, match=r"setting of the calibration method 'percentile' 'percentil'.*'percentile'"):
        SEARCHES["percentile"].check({"percentil": 99})


def test_a_tensor_without_values_has_an_empty_range() -> None:
    for search in SEARCHES.values():
        settings = {"grid": INT8} if "grid" in search.settings else {}
        assert search.find(search.observe(settings), INT8, settings) == (0.0, 0.0)


def test_one_large_row_is_searched_in_its_histogram_and_several_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.stack([data("tailed", 3000), 2 * data("normal", 3000)])
    exact = search_rows(x, INT8)
    monkeypatch.setattr(mse, "LARGE", 3000)
    at_most = search_rows(x[:1], INT8)
    monkeypatch.setattr(mse, "LARGE", 2999)
    assert np.array_equal(search_rows(x, INT8), exact)
    assert np.array_equal(at_most, np.array(exact)[:, :1])
    statistic = Histogram()
    statistic.update(x[0])
    streamed = SEARCHES["mse"].find(statistic, INT8, {})
    assert [float(one[0]) for one in search_rows(x[:1], INT8)] == list(streamed) != [float(one[0]) for one in exact]


def test_histogram_search_and_exact_search_agree() -> None:
    x = data("tailed", 30_000)
    statistic = Histogram()
    statistic.update(x)
    streamed = SEARCHES["mse"].find(statistic, INT8, {})
    exact = search_rows(x[None], INT8)
    assert error(x, streamed, INT8) == pytest.approx(error(x, (exact[0][0], exact[1][0]), INT8), rel=0.01)
