"""Decisions of observers at their boundaries, each with a value that follows from its definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quark.config.tensor import TensorSpec
from quark.errors import ConfigError, DataError
from quark.observers import entropy, mse, non_overflow
from quark.observers.histogram import BLOCK, TAIL, Histogram
from quark.observers.outlined import Outlined, outlined
from quark.observers.percentile import search
from quark.observers.registry import SEARCHES
from quark.observers.tails import Tail, Tails, quantiles


@pytest.mark.parametrize(
    ("percentile", "samples", "kind"),
    [
        (98.4375, 1, Tails),  # a 64th of one sample is the most that both ends keep
        (98.4, 1, Histogram),
        (99.21875, 2, Tails),
        (99.2, 2, Histogram),
        (99.9, None, Histogram),  # nobody knows how many samples there will be
    ],
)
def test_what_a_percentile_counts(percentile: float, samples: int | None, kind: type) -> None:
    assert type(quantiles(percentile=percentile, samples=samples)) is kind
    several = outlined(candidates=(99.99, percentile, 99.9), samples=samples)  # the furthest in decides
    assert type(several) is (Outlined if kind is Tails else Histogram)
    if isinstance(several, Outlined):
        assert several.ends.outside == 1 - percentile / 100
    assert type(outlined(bins=512, candidates=(percentile,), samples=samples)) is Histogram
    assert isinstance(quantiles(bins=512, percentile=percentile, samples=samples), Histogram)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("front", [1, 2, 30])
def test_the_largest_of_a_tail_are_those_of_a_sort(sign: int, size: int, front: int) -> None:
    """Where few blocks hold all of them, the first one too, and where there are fewer values than are kept."""
    rng = np.random.default_rng(4)
    for count in (1, 2, 16 * BLOCK):
        flat = rng.standard_normal(count).astype(np.float32)
        flat[:front] += np.float32(10 * sign)
        parts = np.array_split(flat, range(BLOCK, count, BLOCK))
        tail = Tail()
        tail.add(flat, sign, np.array([(sign * part).max() for part in parts], np.float32), size)
        assert np.array_equal(tail.values, np.sort(sign * flat)[::-1][:size])


@pytest.mark.parametrize("side", [1, -1])
def test_quantiles_of_magnitudes_are_those_of_the_longer_side(side: int) -> None:
    x = np.linspace(-1, 100, 20001).astype(np.float32) * side
    found = Histogram()
    found.update(x)
    for share in (0.3, 0.5, 0.9):
        assert found.magnitude_quantile(share) == pytest.approx(np.quantile(np.abs(x), share), rel=0.05)


def test_the_outermost_are_not_zero() -> None:
    found: Any = SimpleNamespace(ends=SimpleNamespace(outermost=[np.array([3, 1e-30, 0, 0]), np.array([0.5, 0.25])]))
    assert [one.tolist() for one in Outlined._outermost(found)] == [[3, 1e-30], [0.5, 0.25]]


@pytest.mark.parametrize("format", ["int8", "uint8", "int4"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_of_powers_of_two_that_do_not_overflow_hold_both_ends(format: str, symmetric: bool) -> None:
    grid = TensorSpec(format, symmetric, scale_rule="power_of_two").grid
    rng = np.random.default_rng(8)
    lo, hi = -np.exp2(rng.uniform(-6, 6, 500)), np.exp2(rng.uniform(-6, 6, 500))
    found = non_overflow.fitted(lo, hi, grid)
    nearest = grid.parameters(lo, hi)
    scale, zero = (np.asarray(one, np.float64) for one in grid.parameters(*found))
    assert np.isin(scale / np.asarray(nearest[0], np.float64), (1, 2)).all()
    kept = (found[0] == lo) & (found[1] == hi)
    assert kept.any() and not kept.all()
    bottom, top = ((end - zero) * scale for end in (grid.format.min, grid.format.max))
    assert (bottom[kept] <= lo[kept]).all() and (hi[kept] <= top[kept]).all()


@pytest.mark.parametrize("percentile", [-0.1, 0, 0.5, 1, 100, 100.1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_percentiles_are_those_of_a_hundred(percentile: float, symmetric: bool) -> None:
    found = Histogram()
    found.update(np.arange(100, dtype=np.float32))
    grid: Any = None
    if not 0 <= percentile <= 100:
        with pytest.raises(ConfigError, match="between 0 and 100"):
            search(found, grid, percentile=percentile, symmetric=symmetric)
        return
    low, high = search(found, grid, percentile=percentile, symmetric=symmetric)
    assert 0 <= low <= high <= 99


@pytest.mark.parametrize(("method", "symmetric"), [
    ("minmax", False), ("moving_minmax", False), ("entropy", False), ("non_overflow", True),
    ("moving_non_overflow", True), ("percentile", True), ("layerwise_percentile", True), ("mse_most_common", True),
])  # fmt: skip
def test_whether_both_sides_are_looked_at_alike_where_nobody_says(method: str, symmetric: bool) -> None:
    """Values of which the lower side is shorter, and rarer: the two answers are not the same."""
    values = np.concatenate([np.linspace(-1, 0, 400), np.geomspace(0.01, 3.9, 3000)]).astype(np.float32)
    grid = TensorSpec("uint8", False, scale_rule="power_of_two" if "most_common" in method else "float32").grid
    row, found = SEARCHES[method], {}
    plain = {"percentile": {"percentile": 90.0}, "layerwise_percentile": {"candidates": (90.0,)}}.get(method, {})
    for settings in (plain, {**plain, "symmetric": True}, {**plain, "symmetric": False}):
        statistic = row.observe({"grid": grid, **settings})
        statistic.update(values)
        found[settings.get("symmetric")] = row.find(statistic, grid, settings)
    assert found[None] == found[symmetric] != found[not symmetric]


@pytest.mark.parametrize("place", [0, 5, 3 * BLOCK - 1])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_one_value_of_several_blocks_that_is_no_number_is_refused(place: int, value: float) -> None:
    x = np.linspace(-1, 1, 3 * BLOCK, dtype=np.float32)
    x[place] = value
    for statistic in (Tails(0.001, 1), Histogram(), Outlined(outside=0.001)):
        with pytest.raises(DataError, match=r"1 NaN and 0 infinite|0 NaN and 1 infinite"):
            statistic.update(x)
            statistic.quantile(0.5)


@pytest.mark.parametrize("turned", [False, True])
def test_magnitudes_are_known_as_far_as_both_ends_are(turned: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of values at one end some below 6 are gone: what the other end has below that may not be the largest."""
    ends = [np.array([3, 2], np.float32), np.array([7, 6], np.float32)][:: -1 if turned else 1]
    gone = np.array([2, 6][:: -1 if turned else 1])
    found = Tails.from_state({"outside": 0.1, "samples": 1, "count": 100, "each": 100, "gone": gone,
                              "high": ends[0], "low": ends[1]})  # fmt: skip
    assert (found.magnitude_quantile(1.0), found.magnitude_quantile(0.99)) == (7, 6) and not caplog.records
    assert found.magnitude_quantile(0.98) == 6 and "samples grew" in caplog.text


@pytest.mark.parametrize("largest", [2.0**-20, 0.3, 1.0, 1.5, 2.0, 100.0, 3e30])
def test_equal_bins_of_magnitudes_nest_those_of_the_histogram(largest: float) -> None:
    """Their width is a power of two, so many octaves of the histogram below the largest value's own."""
    statistic = Histogram()
    values = np.linspace(-largest, largest / 2, 501, dtype=np.float32)
    statistic.update(values)
    counts, width = entropy.magnitudes(statistic)
    assert np.frexp(width)[0] == 0.5 and counts.sum() == np.count_nonzero(values)
    assert statistic.per_octave < counts.size <= 2 * statistic.per_octave and counts[-1] > 0
    assert (counts.size - 1) * width <= np.float32(largest) < counts.size * width


@pytest.mark.parametrize("format", ["int2", "int3"])
def test_scales_of_powers_of_two_go_down_as_far_as_the_error_does(format: str) -> None:
    """Of every octave five times as many values as of the one above: the best scale is far below that of the range."""
    rng, grid = np.random.default_rng(2), TensorSpec(format, scale_rule="power_of_two").grid
    parts = [rng.uniform(2.0 ** -(k + 1), 2.0**-k, 5**k) * rng.choice([-1, 1], 5**k) for k in range(7)]
    row = np.concatenate(parts).astype(np.float32)
    scale = float(grid.parameters(*(one[0] for one in mse.search_rows(row[None], grid)))[0])
    wide, low, high = row.astype(np.float64), grid.format.min, grid.format.max
    tried = {2.0**k: np.square(wide - 2.0**k * np.clip(np.rint(wide / 2.0**k), low, high)).sum() for k in range(-9, 3)}
    assert scale == min(tried, key=tried.__getitem__) < float(grid.parameters(wide.min(), wide.max())[0]) / 8
    beside = np.stack([row, np.sign(row) * (1 - np.float32(2.0**-7)), row])  # one whose best is the first looked at
    ends = mse.search_rows(beside, grid)
    assert [float(one) for one in grid.parameters(*ends)[0]][::2] == [scale, scale]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_tail_is_that_of_a_sort_whatever_came_before(sign: int) -> None:
    """Values that come later replace the last ones; the first value of all counts as any other."""
    rng = np.random.default_rng(3)
    values = rng.permutation(np.geomspace(1, 1e6, 2 * TAIL)).astype(np.float32) * sign
    values[0] = 2e6 * sign
    statistic = Histogram()
    for part in (values[:TAIL], values[TAIL:]):
        statistic.update(np.concatenate([part, rng.uniform(-0.5, 0.5, 5000).astype(np.float32)]))
    statistic._settle()
    found = statistic._outermost()[0 if sign > 0 else 1]
    assert found.tolist() == np.sort(np.abs(values))[::-1][:TAIL].tolist()
    assert max(-statistic.lo, statistic.hi) == 2e6


@pytest.mark.parametrize("small", [1e-40, 1e-44])
def test_rows_of_numbers_below_the_normal_ones_keep_their_range(small: float) -> None:
    """They are judged in a unit that float32 has: none of their errors becomes infinite, and none is lost."""
    rows = np.array([[small, -small, small / 2], [1.0, -0.5, 0.25]], np.float32)
    low, high = mse.search_rows(rows, TensorSpec("int8").grid)
    assert np.isfinite([low, high]).all() and (high >= rows.max(-1) / 2).all() and (high <= rows.max(-1) * 2).all()


def test_of_zeros_there_are_no_magnitudes() -> None:
    statistic = Histogram()
    statistic.update(np.zeros(100, np.float32))
    counts, width = entropy.magnitudes(statistic)
    assert (counts.size, width) == (0, 0.0)


def test_every_number_of_bins_is_judged_however_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    statistic, grid = Histogram(), TensorSpec("uint8").grid
    statistic.update(np.random.default_rng(0).standard_normal(4000).astype(np.float32))
    counts, width = entropy.magnitudes(statistic)
    sizes = [200, 300, 512, 700]
    whole = entropy.Divergences(statistic, grid, counts, width, True).at(sizes)
    monkeypatch.setattr(entropy, "AT_ONCE", 1)
    assert entropy.Divergences(statistic, grid, counts, width, True).at(sizes) == whole and list(whole) == sizes


@pytest.mark.parametrize(("mine", "its"), [(5, 3), (3, 5)])
def test_what_is_gone_of_either_part_is_gone_of_the_whole(mine: float, its: float) -> None:
    parts = Tails(0.25, 2), Tails(0.25, 2)
    for part, gone in zip(parts, (mine, its), strict=True):
        part._high.gone, part._low.gone = np.float32(gone), np.float32(gone + 1)
    parts[0].merge(parts[1])
    assert (parts[0]._high.gone, parts[0]._low.gone) == (5, 6)


@pytest.mark.parametrize("sign", [1, -1])
def test_ranges_of_values_of_one_sign_end_at_zero(sign: int) -> None:
    """Of rows that have scales of their own, and of the values of a tensor."""
    rows = sign * np.random.default_rng(1).uniform(0.1, 0.9, (3, 50)).astype(np.float32)
    grid = TensorSpec("uint8", False).grid
    low, high = mse.search_rows(rows, grid)
    assert ((low if sign > 0 else high) == 0).all() and ((high if sign > 0 else -low) > 0.5).all()
    statistic = SEARCHES["mse"].observe({})
    statistic.update(rows.reshape(-1))
    ends = SEARCHES["mse"].find(statistic, grid, {})
    assert ends[0 if sign > 0 else 1] == 0 and abs(ends[1 if sign > 0 else 0]) < 1


def test_the_zero_point_of_powers_of_two_is_the_middle_where_that_is_asked_for() -> None:
    """Of rows, and of the values of a tensor."""
    rows = np.random.default_rng(1).uniform(0, 0.9, (3, 50)).astype(np.float32)
    grid, method = TensorSpec("uint8", False, scale_rule="power_of_two").grid, SEARCHES["mse"]
    statistic = method.observe({})
    statistic.update(rows)
    for symmetric in (True, False):
        low, _ = method.of_rows(rows, grid, {"symmetric": symmetric})
        assert (low == (-1 if symmetric else 0)).all()
        assert method.find(statistic, grid, {"symmetric": symmetric})[0] == (-1 if symmetric else 0)


def test_ranges_of_symmetric_codes_are_symmetric() -> None:
    rows = np.random.default_rng(2).exponential(1, (20, 50)).astype(np.float32)
    low, high = mse.search_rows(rows, TensorSpec("int4").grid)
    np.testing.assert_allclose(low, -high, rtol=1e-6)


@pytest.mark.parametrize("value", [-3.0, 0.0, 0.5])
@pytest.mark.parametrize("times", [((1 << 16) - 1, 1), (1 << 16,), (1, 1 << 17)])
def test_counts_pass_the_largest_32_bit_number(value: float, times: tuple[int, ...]) -> None:
    statistic, values = Histogram(), np.full(1 << 15, value, np.float32)
    statistic.update(values)
    for more in times:  # as of so many samples
        statistic._count(values, value < 0, more)
    statistic.update(np.full(1 << 15, 4096, np.float32))  # the bins move
    wanted = [sum(times) + 1 << 15, 1 << 15]
    merged, other = Histogram.from_state(statistic.state()), Histogram.from_state(statistic.state())
    merged.merge(other)
    for seen, parts in ((statistic, 1), (merged, 2)):
        assert [seen.bins()[2].tolist(), seen.magnitude_bins()[2].tolist()] == [[parts * n for n in wanted]] * 2
        assert sorted(seen.points(whole=True)[1]) == sorted(parts * n for n in wanted)
