"""The formulas of the searches against the plainest loops: divergences, fitted scales, units, how much a tail keeps."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from quark.numerics.affine import Grid
from quark.numerics.formats import FORMATS
from quark.observers import entropy, mse
from quark.observers.histogram import Histogram
from quark.observers.mse import Rows
from quark.observers.tails import FEWEST, Tails


def divergence(counts: np.ndarray, size: int, starts: list[int], both: bool) -> float:
    """KL(P || Q), and with ``both`` KL(Q || P) too: bins that share a code have the mean of those that hold values.

    The last bin holds what lies beyond it as well, in P and not in Q.
    """
    p = counts[:size].astype(np.float64)
    p[-1] += counts[size:].sum()
    if not counts[:size].any():
        return math.inf
    q = np.zeros(size)
    for start, stop in pairwise([*starts, size]):
        held = [k for k in range(start, stop) if p[k] > 0]
        for k in held:
            q[k] = max(counts[start:stop].sum() / len(held), entropy.NEVER)
    p, q = p / p.sum(), q / q.sum()
    held = np.flatnonzero(p)
    found = float((p[held] * np.log(p[held] / q[held])).sum())
    return found + (float((q[held] * np.log(q[held] / p[held])).sum()) if both else 0.0)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_divergences(seed: int, both: bool) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(0, [2, 5, 40, 3][seed % 4], 40).astype(np.float64)
    counts[-1] += 1
    made: Any = entropy.Divergences(None, None, counts, 1.0, both)  # type: ignore[arg-type]
    for size in (1, 2, 7, 20, 39, 40):
        for pieces in (1, 2, 5):
            starts = sorted({0, *random.integers(0, size, pieces).tolist()})
            expected = divergence(counts, size, starts, both)
            assert made._of(size, np.array(starts)) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_magnitudes_lie_in_equal_bins_without_zeros() -> None:
    statistic = Histogram()
    x = np.array([0.0, 0.0, 0.0, 1.0, -1.0, 3.0, 0.5], np.float32)
    statistic.update(x)
    counts, width = entropy.magnitudes(statistic)
    assert width == 4.0 / (2 * statistic.per_octave)
    found = {float(place * width): count for place, count in enumerate(counts) if count}
    assert found == {0.5: 1, 1.0: 2, 3.0: 1}
    empty = Histogram()
    empty.update(np.zeros(5, np.float32))
    assert entropy.magnitudes(empty)[1] == 0.0


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("largest", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("narrow", [True, False])
def test_errors_are_sums_over_all_values(power: int, largest: float, weighted: bool, narrow: bool) -> None:
    random = np.random.default_rng(1)
    x = (random.standard_normal((3, 50)) * largest).astype(np.float32)
    weights = random.integers(1, 5, 50).astype(np.float64) if weighted else None
    grid = Grid(FORMATS["int8"], True, True)
    unit = mse.unit_of((x.min(-1), x.max(-1)))
    assert (unit is None) == (largest == 1.0)
    rows = Rows(x, grid, weights, narrow=narrow, power=power, unit=unit)
    scales = np.array([0.5, 1.0, 3.0])[:, None] * np.abs(x).max(-1) / 127
    factor = np.ones((3, 1)) if unit is None else unit.astype(np.float64)
    for k, scale in enumerate(scales.astype(np.float32)):
        step = scale.astype(np.float64)[:, None]
        off = np.abs(x - step * np.clip(np.rint(x / scale[:, None]), -127 if narrow else -128, 127)) * factor
        expected = (off**power * (1 if weights is None else weights)).sum(-1)
        for found in (rows.error_of(scale, np.zeros(3)), rows.errors_of(scales.astype(np.float32), np.zeros(3))[k]):
            np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("largest", [1.0, 1e-30])
def test_the_fitted_scale_is_that_of_least_squares(largest: float) -> None:
    random = np.random.default_rng(2)
    x = (random.standard_normal((4, 60)) * largest).astype(np.float32)
    x[1] = 0
    x[2] = np.abs(x[2]).min() * 1e-3
    scale = np.array([np.abs(x[0]).max() / 20, largest, largest, np.abs(x[3]).max() / 7], np.float32)
    rows = Rows(x, Grid(FORMATS["int4"], True, True), unit=mse.unit_of((x.min(-1), x.max(-1))))
    found = rows.fitted(scale, np.zeros(4))
    for k in range(4):
        codes = np.clip(np.rint(x[k].astype(np.float64) / float(scale[k])), -8, 7)
        if not codes.any():
            assert found[k] == scale[k]
            continue
        assert found[k] == pytest.approx((codes * x[k]).sum() / (codes**2).sum(), rel=1e-5)


@pytest.mark.parametrize("largest", [0.0, 2.0**-41, 2.0**-40, 2.0**-39, 1.0, 2.0**49, 2.0**50, 2.0**51, 3.0e38])
@pytest.mark.parametrize("side", [1, -1])
def test_rows_are_brought_near_one_where_squares_would_leave_float32(largest: float, side: int) -> None:
    low, high = (np.array([-largest]), np.array([0.0])) if side < 0 else (np.array([0.0]), np.array([largest]))
    found = mse.unit_of((low, high))
    assert (found is None) == (largest == 0 or 2.0**-40 < largest < 2.0**50)
    if found is not None:
        assert found.shape == (1, 1) and 0.25 <= largest * float(found[0, 0]) < 4
        assert math.log2(float(found[0, 0])).is_integer()
    beside = mse.unit_of((np.append(low, -1.0), np.append(high, 2.0)))
    assert (beside is None) == (found is None)


@pytest.mark.parametrize("rule", ["symmetric, narrow", "symmetric", "asymmetric"])
def test_what_codes_express(rule: str) -> None:
    grid = Grid(FORMATS["int8"], rule != "asymmetric", rule.endswith("narrow"))
    zero = np.array([0 if rule != "asymmetric" else 10])
    lo, hi = mse.representable(np.array([0.5], np.float32), zero, grid)
    assert (float(lo[0]), float(hi[0])) == {
        "symmetric, narrow": (-63.5, 63.5),
        "symmetric": (-64.0, 63.5),
        "asymmetric": (-69.0, 58.5),
    }[rule]


@pytest.mark.parametrize(("outside", "samples"), [(0.01, 1), (0.001, 10), (0.0625, 3)])
def test_a_tail_keeps_what_may_be_asked_for(outside: float, samples: int) -> None:
    """Twice what is foreseen: the values beyond the quantile, rounded up, and two more; 512 at least."""
    tails = Tails(outside, samples)
    sizes = [40_001, 9_000, 70_003]
    for k, size in enumerate(sizes, 1):
        tails.update(np.linspace(-1, 1, size, dtype=np.float32))
        seen, largest = sum(sizes[:k]), max(sizes[:k])
        foreseen = 2 * max(samples * largest, seen)
        assert tails._size() == max(math.ceil(outside * foreseen) + 2, 512) and FEWEST == 512
        kept = tails.state()["high"]
        assert kept.size == min(tails._size(), seen) or k > 1


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1500, 2999])
def test_one_value_that_is_not_finite_is_refused_by_every_statistic(spoilt: float, place: int) -> None:
    from quark.errors import DataError

    x = np.linspace(-1, 1, 3000, dtype=np.float32)
    x[place] = spoilt
    for statistic in (Tails(0.01, 1), Histogram()):
        with pytest.raises(DataError, match=r"1 NaN and 0 infinite|0 NaN and 1 infinite"):
            statistic.update(x)


@pytest.mark.parametrize(("percentile", "largest"), [(90.0, 900), (100.0, 1000), (50.0, 500), (99.95, 1000)])
def test_what_lies_within_a_percentile(percentile: float, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from quark.observers import mse_modes

    statistic = Histogram()
    x = np.arange(1, 1001, dtype=np.float32)
    x[::2] *= -1
    statistic.update(x)
    given: list[np.ndarray] = []
    monkeypatch.setattr(mse, "search_points", lambda values, *more: (given.append(np.abs(values)), (0.0, 1.0))[1])
    assert mse_modes.within_percentile(statistic, Grid(FORMATS["int8"]), percentile) == (0.0, 1.0)
    assert given[0].max() == largest and given[0].size == largest


def test_the_best_of_the_percentile_ranges_is_taken_by_every_row() -> None:
    from quark.observers.mse_modes import PERCENTILES, rows_by_percentile

    random = np.random.default_rng(5)
    x = random.standard_t(2, (4, 3000)).astype(np.float32)
    grid = Grid(FORMATS["int8"], True, True)
    lo, hi = rows_by_percentile(x, grid)
    for row, low, high in zip(x, lo, hi, strict=True):
        found = []
        for percentile in PERCENTILES:
            outside = (100 - percentile) / 2
            ends = np.percentile(row, [outside, 100 - outside])
            step = np.float32(max(-min(ends[0], 0), max(ends[1], 0)) / 127)
            error = np.square(row - step * np.clip(np.rint(row / step), -127, 127), dtype=np.float64).sum()
            found.append((error, *ends))
        best = min(found)
        assert (low, high) == pytest.approx(best[1:], rel=1e-6)


def test_steps_are_the_odd_primes_below_a_hundred() -> None:
    from quark.observers.sampled import ENOUGH, PRIMES, step_of

    assert list(PRIMES) == [n for n in range(3, 100) if all(n % k for k in range(2, n))]
    for size in (5 * ENOUGH, 6 * ENOUGH + 1, 48 * ENOUGH, 48 * ENOUGH + 48, 100 * ENOUGH + 7):
        fitting = [prime for prime in PRIMES if prime * 2**16 <= size and size % prime]
        assert step_of(size) == max(fitting, default=1) and math.gcd(step_of(size), size) == 1
