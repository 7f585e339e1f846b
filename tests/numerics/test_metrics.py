"""Metrics against values worked out by hand."""

import math

import numpy as np
import pytest

from quark.errors import DataError
from quark.numerics import metrics

X, Y = np.array([3.0, 4.0], np.float32), np.array([3.0, 2.0], np.float32)


def test_by_hand():
    assert metrics.mse(X, Y) == 2
    assert metrics.l2(X, Y) == 2
    assert metrics.cosine(X, Y) == pytest.approx(17 / (5 * math.sqrt(13)))
    assert metrics.sqnr(X, Y) == pytest.approx(10 * math.log10(25 / 4))
    assert metrics.psnr(X, Y) == pytest.approx(10 * math.log10(16 / 2))
    assert metrics.kl([1, 3], [2, 2]) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))


def test_ends_of_the_scale():
    zero = np.zeros(2)
    assert metrics.sqnr(X, X) == metrics.psnr(X, X) == math.inf
    assert metrics.sqnr(zero, X) == -math.inf
    assert metrics.cosine(zero, zero) == 1 and metrics.cosine(X, zero) == 0
    assert metrics.cosine(X, X * 3) == 1
    assert metrics.kl([1, 1], [1, 0]) == math.inf and metrics.kl([1, 0], [1, 1]) == pytest.approx(math.log(2))


def test_large_float16_does_not_overflow():
    assert metrics.mse(np.full(8, 60000, np.float16), np.zeros(8, np.float16)) == float(np.float16(60000)) ** 2
    assert math.isfinite(metrics.l2(np.full(8, 60000, np.float16), np.zeros(8, np.float16)))


@pytest.mark.parametrize("pair", [(X, Y[:1]), (np.zeros(0), np.zeros(0)), (X, Y.reshape(1, 2))])
def test_unlike_shapes_are_refused(pair):
    with pytest.raises(DataError, match="one shape"):
        metrics.mse(*pair)


def test_a_histogram_has_no_negative_counts():
    with pytest.raises(DataError, match="non-negative"):
        metrics.kl([1, -1], [1, 1])
