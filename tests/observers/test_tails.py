"""Tails: order statistics against sorting, and what they may not be asked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark.errors import DataError
from quark.numerics.affine import Grid
from quark.numerics.formats import FORMATS
from quark.observers import SEARCHES
from quark.observers.histogram import Histogram
from quark.observers.tails import SHARE, Tails, quantiles

SHAPES = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "relu": lambda rng, n: np.maximum(rng.standard_normal(n), 0),
    "saturated": lambda rng, n: np.clip(rng.standard_normal(n), -1, 1),
    "constant": lambda rng, n: np.full(n, -2.5),
    "negative": lambda rng, n: -np.exp(rng.standard_normal(n)),
    "growing": lambda rng, n: np.sort(rng.standard_cauchy(n)),
}


def grid() -> Grid:
    return Grid(FORMATS["int8"], True)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("sizes", [[5, 1, 700], [200_000, 130_001], [3000] * 9], ids=str)
@pytest.mark.parametrize("percentile", [99.999, 99.9, 98.0])
def test_quantiles_are_those_of_the_sorted_values(kind: str, sizes: list[int], percentile: float) -> None:
    rng = np.random.default_rng(len(sizes))
    parts = [SHAPES[kind](rng, size).astype(np.float32) for size in sizes]
    whole = np.concatenate(parts)
    tails = Tails(1 - percentile / 100, len(parts))
    for part in parts:
        tails.update(part)
    rank = int(np.ceil(whole.size * percentile / 100 - 1e-6))
    assert tails.magnitude_quantile(percentile / 100) == np.sort(np.abs(whole))[rank - 1]
    outside = (100 - percentile) / 200
    low = max(int(np.ceil(whole.size * outside - 1e-6)), 1)
    high = int(np.ceil(whole.size * (1 - outside) - 1e-6))
    assert tails.quantile(outside) == np.sort(whole)[low - 1]
    assert tails.quantile(1 - outside) == np.sort(whole)[high - 1]
    assert (tails.lo, tails.hi, tails.count) == (whole.min(), whole.max(), whole.size)


@pytest.mark.parametrize("sizes", [[3000], [900, 1300, 5]], ids=str)
def test_every_quantile_is_there_where_both_halves_are_kept(sizes: list[int]) -> None:
    draw = np.random.default_rng(2)
    parts = [draw.standard_normal(size).astype(np.float32) for size in sizes]
    tails, ordered = Tails(0.5, len(sizes)), np.sort(np.concatenate(parts))
    for part in parts:
        tails.update(part)
    for share in np.linspace(0, 1, 41):
        rank = min(max(int(np.ceil(share * ordered.size - 1e-6)), 1), ordered.size)
        assert tails.quantile(share) == ordered[rank - 1], share


@given(
    st.integers(1, 40).flatmap(
        lambda size: st.lists(st.lists(st.integers(-6, 6), min_size=size, max_size=size), min_size=1, max_size=6)
    ),
    st.sampled_from([0.01, 0.2, 0.6]),
)
def test_parts_merged_and_stored_are_the_whole(parts: list[list[int]], outside: float) -> None:
    whole, merged = Tails(outside, len(parts)), Tails(outside, len(parts))
    for part in parts:
        whole.update(np.array(part, np.float32))
        own = Tails(outside, len(parts))
        own.update(np.array(part, np.float32).reshape(1, -1))
        merged.merge(Tails.from_state(own.state()))
    ranked = sorted(value for part in parts for value in part)
    size = 512
    assert merged.state()["high"].tolist() == ranked[::-1][:size]
    assert (-merged.state()["low"]).tolist() == ranked[:size]
    assert all(np.array_equal(merged.state()[key], array) for key, array in whole.state().items())


def test_the_range_is_that_of_the_histogram() -> None:
    x = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    row = SEARCHES["percentile"]
    for settings in ({"percentile": 99.99}, {"percentile": 99.99, "symmetric": False}):
        found = []
        for extra in ({}, {"samples": 1}):
            statistic = row.observe({**settings, **extra})
            assert isinstance(statistic, Tails) == bool(extra)
            statistic.update(x)
            found.append(row.find(statistic, grid(), {**settings, **extra}))
        assert found[0] == found[1]


@pytest.mark.parametrize("factor", [1.0, 5.0])
def test_larger_samples_than_the_first_are_no_error(factor: float) -> None:
    """Later samples as wide as the first, or wider: the outermost values are those of the later ones."""
    rng = np.random.default_rng(1)
    parts = [rng.standard_normal(1000), factor * rng.standard_normal(50_000), factor * rng.standard_normal(200_000)]
    tails = Tails(0.001, 3)
    for part in parts:
        tails.update(part.astype(np.float32))
    magnitudes = np.sort(np.abs(np.concatenate(parts)).astype(np.float32))
    assert tails.magnitude_quantile(0.999) == magnitudes[int(np.ceil(0.999 * magnitudes.size - 1e-6)) - 1]


def test_what_is_gone_makes_the_range_wider_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    tails = Tails(0.01, 2)
    tails.update(np.linspace(10, 20, 1000, dtype=np.float32))  # 512 of each end are kept, then more are needed
    kept = np.linspace(10, 20, 1000, dtype=np.float32)[-512]
    tails.update(np.linspace(-1, 1, 100_000, dtype=np.float32))
    assert tails.quantile(0.995) == np.linspace(10, 20, 1000, dtype=np.float32)[-506]
    assert not caplog.records
    assert tails.quantile(0.99) == kept  # the 1011th value from above is one of the second sample, below 1
    assert "samples grew during calibration" in caplog.text


def test_nan_is_an_error() -> None:
    with pytest.raises(DataError, match="1 NaN and 1 infinite values among 3"):
        Tails(0.1, 1).update(np.array([1, np.nan, np.inf]))


def test_far_in_or_for_nobody_knows_how_many_samples_a_histogram_serves() -> None:
    assert isinstance(quantiles(percentile=99.999, samples=1000), Tails)
    for settings in ({"percentile": 99.0, "samples": 2}, {"percentile": 99.999}, {"bins": 64, "samples": 1}):
        assert isinstance(quantiles(**settings), Histogram)
    assert SHARE < 1
