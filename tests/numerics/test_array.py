"""The helpers that hide the differences of the libraries, on both of them."""

from __future__ import annotations

import numpy as np
import pytest

from quark.numerics.array import block_max, clip, pow2, repeat, spread

torch = pytest.importorskip("torch")


def test_powers_of_two_are_exact():
    exponents = np.arange(-155, 129, dtype=np.int32)
    with np.errstate(over="ignore", under="ignore"):
        expected = np.ldexp(1.0, exponents).astype(np.float32)
    np.testing.assert_array_equal(pow2(exponents), expected)
    np.testing.assert_array_equal(pow2(torch.from_numpy(exponents)).numpy(), expected)


@pytest.mark.parametrize("length", [1, 2, 6, 7, 8, 32])
@pytest.mark.parametrize("axis", [1, 2])
def test_block_max(length, axis):
    x = np.random.default_rng(0).integers(-99, 99, (3, length, length), np.int32)
    expected = x.max(axis=axis, keepdims=True)
    np.testing.assert_array_equal(block_max(x, axis), expected)
    np.testing.assert_array_equal(block_max(torch.from_numpy(x), axis).numpy(), expected)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("axis", [0, 1])
def test_repeat(count, axis):
    x = np.arange(6).reshape(2, 3)
    expected = np.stack([x] * count, axis + 1).reshape([n * (count if k == axis else 1) for k, n in enumerate(x.shape)])
    np.testing.assert_array_equal(repeat(x, count, axis), expected)
    np.testing.assert_array_equal(repeat(torch.from_numpy(x), count, axis).numpy(), expected)


def test_spread_broadcasts_alike():
    parameter = np.arange(3.0).reshape(3, 1)
    for shape in ((3, 1), (3, 4), (3, 100)):
        np.testing.assert_array_equal(
            np.broadcast_to(spread(parameter, shape), shape), np.broadcast_to(parameter, shape)
        )


def test_clip_keeps_nan():
    x = np.array([np.nan, -5, 5, 0.5], np.float32)
    bounds = np.float32([-1]), np.float32([1])
    np.testing.assert_array_equal(clip(x, *bounds), [np.nan, -1, 1, 0.5])
    found = clip(torch.from_numpy(x), *map(torch.from_numpy, bounds))
    np.testing.assert_array_equal(found.numpy(), [np.nan, -1, 1, 0.5])
