"""Equalization by data on numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np

from quark.algorithms.equalization import Term, cost, equalizing_scales

ONES = np.ones(2)


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
