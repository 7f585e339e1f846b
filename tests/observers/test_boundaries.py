"""Decisions of observers at their boundaries, each with a value that follows from its definition."""

from __future__ import annotations

import pytest

from quark.observers.histogram import Histogram
from quark.observers.outlined import Outlined, outlined
from quark.observers.tails import Tails, quantiles


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
