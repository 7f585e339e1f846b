"""Observers asked of so few or so small values that shortcuts would show."""

from __future__ import annotations

import numpy as np
import pytest

from quark.numerics.affine import Grid
from quark.numerics.formats import FORMATS
from quark.observers.mse import Rows, search_rows
from quark.observers.tails import Tails


@pytest.mark.parametrize("count", [1, 2, 7, 600, 1030])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 1.0])
def test_magnitudes_are_counted_once(count: int, share: float) -> None:
    """Of few values both ends hold the same."""
    x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    tails = Tails(1.0, 1)
    tails.update(x)
    rank = max(int(np.ceil(count * share - 1e-6)), 1)
    assert tails.magnitude_quantile(share) == np.sort(np.abs(x))[rank - 1]


@pytest.mark.parametrize("largest", [1e-2, 1e-4, 10.0])
def test_scales_of_small_values_are_fitted_too(largest: float) -> None:
    x = (np.random.default_rng(3).uniform(-1, 1, (2, 40)) * largest).astype(np.float32)
    scale = np.abs(x).max(-1) / np.float32(5)
    found = Rows(x, Grid(FORMATS["int4"], True, True)).fitted(scale, np.zeros(2))
    codes = np.clip(np.rint(x.astype(np.float64) / scale[:, None]), -8, 7)
    np.testing.assert_allclose(found, (codes * x).sum(-1) / (codes**2).sum(-1), rtol=1e-5)
    assert not np.allclose(found, scale, rtol=1e-4)


def test_what_may_be_missing_of_either_side_bounds_a_magnitude(caplog: pytest.LogCaptureFixture) -> None:
    """A first sample of few values keeps few of each end: a second one, far larger, may have lost some."""
    random = np.random.default_rng(5)
    tails = Tails(1 / 64, 1)
    first, second = random.uniform(0.5, 1, 2000), random.uniform(-4, 4, 400_000)
    for part in (first, second):
        tails.update(part.astype(np.float32))
    whole = np.sort(np.abs(np.concatenate([first, second]).astype(np.float32)))
    for share in (0.5, 0.9, 0.99, 0.999):
        found = tails.magnitude_quantile(share)
        assert found >= whole[int(np.ceil(whole.size * share - 1e-6)) - 1]
    assert "samples grew" in caplog.text


@pytest.mark.parametrize("side", [8, 512], ids=["values", "histogram"])
@pytest.mark.parametrize("outlier", [5.0, 50.0, 1e5])
def test_free_zero_points_of_power_of_two_scales_lose_no_more_than_the_middle_code(side: int, outlier: float) -> None:
    """An outlier moves the zero point of the full range away from all other values, which then clip."""
    x = np.random.default_rng(3).normal(size=(1, side * side)).astype(np.float32)
    x[0, 0] = outlier
    for name in ("int4", "uint8"):
        grid = Grid(FORMATS[name], False, False, "power_of_two")
        judge = Rows(x, grid)
        found, middle, full = (
            float(judge.error((lo, hi))[0]) for lo, hi in (search_rows(x, grid, way) for way in (None, True, False))
        )
        assert found <= min(middle, full) * 1.01  # a histogram tells errors within a percent
        assert found == pytest.approx(min(middle, full), rel=0.01)
