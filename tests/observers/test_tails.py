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
from quark.observers.tails import MOST, Tails, tail_size

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
    size = tail_size(percentile, whole.size)
    assert size is not None
    tails = Tails(size, whole.size)
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


@given(st.lists(st.lists(st.integers(-6, 6), min_size=1, max_size=40), min_size=1, max_size=6), st.integers(1, 50))
def test_parts_merged_and_stored_are_the_whole(parts: list[list[int]], size: int) -> None:
    total = sum(map(len, parts))
    whole, merged = Tails(size, total), Tails(size, total)
    for part in parts:
        whole.update(np.array(part, np.float32))
        own = Tails(size, total)
        own.update(np.array(part, np.float32).reshape(1, -1))
        merged.merge(Tails.from_state(own.state()))
    ranked = sorted(value for part in parts for value in part)
    assert merged.state()["high"].tolist() == ranked[::-1][:size]
    assert (-merged.state()["low"]).tolist() == ranked[:size]
    assert all(np.array_equal(merged.state()[key], array) for key, array in whole.state().items())


def test_the_range_is_that_of_the_histogram() -> None:
    x = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    row = SEARCHES["percentile"]
    for settings in ({"percentile": 99.99}, {"percentile": 99.99, "symmetric": False}):
        found = []
        for extra in ({}, {"tail": tail_size(99.99, x.size), "expected": x.size}):
            statistic = row.observe({**settings, **extra})
            statistic.update(x)
            found.append(row.find(statistic, grid(), {**settings, **extra}))
        assert found[0] == found[1]


def test_what_was_not_promised_is_an_error() -> None:
    tails = Tails(4, 10)
    tails.update(np.arange(10))
    with pytest.raises(DataError, match="11 values came where the length of the data promised 10"):
        tails.update(np.ones(1))
    with pytest.raises(DataError, match="1 NaN and 1 infinite values among 3"):
        Tails(4, 10).update(np.array([1, np.nan, np.inf]))


def test_far_in_a_histogram_is_smaller() -> None:
    assert tail_size(99.999, 10**8) in (1002, 1003)  # 1000 and a little more
    assert tail_size(50.0, 10 * MOST) is None
