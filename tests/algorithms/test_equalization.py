"""Equalization by data on numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np

from quark.algorithms import equalization
from quark.algorithms.equalization import Term, cost, equalizing_scales

ONES = np.ones(2)


def on_whole_rows(terms: list[Term], before: np.ndarray, widest: float, grain: float) -> np.ndarray:
    """The same scales, every cost summed anew over all channels."""
    given, exponents = np.log2(before), np.zeros(len(before))
    for _ in range(equalization.SWEEPS):
        start = exponents
        for channel in np.argsort(-terms[0].largest, kind="stable"):
            tried = np.tile(exponents, (7, 1))
            tried[:, channel] += np.array([0, -1, 1, -2, 2, -8, 8]) * grain
            spread = np.ptp(given + tried, axis=1)
            allowed = spread <= max(np.floor(np.log2(widest)), spread[0])
            exponents = tried[int(np.argmin(np.where(allowed, cost(terms, tried), np.inf)))]
        if (exponents == start).all():
            break
    return np.asarray(2.0 ** (given + exponents - (given + exponents).max()))


def test_sums_that_are_carried_on_change_no_scale() -> None:
    """Zeros and equal channels among them, whose steps cost the same but for rounding."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        count, terms = int(rng.choice([1, 2, 9, 33])), []
        for _ in range(rng.integers(1, 5)):
            largest, noise = (np.exp(rng.normal(0, rng.choice([0.1, 1, 20]), count)) for _ in range(2))
            largest[rng.random(count) < rng.choice([0, 0.3])] = 0
            noise[rng.random(count) < rng.choice([0, 0.3])] = 0
            largest = np.round(largest) + 1 if rng.random() < 0.3 else largest
            terms.append(Term(largest, noise, float(rng.choice([4, 8, 16])), bool(rng.random() < 0.6)))
        before = 2.0 ** -rng.integers(0, 4, count).astype(float)
        grain = float(rng.choice([1.0, 0.25]))
        np.testing.assert_array_equal(
            equalizing_scales(terms, before, 64.0, grain), on_whole_rows(terms, before, 64.0, grain)
        )


def test_one_tensor_alone_gives_every_channel_the_same_range() -> None:
    activation = Term(np.array([32.0, 1.0]), np.array([1.0, 1.0]), 8, divided=True)
    s = equalizing_scales([activation], ONES)
    np.testing.assert_array_equal(s, [1, 2.0**-5])


def test_a_tensor_before_and_one_behind_meet_in_the_middle() -> None:
    before = Term(np.array([16.0, 1.0]), np.array([1.0, 1.0]), 8, divided=True)
    behind = Term(np.array([1.0, 1.0]), np.array([1.0, 1.0]), 8, divided=False)
    s = equalizing_scales([before, behind], ONES)
    assert cost([before, behind], np.log2(s)[None])[0] == min(
        cost([before, behind], np.array([[0.0, -float(k)]]))[0] for k in range(7)
    )
    assert 1 > s[1] > 2.0**-5


def test_scales_stay_within_their_limit_also_with_what_was_before() -> None:
    term = Term(np.array([1024.0, 1.0]), np.array([1.0, 1.0]), 8, divided=True)
    np.testing.assert_array_equal(equalizing_scales([term], ONES, widest=4), [1, 0.25])
    np.testing.assert_array_equal(equalizing_scales([term], np.array([1, 0.5]), widest=4), [1, 0.25])


def test_a_term_of_more_bits_counts_less() -> None:
    wide = Term(np.array([16.0, 1.0]), np.array([1.0, 1.0]), 16, divided=True)
    narrow = Term(np.array([1.0, 1.0]), np.array([1.0, 1.0]), 8, divided=False)
    np.testing.assert_array_equal(equalizing_scales([wide, narrow], ONES), [1, 1])
