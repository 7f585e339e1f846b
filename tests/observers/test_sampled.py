"""Histograms that pass over values: the sums and ranges they give against NumPy over all values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quark.errors import DataError
from quark.numerics.affine import Grid
from quark.numerics.formats import get_format
from quark.observers import SEARCHES, Histogram, Memory, Values
from quark.observers.outlined import Outlined, outlined
from quark.observers.sampled import ENOUGH, PRIMES, Sampled, sampled, step_of

LARGE = 7 * ENOUGH + 13
Draw = Callable[[np.random.Generator, int], np.ndarray]
SHAPES: dict[str, Draw] = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "relu": lambda rng, n: np.maximum(rng.standard_normal(n), 0),
    "negative": lambda rng, n: -rng.exponential(size=n),
    "heavy tails": lambda rng, n: rng.standard_t(3, size=n),
    "few negative": lambda rng, n: np.append(np.maximum(rng.standard_normal(n - 40), 0), np.full(40, -30.0)),
    "saturated": lambda rng, n: np.clip(3 * rng.standard_normal(n), 0, 6),
    "one outlier": lambda rng, n: np.append(rng.standard_normal(n - 1), 900.0),
}


def samples(name: str, count: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [SHAPES[name](rng, LARGE + 1001 * k).astype(np.float32) for k in range(count)]


def filled(parts: list[np.ndarray]) -> Sampled:
    statistic = Sampled()
    for part in parts:
        statistic.update(part)
    return statistic


def squared_error(x: np.ndarray, limits: tuple[float, float], rule: str) -> float:
    """Of rounding to int8 by the textbook, in float64."""
    scale = max(-limits[0], limits[1]) / 127
    scale = 2.0 ** np.ceil(np.log2(max(-limits[0] / 128, limits[1] / 127))) if rule == "power_of_two" else scale
    wide = x.astype(np.float64)
    return float(np.square(wide - scale * np.clip(np.rint(wide / scale), -128, 127)).sum())


@pytest.mark.parametrize("size", [1, ENOUGH, 3 * ENOUGH - 1, 3 * ENOUGH, 200_704, 802_816, 10**7, 10**9])
def test_steps_leave_enough_and_share_no_factor_with_the_size(size: int) -> None:
    step = step_of(size)
    assert step == 1 or (size // step >= ENOUGH and np.gcd(step, size) == 1)
    assert (step > 1) == (size > 3 * ENOUGH or size == 200_704)


def test_steps_are_the_primes() -> None:
    """By Eratosthenes; a size that all others divide shows each."""
    odd = [n for n in range(3, 100) if all(n % d for d in range(2, n))]
    assert list(PRIMES) == odd
    for prime in odd:
        size = prime * ENOUGH
        assert step_of(size) == max((n for n in odd if n < prime), default=1)
        assert step_of(size + 1) == max((n for n in odd if n <= prime and (size + 1) % n), default=1)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rule", ["float32", "power_of_two"])
def test_ranges_are_as_good_as_those_of_all_values(name: str, rule: str) -> None:
    parts = samples(name)
    grid = Grid(get_format("int8"), True, False, rule)
    everything = Histogram()
    for part in parts:
        everything.update(part)
    found, best = (SEARCHES["mse"].find(statistic, grid, {}) for statistic in (filled(parts), everything))
    x = np.concatenate(parts)
    lost = 10 * np.log10(squared_error(x, found, rule) / squared_error(x, best, rule))
    assert lost < 0.04, f"{lost:.3f} dB with {found} in the place of {best}"


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("power", [0, 1, 2, 4])
def test_sums_over_the_points_are_those_over_all_values(name: str, power: int) -> None:
    parts = samples(name)
    values, weights = filled(parts).points()
    expected = float(np.power(np.abs(np.concatenate(parts).astype(np.float64)), power).sum())
    assert float(weights @ np.abs(values.astype(np.float64)) ** power) == pytest.approx(expected, rel=0.02)


def test_the_outermost_values_of_all_samples_are_known() -> None:
    parts = samples("normal")
    values, weights = filled(parts).points()
    ordered = np.sort(np.concatenate(parts))
    order = np.argsort(values)
    np.testing.assert_array_equal(values[order][-500:], ordered[-500:])
    np.testing.assert_array_equal(values[order][:500], ordered[:500])
    assert (weights[order][-500:] == 1).all() and (weights[order][:500] == 1).all()


@pytest.mark.parametrize("width", [11 * 11, 7 * 16, 13 * 9])
def test_no_column_is_passed_over(width: int) -> None:
    image = np.full((4000, 2, width), 0.5, np.float32)
    image[..., 0] = 1.0
    statistic = Sampled()
    statistic.update(image)
    values, weights = statistic.points()
    assert weights[values > 0.75].sum() / weights.sum() == pytest.approx(1 / width, rel=0.01)


def test_counts_make_up_the_number_of_values() -> None:
    parts = samples("normal")
    _, _, counts = filled(parts).bins()
    assert counts.sum() == sum(part.size for part in parts) == filled(parts).count


def test_parts_that_are_merged_or_stored_are_the_whole() -> None:
    parts = samples("heavy tails", 4)
    whole, merged = filled(parts), filled(parts[:2])
    merged.merge(filled(parts[2:]))
    stored = Sampled.from_state(filled(parts[:3]).state())
    stored.update(parts[3])
    for other in (merged, stored):
        for key, value in whole.state().items():
            np.testing.assert_array_equal(other.state()[key], value, err_msg=key)
        np.testing.assert_array_equal(other.points(), whole.points())


def test_a_value_that_is_passed_over_is_still_refused_if_it_is_not_finite() -> None:
    x = np.zeros(LARGE, np.float32)
    x[step_of(LARGE) + 1] = np.nan
    with pytest.raises(DataError, match="1 NaN"):
        Sampled().update(x)


def test_asking_for_bins_or_for_all_values_counts_every_value() -> None:
    assert type(sampled(512)) is Histogram
    assert isinstance(sampled(keep=Memory), Values)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("metric", ["mae", "mse"])
def test_the_percentile_that_is_chosen_is_that_of_all_values(name: str, symmetric: bool, metric: str) -> None:
    parts = samples(name)
    settings = {"candidates": (99.99, 99.999, 99.99999), "metric": metric, "symmetric": symmetric}
    grid = Grid(get_format("int8"), True, False, "float32")
    row = SEARCHES["layerwise_percentile"]
    known, everything = row.observe({**settings, "samples": len(parts)}), Histogram()
    assert isinstance(known, Outlined)
    for part in parts:
        known.update(part)
        everything.update(part)
    found, best = row.find(known, grid, settings), row.find(everything, grid, settings)
    assert found == pytest.approx(best, rel=0, abs=max(map(abs, best)) / 2048)
    ordered = np.sort(np.abs(np.concatenate(parts)))
    assert known.magnitude_quantile(0.9999) == ordered[int(np.ceil(0.9999 * ordered.size)) - 1]  # to the last bit


def test_ends_and_counts_are_merged_and_stored_together() -> None:
    parts = samples("heavy tails", 4)

    def of(chosen: list[np.ndarray]) -> Histogram:
        statistic = outlined(candidates=(99.99,), samples=4)
        for part in chosen:
            statistic.update(part)
        return statistic

    whole, merged = of(parts), of(parts[:2])
    merged.merge(of(parts[2:]))
    stored = Outlined.from_state(of(parts[:3]).state())
    stored.update(parts[3])
    for other in (merged, stored):
        for key, value in whole.state().items():
            np.testing.assert_array_equal(other.state()[key], value, err_msg=key)
        assert other.quantile(0.9999) == whole.quantile(0.9999)


def test_every_value_is_counted_where_too_many_are_asked_for_or_nobody_knows_how_many_there_are() -> None:
    for settings in ({"samples": None}, {"samples": 3, "candidates": (90.0,)}, {"samples": 3, "keep": Memory}):
        assert not isinstance(outlined(**{"candidates": (99.99,), **settings}), Outlined)


@pytest.mark.parametrize("count", [100, 511, 512, 513, 2000])
def test_what_stands_for_itself_is_taken_out_of_the_counts_once(count: int) -> None:
    """All values of a sign that has few of them; of others the largest 512, here several in a bin."""
    values = np.random.default_rng(count).permutation(np.geomspace(0.01, 1e4, count)).astype(np.float32)
    values[values > 3e3] = np.linspace(5000, 5001, int((values > 3e3).sum()), dtype=np.float32)
    statistic = Sampled()
    statistic.update(np.concatenate([values, -values[: count // 2], np.zeros(9, np.float32)]))
    statistic._settle()
    shares = (count, 9), (count // 2, 0)  # of each sign, and zeros, which count as positive
    for counts, tail, (size, zeros) in zip(statistic._counts, statistic._tails, shares, strict=True):
        inside = statistic._without(counts, tail)
        assert (inside >= 0).all() and (inside <= counts).all()
        assert inside.sum() == max(size - 512, 0) + zeros
    again = Sampled()
    again.merge(statistic)
    assert not again._thinned
