"""Searches against errors computed in float64 over all values, where float32, bins or a part of the values might tell
another story: values far out, very large and very small ones, outliers at places of a pattern."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quark.numerics.affine import Grid
from quark.numerics.formats import get_format
from quark.observers import SEARCHES, Histogram, Memory, Values
from quark.observers.mse import range_errors, search_rows
from quark.observers.mse_modes import ROW_SEARCHES
from quark.observers.sampled import ENOUGH, Sampled, step_of

INT8 = Grid(get_format("int8"))
GRIDS = {
    "int8": INT8,
    "uint8": Grid(get_format("uint8"), symmetric=False),
    "int16": Grid(get_format("int16")),
    "int8 pow2": Grid(get_format("int8"), scale_rule="power_of_two"),
}
CANDIDATES = (99.9, 99.999, 99.99999)


def rounded(x: np.ndarray, span: tuple[float, float], grid: Grid) -> np.ndarray:
    """The textbook's quantizer, float64."""
    scale, zero = (float(part) for part in grid.parameters(*span))
    codes = np.clip(np.rint(x.astype(np.float64) / scale) + zero, grid.format.min, grid.format.max)
    return (codes - zero) * scale


def error(x: np.ndarray, span: tuple[float, float], grid: Grid, power: int = 2) -> float:
    return float((np.abs(x.astype(np.float64) - rounded(x, span, grid)) ** power).sum())


# ---- values far out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["mae", "mse"])
@pytest.mark.parametrize("far", [10.0, 1e3, 1e5, 2e5, 1e6, 1e12, 1e30])
@pytest.mark.parametrize("sign", [1, -1])
def test_layerwise_percentile_takes_the_candidate_of_least_error(metric: str, far: float, sign: int) -> None:
    x = np.random.default_rng(3).standard_normal(400_000).astype(np.float32)
    x[77] = sign * far  # all but the last candidate cut it off
    settings = {"metric": metric, "candidates": CANDIDATES}
    statistic = SEARCHES["layerwise_percentile"].observe(settings)
    for part in np.array_split(x, 5):
        statistic.update(part)
    found = error(
        x, SEARCHES["layerwise_percentile"].find(statistic, INT8, settings), INT8, {"mae": 1, "mse": 2}[metric]
    )
    spans = [SEARCHES["percentile"].find(statistic, INT8, {"percentile": p}) for p in CANDIDATES]
    assert found <= 1.02 * min(error(x, span, INT8, {"mae": 1, "mse": 2}[metric]) for span in spans)


@pytest.mark.parametrize("far", [1e3, 1e6, 1e9])
def test_errors_of_a_histogram_are_those_of_the_values(far: float) -> None:
    x = np.random.default_rng(4).standard_normal(100_000).astype(np.float32)
    x[77] = far
    whole, merged, second = Histogram(), Histogram(), Histogram()
    whole.update(x)
    merged.update(x[:60_000])
    second.update(x[60_000:])
    second.merge(merged)
    for span in ((-4.0, 4.0), (-0.5, 0.5), (-far, far)):
        exact = error(x, span, INT8, 1)
        for statistic in (whole, second):
            assert next(range_errors(statistic, INT8, [span], 1)) == pytest.approx(exact, rel=0.03, abs=far / 2048)


# ---- very large and very small values ------------------------------------------------------------------------------


def judged(x: np.ndarray, grid: Grid) -> dict[str, tuple[float, float]]:
    """The range that every way of asking for the least squared error finds."""
    binned, kept = Histogram(), Values(store=Memory())
    for statistic in (binned, kept):
        statistic.update(x)
    found = {name: SEARCHES["mse"].find(one, grid, {}) for name, one in (("binned", binned), ("kept", kept))}
    lo, hi = search_rows(x[None], grid)
    return {**found, "rows": (float(lo[0]), float(hi[0]))}


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("exponent", [-98, -75, -45, 60, 100])
def test_the_least_squared_error_knows_no_magnitude(grid: Grid, exponent: int) -> None:
    x = np.random.default_rng(6).standard_t(4, 20_000).astype(np.float32)
    moved = np.ldexp(x, exponent)
    plain = judged(x, grid)
    for name, span in judged(moved, grid).items():
        assert span == pytest.approx(tuple(np.ldexp(plain[name], exponent)), rel=1e-5), name
        tried = [np.abs(x).max() * 2.0 ** (-k / 8) for k in range(40)]
        best = min(error(x, (-t, t) if grid.centred else (max(-t, x.min()), min(t, x.max())), grid) for t in tried)
        assert error(x, tuple(np.ldexp(span, -exponent)), grid) <= 1.02 * best, name


@pytest.mark.parametrize("mode", ROW_SEARCHES)
def test_rows_of_any_magnitude_are_searched_side_by_side(mode: str) -> None:
    rows = np.random.default_rng(7).standard_t(4, (5, 3000)).astype(np.float32)
    exponents = np.array([-95, 0, -40, 70, 100])
    lo, hi = ROW_SEARCHES[mode](np.ldexp(rows, exponents[:, None]), INT8)
    low, high = ROW_SEARCHES[mode](rows, INT8)
    np.testing.assert_allclose(np.ldexp([lo, hi], -exponents), [low, high], rtol=1e-5)


# ---- a part of the values ------------------------------------------------------------------------------------------

PLACES: dict[str, Callable[[int, int], np.ndarray]] = {
    **{f"every p-th, from {start}": lambda n, p, start=start: np.arange(start, n, p) for start in (0, 1, 2)},
    "all but every p-th": lambda n, p: np.flatnonzero(np.arange(n) % p)[::7],
    "one block": lambda n, p: np.arange(n // 3, n // 3 + 40_000),
    "few, spread": lambda n, p: np.arange(1, n, n // 3000 // p * p),
}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("size", [7 * ENOUGH + 13, 11 * ENOUGH + 1])
def test_no_places_are_passed_over(places: Callable[[int, int], np.ndarray], size: int) -> None:
    x = np.random.default_rng(8).standard_normal(size).astype(np.float32)
    at = places(size, step_of(size))
    x[at] = np.random.default_rng(9).uniform(20, 25, at.size)
    statistic = Sampled()
    statistic.update(x)
    values, weights = statistic.points()
    assert float(weights[values > 15].sum()) == pytest.approx(at.size, rel=0.12)
    again = Sampled()
    again.update(x)
    np.testing.assert_array_equal(again.points(), (values, weights))


def test_samples_with_outliers_at_the_same_places_average_out() -> None:
    size = 7 * ENOUGH + 13
    rng, statistic = np.random.default_rng(10), Sampled()
    at = rng.choice(size, 1500, replace=False)
    for _ in range(12):
        x = rng.standard_normal(size).astype(np.float32)
        x[at] = rng.uniform(20, 25, at.size)
        statistic.update(x)
    values, weights = statistic.points()
    # 12 x 1500 values, one in 7 looked at: the same ones would leave 7 %, others each time 2 %.
    assert float(weights[values > 15].sum()) == pytest.approx(12 * at.size, rel=0.045)


# ---- two scales that are nearly as good ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_power_of_two_scales_are_told_apart(seed: int) -> None:
    """Long tails: one scale clips more, the next rounds more; where their errors meet, a percent decides."""
    grid, draw = GRIDS["int8 pow2"], np.random.default_rng(seed)
    x = (draw.standard_t(4 + seed, 30_000) * draw.standard_normal(30_000)).astype(np.float32)
    spans = [(-127 * 2.0**power, 127 * 2.0**power) for power in range(-6, 3)]

    def errors(times: float) -> list[float]:
        return [error((x * times).astype(np.float32), span, grid) for span in spans]

    low, high, first = 1.0, 2.0, int(np.argmin(errors(1.0)))
    for _ in range(10):  # to where the best scale changes
        middle = (low + high) / 2
        low, high = (middle, high) if np.argmin(errors(middle)) == first else (low, middle)
    for times in low * (1 + np.arange(-4, 5) / 2000):
        scaled, exact = (x * times).astype(np.float32), sorted(errors(times))
        assert exact[1] < 1.02 * exact[0]
        statistic = SEARCHES["mse"].observe({})
        statistic.update(scaled)
        assert error(scaled, SEARCHES["mse"].find(statistic, grid, {}), grid) <= 1.0005 * exact[0]
