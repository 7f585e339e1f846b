"""Means per channel, and the bias that restores them."""

from __future__ import annotations

import numpy as np
import pytest

from quark.algorithms.bias_correction import channel_means, corrected, gains, room, shrunk
from quark.numerics.formats import FORMATS


def test_samples_of_unequal_size_count_by_their_positions() -> None:
    small, large = np.full((1, 2, 1, 1), 4.0), np.zeros((1, 2, 1, 3))
    small[:, 1] = 8
    np.testing.assert_allclose(channel_means([small, large], axis=1), [1.0, 2.0])
    np.testing.assert_allclose(channel_means([np.array([[1.0, 2.0], [3.0, 6.0]])], axis=-1), [2.0, 4.0])


def test_the_mean_comes_back() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 6)) + 1
    weight, bias = rng.standard_normal((6, 3)), np.zeros(3, np.float32)
    y, found = x @ weight, x @ np.round(weight)
    fixed = corrected(bias, y.mean(0) - found.mean(0))
    np.testing.assert_allclose((found + fixed).mean(0), y.mean(0), atol=1e-6)


def test_a_difference_that_chance_explains_is_left_alone() -> None:
    expected = np.array([[1.0, 0.0], [1.2, 1.0], [0.8, -1.0], [1.0, 0.1]])
    sizes = np.full(4, 9.0)
    lacking = shrunk(expected, np.zeros_like(expected), sizes)
    square = np.var(expected[:, 0], ddof=1) / 4
    np.testing.assert_allclose(lacking, [1 - square, 0.0], atol=1e-12)


def test_one_sample_counts_in_full_and_samples_count_by_their_size() -> None:
    np.testing.assert_array_equal(shrunk(np.array([[2.0]]), np.array([[0.5]]), np.array([4.0])), [1.5])
    lacking = shrunk(np.array([[1.0], [1.0], [5.0]]), np.zeros((3, 1)), np.array([1e6, 1e6, 1.0]))
    np.testing.assert_allclose(lacking, [1.0], rtol=1e-3)


def test_shrinking_is_nearer_to_the_truth_on_average() -> None:
    rng = np.random.default_rng(0)
    truth = np.where(np.arange(4000) % 4 == 0, 0.5, 0.0)
    seen = truth + rng.standard_normal((6, 4000))
    lacking = shrunk(seen, np.zeros_like(seen), np.ones(6))
    assert np.square(lacking - truth).mean() < 0.8 * np.square(seen.mean(0) - truth).mean()


def test_a_gain_is_the_slope_of_the_answer() -> None:
    rng = np.random.default_rng(1)
    y = [rng.standard_normal((1, 3, 40, 2)) * [[[[5]], [[1]], [[2]]]] + 3 for _ in range(8)]
    slopes = np.array([0.8, 1.0, 1.2]).reshape(1, 3, 1, 1)
    found = [one * slopes + 7 + 0.01 * rng.standard_normal(one.shape) for one in y]
    means = channel_means(y, 1), channel_means(found, 1)
    np.testing.assert_allclose(gains(zip(y, found, strict=True), 1, means), [0.8, 1.0, 1.2], atol=0.01)


def test_noise_is_no_gain() -> None:
    rng = np.random.default_rng(2)
    y = [rng.standard_normal((1, 500, 6)) for _ in range(10)]
    found = [one + 0.5 * rng.standard_normal(one.shape) for one in y]
    means = channel_means(y, 1), channel_means(found, 1)
    left = gains(zip(y, found, strict=True), 1, means) - 1
    assert (left == 0).sum() > 250 and np.abs(left).mean() < 0.05


@pytest.mark.parametrize(("name", "zero"), [("int8", 0), ("uint8", 0), ("uint8", 10), ("uint4", 15), ("int8", -100)])
def test_a_weight_grows_as_far_as_its_codes_reach(name: str, zero: int) -> None:
    row = FORMATS[name]
    codes = np.arange(max(row.min, -row.max), row.max + 1)
    weight = 0.1 * (codes - zero)
    weight = weight[weight != 0]
    grown = weight * room(weight, np.full(weight.shape, 0.1), np.full(weight.shape, zero), row)
    ends = np.where(weight > 0, codes[-1], codes[0])
    np.testing.assert_allclose(grown / 0.1 + zero, ends)
