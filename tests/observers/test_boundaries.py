"""Decisions of observers at their boundaries, each with a value that follows from its definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quark.config.tensor import TensorSpec
from quark.errors import ConfigError
from quark.observers import non_overflow
from quark.observers.histogram import Histogram
from quark.observers.outlined import Outlined, outlined
from quark.observers.percentile import search
from quark.observers.tails import BLOCK, Tail, Tails, quantiles


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
