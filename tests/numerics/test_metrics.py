"""Metrics against values worked out by hand."""

import math

import numpy as np
import pytest

from quark.errors import DataError
from quark.measure.distance import Distance
from quark.numerics import metrics

X, Y = np.array([3.0, 4.0], np.float32), np.array([3.0, 2.0], np.float32)


def test_by_hand():
    assert metrics.mse(X, Y) == 2
    assert metrics.l2(X, Y) == 2
    assert metrics.cosine(X, Y) == pytest.approx(17 / (5 * math.sqrt(13)))
    assert metrics.sqnr(X, Y) == pytest.approx(10 * math.log10(25 / 4))
    assert metrics.psnr(X, Y) == pytest.approx(10 * math.log10(16 / 2))


def test_ends_of_the_scale():
    zero = np.zeros(2)
    assert metrics.sqnr(X, X) == metrics.psnr(X, X) == math.inf
    assert metrics.sqnr(zero, X) == -math.inf
    assert metrics.cosine(zero, zero) == 1 and metrics.cosine(X, zero) == 0
    assert metrics.cosine(X, X * 3) == 1


def test_large_float16_does_not_overflow():
    assert metrics.mse(np.full(8, 60000, np.float16), np.zeros(8, np.float16)) == float(np.float16(60000)) ** 2
    assert math.isfinite(metrics.l2(np.full(8, 60000, np.float16), np.zeros(8, np.float16)))


@pytest.mark.parametrize("pair", [(X, Y[:1]), (np.zeros(0), np.zeros(0)), (X, Y.reshape(1, 2))])
def test_unlike_shapes_are_refused(pair):
    with pytest.raises(DataError, match="one shape"):
        metrics.mse(*pair)


INF, NAN = math.inf, math.nan


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("x", "y", "sqnr"),
    [
        (1.0, INF, -INF),
        (1.0, -INF, -INF),
        (INF, 1.0, -INF),
        (INF, 0.0, -INF),
        (INF, -INF, -INF),
        (INF, INF, INF),
        (-INF, -INF, INF),
        (1.0, NAN, NAN),
        (NAN, 1.0, NAN),
        (NAN, NAN, NAN),
        (NAN, INF, NAN),
        (1e300, -1e300, -INF),
    ],
)
@pytest.mark.parametrize("rest", [[], [3.0, 0.0, -2.0]])
def test_what_is_not_finite_is_no_warning_and_never_a_good_figure(x, y, sqnr, rest):
    """An infinity that only one has is infinite noise; one that both have is a mask; NaN says nothing."""
    a, b = np.array([*rest, x]), np.array([*rest, y])
    running = Distance()
    running.update(a, b)
    for found in (metrics.sqnr(a, b), metrics.psnr(a, b), running.sqnr, running.psnr):
        assert found == sqnr or (math.isnan(found) and math.isnan(sqnr))
    assert running.broken == (sqnr != INF) and (running.relative == INF) == running.broken
    good = sqnr == INF
    for found in (metrics.mse(a, b), metrics.l2(a, b)):
        assert found == 0 if good else not found < 1e300
    for found in (metrics.cosine(a, b), running.cosine):
        assert found == 1 if good else not found > 0


@pytest.mark.filterwarnings("error")
def test_decibels_of_numbers_whose_ratio_does_not_fit():
    assert metrics.decibel(1e300, 1e-300) == pytest.approx(6000)
    assert metrics.decibel(1e-300, 1e300) == pytest.approx(-6000)
    assert metrics.decibel(1e-320, 1.0) == pytest.approx(-3200, rel=1e-3)


def test_one_number_is_its_own_mean() -> None:
    assert metrics.mse([3.0], [1.0]) == 4.0


def test_the_error_of_the_decibels_is_how_far_they_move_without_a_sample():
    """By hand for two samples; on many about the jackknife's; the same in parts; none of one sample or of no noise."""
    two = Distance()
    for x, y in ((1.0, 1.1), (3.0, 3.3)):  # signal 1 and 9, noise 0.01 and 0.09: alike
        two.update(np.array([x]), np.array([y]))
    assert two.sqnr_error == pytest.approx(0, abs=1e-6)
    unlike = Distance()
    for x, y in ((1.0, 2.0), (1.0, 1.0)):  # each sample is half of the signal, one is all of the noise
        unlike.update(np.array([x]), np.array([y]))
    assert unlike.sqnr_error == pytest.approx(10 / math.log(10) * math.sqrt(2 * (0.5**2 + 0.5**2)))
    for size in (1e-90, 1e90):  # whose squares no float holds
        far = Distance()
        for x, y in ((size, 2 * size), (size, size)):
            far.update(np.array([x]), np.array([y]))
        assert not far.sqnr_error < 0
    rng = np.random.default_rng(0)
    pairs = [(x, x + rng.normal(0, 0.1 * rng.lognormal(0, 0.3), 50)) for x in (rng.normal(0, 1, 50) for _ in range(40))]

    def over(some):
        found = Distance()
        for x, y in some:
            found.update(x, y)
        return found

    without = np.array([over(pairs[:k] + pairs[k + 1 :]).sqnr for k in range(40)])
    jackknife = math.sqrt(39 / 40 * ((without - without.mean()) ** 2).sum())
    assert over(pairs).sqnr_error == pytest.approx(jackknife, rel=0.1)
    assert (over(pairs[:15]) + over(pairs[15:])).sqnr_error == pytest.approx(over(pairs).sqnr_error)
    assert math.isnan(over(pairs[:1]).sqnr_error) and math.isnan(over([(X, X), (X, X)]).sqnr_error)
