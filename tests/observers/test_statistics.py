"""Statistics against plain NumPy over all data at once; merging and storing change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quark.errors import DataError
from quark.observers import Histogram, MinMax, MovingMinMax, Statistic, histogram, statistics
from quark.observers.histogram import block_extremes, outer_blocks
from quark.observers.outlined import Outlined
from quark.observers.sampled import Sampled
from quark.observers.statistics import FIRST, extremes

STATISTICS = (MinMax, MovingMinMax, Histogram, Sampled)


def batches(seed: int = 0, count: int = 5) -> list[np.ndarray]:
    """Samples of unlike size and spread, some of one sign, one all zero."""
    rng = np.random.default_rng(seed)
    made = [(rng.standard_normal((3, 700 + 37 * k)) * 4.0**k).astype(np.float32) for k in range(count)]
    made[1] = np.abs(made[1])
    return [*made, np.zeros((4, 4), np.float32)]


def filled(kind: type[Statistic], parts: list[np.ndarray]) -> Statistic:
    statistic = kind()
    for part in parts:
        statistic.update(part)
    return statistic


def same(a: Statistic, b: Statistic) -> None:
    first, second = a.state(), b.state()
    assert first.keys() == second.keys()
    for key in first:
        np.testing.assert_allclose(first[key], second[key], rtol=1e-12, err_msg=key)


@pytest.mark.parametrize("kind", STATISTICS)
def test_stored_and_restored_statistics_go_on_alike(kind: type[Statistic]) -> None:
    parts = batches()
    stored = kind.from_state(filled(kind, parts[:2]).state())
    for part in parts[2:]:
        stored.update(part)
    same(stored, filled(kind, parts))


@pytest.mark.parametrize("kind", STATISTICS)
@pytest.mark.parametrize("cut", [0, 1, 3, 6])
def test_merging_parts_gives_the_statistic_of_all_data(kind: type[Statistic], cut: int) -> None:
    parts = batches()
    merged, rest = filled(kind, parts[:cut]), filled(kind, parts[cut:])
    before = rest.state()
    merged.merge(rest)
    same(merged, filled(kind, parts))
    assert all(np.array_equal(before[key], value) for key, value in rest.state().items())


@pytest.mark.parametrize("kind", STATISTICS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1000, 1 << 17])
def test_values_that_are_not_finite_are_refused(kind: type[Statistic], bad: float, size: int) -> None:
    x = np.zeros(size, np.float32)
    x[617] = bad
    with pytest.raises(DataError, match=r"1 NaN and 0 infinite|0 NaN and 1 infinite"):
        kind().update(x)


@pytest.mark.parametrize("kind", STATISTICS)
def test_empty_arrays_count_for_nothing(kind: type[Statistic]) -> None:
    statistic = kind()
    statistic.update(np.empty((0, 3), np.float32))
    assert statistic.count == 0
    if isinstance(statistic, Histogram):
        assert [one.size for one in (*statistic.bins(), *statistic.magnitude_bins())] == [0] * 6
    statistic.update(np.array([1.0, -2.0], np.float32))
    statistic.update(np.empty(0, np.float32))
    assert (statistic.lo, statistic.hi) == (-2.0, 1.0)


def test_moving_average_weighs_the_newest_sample_by_its_constant() -> None:
    rows = np.random.default_rng(1).uniform(1, 9, (6, 2))
    c = 0.3
    statistic = MovingMinMax(c)
    for lo, hi in rows:
        statistic.update(np.array([-lo, hi]))
    weights = (1 - c) ** np.arange(5, -1, -1)
    np.testing.assert_allclose(statistic.lo, -(weights @ rows[:, 0]) / weights.sum())
    np.testing.assert_allclose(statistic.hi, weights @ rows[:, 1] / weights.sum())


@pytest.mark.parametrize(("constant", "expected"), [(0.0, 2.0), (1.0, 3.0)])
def test_the_ends_of_the_constant_are_the_mean_and_the_last_sample(constant: float, expected: float) -> None:
    statistic = MovingMinMax(constant)
    for hi in (1.0, 2.0, 3.0):
        statistic.update(np.array([0.0, hi]))
    assert statistic.hi == pytest.approx(expected)


def test_every_value_is_counted_once_in_a_bin_that_holds_it() -> None:
    x = np.concatenate([part.ravel() for part in batches()])
    left, right, counts = filled(Histogram, batches()).bins()
    assert counts.sum() == x.size
    assert (left[1:] >= right[:-1]).all()
    ordered = np.sort(x.astype(np.float64))
    starts = np.concatenate([[0], np.cumsum(counts)])
    for lo, hi, start, stop in zip(left, right, starts[:-1], starts[1:], strict=True):
        assert lo <= ordered[start] and ordered[stop - 1] <= hi


def test_bins_are_as_narrow_as_promised() -> None:
    left, right, _ = filled(Histogram, batches()).bins()
    outer = np.maximum(np.abs(left), np.abs(right))
    large = outer > outer.max() / 2**15
    assert ((right - left)[large] <= np.minimum(np.abs(left), np.abs(right))[large] / 2048 * 1.0001).all()


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.3, 0.5, 0.9, 0.999, 0.99999, 1.0])
@pytest.mark.parametrize("seed", [0, 7])
def test_quantiles_are_those_of_the_sorted_values(share: float, seed: int) -> None:
    x = np.sort(np.concatenate([part.ravel() for part in batches(seed)]).astype(np.float64))
    statistic = filled(Histogram, batches(seed))
    rank = min(max(int(np.ceil(share * x.size - 1e-6)), 1), x.size) - 1
    assert statistic.quantile(share) == pytest.approx(x[rank], rel=1 / 2048, abs=np.abs(x).max() / 2**15)
    assert statistic.magnitude_quantile(share) == pytest.approx(
        np.sort(np.abs(x))[rank], rel=1 / 2048, abs=np.abs(x).max() / 2**15
    )


def test_the_512_largest_magnitudes_are_exact() -> None:
    parts = batches(3)
    x = np.concatenate([part.ravel() for part in parts])
    statistic = filled(Histogram, parts)
    magnitudes = np.sort(np.abs(x))
    for outside in (0, 1, 100, 511):
        assert statistic.magnitude_quantile(1 - outside / x.size) == magnitudes[x.size - 1 - outside]
        assert statistic.quantile(1 - outside / x.size) == np.sort(x)[x.size - 1 - outside]
        assert statistic.quantile((1 + outside) / x.size) == np.sort(x)[outside]


def test_tails_survive_many_equal_values() -> None:
    statistic = Histogram()
    for _ in range(3):
        statistic.update(np.repeat(np.float32([6.0, 0.0, 1.5]), 4000))
    statistic.update(np.float32([7.0, -3.0]))
    assert statistic.quantile(1.0) == 7.0
    assert statistic.quantile(1 - 1 / statistic.count) == 6.0
    assert statistic.quantile(0.0) == -3.0


def test_the_order_of_samples_does_not_matter() -> None:
    same(filled(Histogram, batches()), filled(Histogram, batches()[::-1]))


@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1e20, 1e38])
def test_extreme_magnitudes_are_counted(scale: float) -> None:
    x = (np.random.default_rng(2).uniform(-1, 1, 5000) * scale).astype(np.float32)
    statistic = filled(Histogram, [np.zeros(5, np.float32), x])
    assert statistic.count == 5005
    assert (statistic.lo, statistic.hi) == (x.min(), x.max())
    assert statistic.quantile(0.9) == pytest.approx(np.quantile(x, 0.9), rel=0.02)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_float_has_a_bin(sign: int) -> None:
    largest = np.finfo(np.float32).max
    for count in (5, 1 << 15):
        left, right, counts = filled(Histogram, [np.full(count, sign * largest, np.float32)]).bins()
        assert np.isfinite([left[counts > 0], right[counts > 0]]).all() and counts.sum() == count
        assert max(np.abs(left).max(), np.abs(right).max()) == largest


def test_the_middle_of_few_samples_is_read_from_their_histogram() -> None:
    """Both ends keep what is asked of large ones; of these everything is counted."""
    statistic, x = Outlined(outside=0.001), np.random.default_rng(0).standard_normal(9000).astype(np.float32)
    statistic.update(x)
    assert statistic.quantile(0.5) == pytest.approx(np.median(x), abs=1e-3)
    assert statistic.magnitude_quantile(0.5) == pytest.approx(np.median(np.abs(x)), rel=1e-3)


def test_minus_zero_and_other_float_types() -> None:
    statistic = filled(Histogram, [np.float32([0.0, -0.0, 2.0]), np.float16([1.0]), np.float64([3.0])])
    assert statistic.bins()[2].sum() == 5
    assert (statistic.lo, statistic.hi) == (0.0, 3.0)
    with pytest.raises(DataError, match="1 infinite"):
        Histogram().update(np.float64([1e300]))


def test_size_is_bounded() -> None:
    statistic = Histogram()
    for k in range(30):
        statistic.update((np.random.default_rng(k).standard_normal(2000) * 3.0**k).astype(np.float32))
    assert sum(np.asarray(array).nbytes for array in statistic.state().values()) < 2**20


def test_points_stand_for_the_values() -> None:
    x = np.random.default_rng(5).standard_normal(200_000).astype(np.float32)
    values, weights = filled(Histogram, [x]).points()
    assert weights.sum() == x.size and values.size < 12_000
    assert np.average(values, weights=weights) == pytest.approx(x.mean(), abs=1e-3)
    assert np.average(values.astype(float) ** 2, weights=weights) == pytest.approx(np.mean(x.astype(float) ** 2), 1e-3)


def test_points_keep_zero_apart() -> None:
    x = np.maximum(np.random.default_rng(5).standard_normal(10_000), 0).astype(np.float32)
    values, weights = filled(Histogram, [x]).points()
    zeros = np.count_nonzero(x == 0)
    assert zeros <= weights[values == 0].sum() <= zeros + 5, "a few values lie below 2^-15 of the largest"


def test_points_do_not_lie_on_the_grid_of_a_power_of_two() -> None:
    x = np.random.default_rng(5).uniform(-1, 1, 100_000).astype(np.float32)
    values, weights = filled(Histogram, [x]).points()
    for step in 2.0 ** np.arange(-14, -10):
        off = values - np.rint(values / step) * step
        assert np.average(off**2, weights=weights) == pytest.approx(step**2 / 12, rel=0.2)


def test_linear_bins_for_pictures() -> None:
    x = np.random.default_rng(5).uniform(-1, 3, 50_000).astype(np.float32)
    counts, edges = filled(Histogram, [x]).linear(8)
    expected, _ = np.histogram(x, edges)
    assert counts.sum() == x.size and np.abs(counts - expected).max() < 100
    assert filled(Histogram, [np.full(4, 2.5, np.float32)]).linear(4)[0].sum() == 4
    assert Histogram().linear(4)[0].sum() == 0


def large_arrays() -> list[np.ndarray]:
    """Feature maps whose spread differs from row to row and from channel to channel, larger than one piece."""
    rng = np.random.default_rng(4)
    spread = np.linspace(0.2, 2, 56)[:, None] * np.exp(rng.standard_normal((96, 1, 1)))
    return [(rng.standard_normal((96, 56, 56)) * spread).astype(np.float32) for _ in range(4)]


def test_large_arrays_are_counted_like_small_ones() -> None:
    arrays = large_arrays()
    pieces = [piece for array in arrays for piece in np.array_split(array.ravel(), 7)]
    whole, parts = filled(Histogram, arrays), filled(Histogram, pieces[::-1])
    same(whole, parts)
    every = np.sort(np.concatenate(pieces))
    for share in (0.001, 0.01, 0.5, 0.99, 0.999):
        assert whole.quantile(share) == pytest.approx(every[int(share * every.size)], rel=1e-3, abs=1e-3), share


@pytest.mark.parametrize("values", [np.full(7, 2.5), np.linspace(-3, 5, 1000)], ids=["constant", "spread"])
def test_pictures_have_equal_bins_over_the_range(values: np.ndarray) -> None:
    """A constant gets a range of width one around it, as np.histogram gives it; other data their own."""
    seen = Histogram()
    seen.update(values.astype(np.float32))
    counts, edges = seen.linear(8)
    wanted = np.histogram(values.astype(np.float32), 8)
    np.testing.assert_allclose(edges, wanted[1], rtol=1e-6)
    assert counts.sum() == len(values) and np.abs(counts - wanted[0]).max() <= 2  # a point at an edge may change sides
    empty_counts, empty_edges = Histogram().linear(4)
    assert not empty_counts.any() and empty_edges.tolist() == [0, 0.25, 0.5, 0.75, 1]


def from_zero(size: int, **others: float) -> np.ndarray:
    """Results of a Relu; ``others``: what stands at the second place, in the middle and at the last."""
    x = np.maximum(np.random.default_rng(size).standard_normal(size), 0).astype(np.float32)
    x[0] = 0
    for place, value in others.items():
        x[{"second": 1, "middle": size // 2, "last": -1}[place]] = value
    return x


ODD_ONES = [
    {},
    *({place: value} for place in ("second", "middle", "last") for value in (-0.0, -1e-45, -3.0, 1e-45, 9.0)),
]


@pytest.mark.parametrize("size", [2, FIRST - 1, FIRST + 1, 3 * FIRST + 7, 1 << 18])
@pytest.mark.parametrize("others", ODD_ONES, ids=str)
def test_one_pass_finds_what_two_find(size: int, others: dict[str, float]) -> None:
    x = from_zero(size, **others)
    for values in (x, x.reshape(2, -1) if size % 2 == 0 else x, x[::-1], x + np.float32(0.5), np.zeros_like(x)):
        assert extremes(values) == (min(values.ravel().tolist()), max(values.ravel().tolist()))
    lowest, highest = outer_blocks(x)
    exact = block_extremes(x)
    assert highest.tobytes() == exact[1].tobytes() and lowest.min() == exact[0].min()
    assert len(lowest) == len(highest) or (lowest == 0).all()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["second", "middle", "last"])
@pytest.mark.parametrize("make", [MinMax, MovingMinMax, Histogram, Sampled])
def test_values_that_are_not_finite_are_found_behind_a_zero(make: Any, place: str, value: float) -> None:
    with pytest.raises(DataError, match="1 NaN" if np.isnan(value) else "1 infinite"):
        make().update(from_zero(1 << 18, **{place: value}))


@pytest.mark.parametrize("make", [Histogram, Sampled])
def test_one_pass_leaves_the_state_of_two(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [from_zero(1 << 18, **others) * np.float32(1 + place) for place, others in enumerate(ODD_ONES)]

    def state() -> dict[str, bytes]:
        found = make()
        for sample in samples:
            found.update(sample)
        return {name: array.tobytes() for name, array in found.state().items()}

    expected = state()
    for module in (statistics, histogram):
        monkeypatch.setattr(module, "patterns_from_zero", lambda x: None)
    assert state() == expected
