"""Searches and statistics against loops that know one row, one value or one block at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from quark.numerics.affine import Grid
from quark.numerics.formats import FORMATS
from quark.observers import Histogram, Memory, Values, entropy, mse, tails
from quark.observers.histogram import BLOCK
from quark.observers.outlined import Outlined
from quark.observers.sampled import ENOUGH, step_of
from quark.observers.tails import Tails

Pair = tuple[float, float]
GRIDS = {
    "int8 symmetric": Grid(FORMATS["int8"], True),
    "int4 narrow": Grid(FORMATS["int4"], True, True),
    "int4": Grid(FORMATS["int4"], False),
    "uint8": Grid(FORMATS["uint8"], False),
    "uint4": Grid(FORMATS["uint4"], False),
}


class Loop:
    """The search of least squared error for one row, as the module's head describes it."""

    def __init__(self, x: np.ndarray, grid: Grid) -> None:
        self.x, self.grid = x.astype(float), grid
        self.data = min(self.x.min(), 0.0), max(self.x.max(), 0.0)

    def parameters(self, span: Pair) -> tuple[float, int]:
        scale, zero = self.grid.parameters(np.array([span[0]]), np.array([span[1]]))
        return float(scale[0]), int(zero[0])

    def rounded(self, scale: float, zero: int) -> np.ndarray:
        lowest = self.grid.format.min + (self.grid.narrow and self.grid.symmetric)
        codes = np.rint(self.x.astype(np.float32) / np.float32(scale)) + zero
        return (np.clip(codes, lowest, self.grid.format.max) - zero) * scale

    def error_of(self, scale: float, zero: int) -> float:
        return float(((self.x - self.rounded(scale, zero)) ** 2).sum())

    def within(self, span: Pair) -> Pair:
        return max(span[0], self.data[0]), min(span[1], self.data[1])

    def error(self, span: Pair) -> float:
        return self.error_of(*self.parameters(self.within(span)))

    def moved(self, span: Pair, factors: list[float], lower: bool, upper: bool, each: bool) -> Pair:
        """The best of a span and of its multiples: of the span (the first that wins), or ``each`` of the best yet."""
        best, least = span, self.error(span)
        for factor in factors:
            base = best if each else span
            other = (base[0] * factor if lower else base[0], base[1] * factor if upper else base[1])
            found = self.error(other)
            best, least = (other, found) if found < least else (best, least)
            if not each and found > 4 * least:
                break
        return best

    def range(self) -> Pair:
        coarse, fine = [2 ** (-k / 8) for k in range(1, 161)], [2 ** (s / k) for k in (16, 32, 64) for s in (1, -1)]
        if self.grid.symmetric:
            most = max(-self.data[0], self.data[1])
            span = self.moved((-most, most), coarse, True, True, False)
            return self.within(self.moved(span, fine, True, True, True))
        sides = [side for side, bound in (((False, True), self.data[1]), ((True, False), self.data[0])) if bound]
        span = self.data
        for turn in range(len(sides) + 1):
            for lower, upper in sides:
                span = self.moved(span, fine if turn else coarse, lower, upper, turn > 0)
        return self.within(span)

    def least(self) -> float:
        """The error after polishing."""
        start, zero_point = self.parameters(self.range())
        found = [self.error_of(start, zero_point)]
        for shift in (0,) if self.grid.symmetric else (0, 1, -1, 2, -2):
            zero = int(np.clip(zero_point + shift, self.grid.format.min, self.grid.format.max))
            near = [start] + [float(np.float32(start) * np.float32(1 + k / 1024)) for k in range(-16, 17)]
            best = min(near, key=lambda one: (self.error_of(one, zero), near.index(one)))
            for _ in range(4):
                y = self.rounded(best, zero)
                product = float((self.x * y).sum())
                other = float(np.float32(best * product / (y * y).sum())) if product > 0 else best
                best = other if self.error_of(other, zero) < self.error_of(best, zero) else best
            found.append(self.error_of(best, zero))
        return min(found)

    def least_of_powers(self) -> float:
        """The error under the best power of two: of five around the full range, and finer ones while those are best."""
        most = max(-self.data[0], self.data[1])
        scale, zero = self.parameters((-most, most) if self.grid.centred else self.data)
        zero = self.grid.format.middle if self.grid.centred else zero
        found = [self.error_of(scale * factor, zero) for factor in (2, 1, 0.5, 0.25, 0.125)]
        while found[-1] < min(found[:-1]):
            scale /= 2
            found.append(self.error_of(scale * 0.125, zero))
        return min(found)


def drawn(seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    moves = [lambda x: x, np.abs, lambda x: -np.abs(x), lambda x: x + 2, lambda x: x**3, lambda x: np.maximum(x, -0.3)]
    return np.stack([move(draw.standard_normal(40)) for move in moves for _ in range(3)]).astype(np.float32)


@pytest.mark.parametrize("name", GRIDS)
def test_rows_lose_what_the_loop_loses(name: str) -> None:
    grid, rows = GRIDS[name], drawn(len(name))
    lo, hi = mse.search_rows(rows, grid)
    for row, *span in zip(rows, lo, hi, strict=True):
        loop = Loop(row, grid)
        assert loop.error_of(*loop.parameters((span[0], span[1]))) == pytest.approx(loop.least(), rel=2e-5)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
def test_values_with_weights_are_so_many_values(name: str, shift: float) -> None:
    draw = np.random.default_rng(5)
    values = (draw.standard_normal(30) + shift).astype(np.float32)
    weights = draw.integers(1, 6, 30)
    found = mse.search_points(values, weights.astype(float), GRIDS[name])
    loop = Loop(np.repeat(values, weights), GRIDS[name])
    assert found == pytest.approx(mse.search_points(np.repeat(values, weights), np.ones(weights.sum()), GRIDS[name]))
    assert loop.error(found) <= 1.2 * loop.error(loop.data)


@pytest.mark.parametrize("outlier", [1.0, 500.0])
@pytest.mark.parametrize("name", GRIDS)
def test_rows_under_powers_of_two_lose_what_the_loop_loses(name: str, outlier: float) -> None:
    grid, rows = replace(GRIDS[name], scale_rule="power_of_two"), drawn(len(name) + 9)
    rows[:, 0] *= np.float32(outlier)
    lo, hi = mse.search_rows(rows, grid)
    for row, *span in zip(rows, lo, hi, strict=True):
        loop = Loop(row, grid)
        assert loop.error_of(*loop.parameters((span[0], span[1]))) == pytest.approx(loop.least_of_powers(), rel=2e-5)


@pytest.mark.parametrize("name", GRIDS)
def test_rows_are_searched_as_if_they_were_alone(name: str) -> None:
    """One whose best range is near the full one ends no search of another, whose best one is far below."""
    draw = np.random.default_rng(3)
    rows = np.stack([draw.uniform(-1, 1, 4000), draw.standard_normal(4000), draw.standard_normal(4000)])
    rows[1, 0], rows[2, 7] = 40, -300
    rows = rows.astype(np.float32)
    together = np.array(mse.search_rows(rows, GRIDS[name])).T
    alone = [np.array(mse.search_rows(row[None], GRIDS[name]))[:, 0] for row in rows]
    np.testing.assert_allclose(together, alone, rtol=1e-6)


# ---- thresholds of least divergence ----------------------------------------------------------------------------------


@pytest.mark.parametrize("levels, most, best", [
    (128, 4000, 700), (128, 4000, 4000), (128, 4000, 128), (128, 2048, 131), (128, 129, 129), (16, 300, 90),
])  # fmt: skip
def test_thresholds_go_by_eighths_of_octaves_and_then_closer(
    levels: int, most: int, best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which numbers of bins are tried, the larger of equally good ones first."""
    asked: list[int] = []

    def at(self: entropy.Divergences, sizes: Sequence[int]) -> dict[int, float]:
        asked.extend(sizes)
        return {size: float(abs(size - best) // 4) for size in sizes}

    monkeypatch.setattr(entropy.Divergences, "at", at)
    monkeypatch.setattr(entropy, "magnitudes", lambda statistic: (np.ones(most), 2.0))
    monkeypatch.setattr(entropy, "clipped", lambda statistic, threshold: threshold / 2)
    monkeypatch.setattr(entropy, "_fair", lambda statistic, grid, ranges: ranges)
    found: list[float] = entropy._least_divergence(Histogram(), GRIDS["uint8"], levels, False)  # type: ignore[assignment]
    expected = [most]
    for k in range(1, 1000):
        size = round(most / 2 ** (k / 8))
        if most / 2 ** (k / 8) < levels:
            break
        expected += [size] if size != expected[-1] else []
    expected += [levels] if expected[-1] != levels else []
    tried = list(expected)
    for step in (16, 32, 64):
        least = min(tried, key=lambda size: abs(size - best) // 4)
        for size in (round(least * 2 ** (1 / step)), round(least / 2 ** (1 / step))):
            tried += [size] if levels <= size <= most and size not in tried else []
    assert asked == tried
    assert found == sorted(tried, key=lambda size: abs(size - best) // 4)


def test_few_bins_have_no_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    statistic = Histogram()
    statistic.update(np.array([-0.5, 3.0], np.float32))
    for count, width, whole in ((128, 2.0, True), (127, 2.0, True), (129, 2.0, False), (500, 0.0, True)):
        bins = np.ones(count), width
        monkeypatch.setattr(entropy, "magnitudes", lambda _, bins=bins: bins)
        monkeypatch.setattr(entropy, "_fair", lambda *_: None)
        monkeypatch.setattr(entropy.Divergences, "at", lambda self, sizes: dict.fromkeys(sizes, 0.0))
        found = entropy._least_divergence(statistic, GRIDS["uint8"], 128, False)
        assert found == ((-0.5, 3.0) if whole else None)


def test_the_divergence_counts_one_way_or_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entropy, "_least_divergence", lambda statistic, grid, levels, both: (-float(levels), both))
    assert entropy.search_both(Histogram(), GRIDS["uint8"]) == (-128.0, True)
    assert entropy.search(Histogram(), GRIDS["uint8"], 64) == (-64.0, False)
    assert entropy.search(Histogram(), GRIDS["uint8"], 64, True) == (-64.0, 64.0)


@pytest.mark.parametrize("kept", [40, 77, 128])
@pytest.mark.parametrize("name", GRIDS)
def test_codes_begin_where_the_rounded_centres_of_bins_change(name: str, kept: int) -> None:
    statistic, grid = Histogram(), GRIDS[name]
    statistic.update(np.array([-6.0, 8.0], np.float32))
    made = entropy.Divergences(statistic, grid, np.ones(128), 0.0625, False)
    threshold = kept * 0.0625
    scale, zero = grid.parameters(np.array([max(-6.0, -threshold)]), np.array([min(8.0, threshold)]))
    centres = (np.arange(kept, dtype=np.float32) + np.float32(0.5)) * np.float32(0.0625)
    codes = np.clip(np.rint(centres / scale) + zero, grid.format.min, grid.format.max)
    expected = [k for k in range(kept) if k == 0 or codes[k] != codes[k - 1]]
    (first,) = made._first_bins([kept])
    assert first.tolist() == expected


# ---- order statistics ------------------------------------------------------------------------------------------------


def edges(draw: np.random.Generator, count: int) -> np.ndarray:
    """Values at the edges of bins: powers of two and sums of few, often the same, of one sign and of both."""
    values = draw.choice([1, 1.5, 2, 2, 3, 4, 0.25, 1.0078125], count) * draw.choice([1, 1, 1, -0.5], count)
    return values.astype(np.float32)


@pytest.mark.parametrize("make", [Histogram, lambda: Values(16, Memory()), lambda: Values(2048, Memory())])
def test_quantiles_of_values_on_edges(make: Callable[[], Histogram]) -> None:
    for seed, count in enumerate((7, 400, 30_000)):
        statistic, x = make(), edges(np.random.default_rng(seed), count)
        statistic.update(x)
        exact = isinstance(statistic, Values) or count < 1000
        for values, asked in ((np.sort(x), statistic.quantile), (np.sort(np.abs(x)), statistic.magnitude_quantile)):
            for share in (1 / count, 0.01, 0.2, 0.5, 0.77, 0.99, 1.0):
                expected = float(values[int(np.ceil(share * count - 1e-6)) - 1])
                assert asked(share) == pytest.approx(expected, abs=0 if exact else 2**-10 * abs(expected))


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_blocks_have_their_extremes(size: int) -> None:
    x = np.random.default_rng(size).standard_normal(9 * BLOCK + 3).astype(np.float32)
    statistic = Outlined()
    statistic.update(x)
    found = statistic._block_extremes(x[:size])
    pieces = [x[start : min(start + BLOCK, size)] for start in range(0, size, BLOCK)]
    np.testing.assert_array_equal(found, [[one.min() for one in pieces], [one.max() for one in pieces]])


@pytest.mark.parametrize("way", [-1, 0, 1])
def test_so_many_values_are_passed_over_that_enough_are_left(way: int) -> None:
    primes = [p for p in range(3, 100) if all(p % k for k in range(2, p))]
    for prime in primes:
        size = prime * ENOUGH + way
        assert step_of(size) == max([p for p in primes if size >= p * ENOUGH and size % p] or [1])


def test_what_ends_keep_is_told_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    x = np.repeat(np.arange(200, dtype=np.float32), 50)
    ends = Tails(0.02, 1)
    ends.update(x)
    with caplog.at_level(logging.WARNING):
        for rank in (1, 50, 51, 150, 9850, 9851, 10_000):
            assert ends.quantile(rank / x.size) == np.sort(x)[rank - 1]
    assert not caplog.records


@pytest.mark.parametrize("gone, told", [(1.0, False), (2.0, False), (2.5, True)])
def test_a_value_that_may_have_gone_is_told(gone: float, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    found = tails._at(np.array([3.0, 2.0], np.float32), np.float32(gone), 1)
    assert found == max(2.0, gone) and bool(caplog.records) is told
    assert tails._at(np.array([3.0, 2.0], np.float32), np.float32(0.5), 2) == 0.5


def test_a_scale_is_the_best_of_33_beside_it_and_of_four_fits() -> None:
    """From the best scale within 1/64 of the first one on, each is that of least squares for the codes of the last."""
    x = np.random.default_rng(0).standard_normal((60, 1000)).astype(np.float32)
    start = np.abs(x).max(-1) / np.float32(127)
    found, least = mse._nearby(mse.Rows(x, Grid(FORMATS["int8"], True)), start, np.zeros(60, np.int64))

    def lost(row: np.ndarray, scale: np.float32) -> tuple[float, np.ndarray]:
        codes = np.clip(np.rint(row / scale), -128, 127)
        return float(np.square((row - scale * codes).astype(np.float64)).sum()), codes

    for row, first, scale, error in zip(x, start, found, least, strict=True):
        tried = [first, *(first * np.float32(1 + k / 1024) for k in range(-16, 17))]
        best = min(tried, key=lambda one: lost(row, one)[0])
        for _ in range(4):
            codes = lost(row, best)[1].astype(np.float64)
            fit = np.float32((codes * row).sum() / np.square(codes).sum())
            best = min([best, fit], key=lambda one: lost(row, one)[0])
        assert error == pytest.approx(lost(row, best)[0], rel=1e-6) and scale == pytest.approx(best, rel=1e-6)
