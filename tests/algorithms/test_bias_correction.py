"""Means per channel, and the bias that restores them."""

from __future__ import annotations

import numpy as np

from quark.algorithms.bias_correction import channel_means, corrected


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
    fixed = corrected(bias, y.mean(0), found.mean(0))
    np.testing.assert_allclose((found + fixed).mean(0), y.mean(0), atol=1e-6)
