"""The equations of cross-layer equalization, on numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from quark.algorithms import cle
from quark.algorithms.cle import _factors, bias_divisor, magnitudes, pair_scales, triple_scales


def test_a_pair_meets_at_the_geometric_mean() -> None:
    s = pair_scales(np.array([8.0, 0.5]), np.array([2.0, 2.0]))
    np.testing.assert_allclose(s, [0.5, 2.0])


def test_dead_and_small_channels_stay() -> None:
    s = pair_scales(np.array([0.0, 0.1, 4.0]), np.array([3.0, 0.2, 0.0]), threshold=0.5)
    np.testing.assert_array_equal(s, 1)


def test_a_triple_meets_at_the_cube_root() -> None:
    first, second = triple_scales(np.array([8.0]), np.array([1.0]), np.array([27.0]))
    np.testing.assert_allclose([8 * first, second / first, 27 / second], 6.0)


def test_a_bias_counts_as_one_more_weight() -> None:
    weights, bias = np.array([[1.0, -2.0], [0.5, 0.25]]), np.array([-6.0, 0.1])
    assert bias_divisor(np.abs(weights), np.abs(bias)[:, None]) == 2
    np.testing.assert_allclose(magnitudes(weights, bias), [3.0, 0.5])


@pytest.mark.parametrize(
    ("weight", "bias", "divisor"),
    [(1.0, 9.0, 2), (0.001, 0.5, 20), (1.0, 50.0, 20), (1.0, 20.0, 10), (1.0, 12.0, 5), (0.0, 3.0, 2)],
)
def test_larger_biases_count_less(weight: float, bias: float, divisor: float) -> None:
    assert bias_divisor(np.full((1, 4), weight), np.array([[bias]])) == divisor


@pytest.mark.parametrize("size", [1, 2, 5, 6])
def test_medians_are_compared_as_if_they_were_sorted(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cle, "PIECE", 4)
    rng = np.random.default_rng(size)
    for _ in range(200):
        values, bound = rng.integers(0, 4, size).astype(np.float64), rng.integers(0, 8) / 2
        weights = rng.choice([-1.0, 0.0, 1.0], (size, 3))
        found = (values[:, None] / np.where(weights == 0, np.nan, np.abs(weights))).reshape(-1)
        alive = found[~np.isnan(found)]
        mean, (above,) = _factors(weights, values[:, None], (bound,))
        if alive.size:
            assert above == (np.median(alive) > bound)
            assert mean == pytest.approx(alive.mean(), rel=1e-12)
        else:
            assert mean is None


@pytest.mark.parametrize("shape", [(5, 4, 3, 3), (6, 7), (1, 1), (3, 1, 5)])
def test_magnitudes_along_every_axis_are_those_of_the_transposed_rows(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))
    weight = rng.normal(0, 1, shape).astype(np.float32)
    for axis, channels in enumerate(shape):
        expected = [np.abs(weight.take(channel, axis)).max() for channel in range(channels)]
        assert magnitudes(weight, axis=axis).tolist() == [float(value) for value in expected]
