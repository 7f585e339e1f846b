"""A metric of one model on labelled samples, and how far the difference between two models is chance.

Two models are judged on the same samples, so what counts is the error of the difference, sample by sample, not that of
each value: two detectors that find the same boxes differ by nothing, however few the pictures. The jackknife gives it
for any metric, a mean or not (average precision, intersection over union, perplexity):

    error² = (G - 1) / G · Σ (d_g - mean d)²     d_g: the difference without the samples of group g, G groups
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from quark.dataclass import dataclass

GROUPS = 50  # the metric is computed this many times more, at most
WORTH = 0.98  # part of an error that may be left where samples are few


@dataclass(frozen=True)
class Score:
    """A metric.

    Attributes:
        value: on all samples.
        without: [groups] the metric when one group of samples is left out; empty where nothing is known of samples.
    """

    value: float
    without: tuple[float, ...] = ()


def groups_of(count: int) -> list[list[int]]:
    """Indices of ``count`` samples in at most ``GROUPS`` groups, neighbours in one: they resemble each other."""
    return [part.tolist() for part in np.array_split(np.arange(count), min(count, GROUPS)) if part.size]


def score(metric: Callable[[Sequence[int]], float], count: int) -> Score:
    """The metric of ``count`` samples, given what it is on some of them by their indices."""
    every = list(range(count))
    if count < 2:
        return Score(float(metric(every)))
    parts = (set(group) for group in groups_of(count))
    return Score(float(metric(every)), tuple(float(metric([k for k in every if k not in part])) for part in parts))


def mean(values: Sequence[float] | np.ndarray) -> Score:
    """The metric that is the mean of one number a sample."""
    numbers = np.asarray(values, np.float64)
    return score(lambda chosen: float(numbers[list(chosen)].mean()), len(numbers))


def error(one: Score, other: Score) -> float:
    """Standard error of the difference of two models on the same samples; NaN where nothing is known of samples."""
    if len(one.without) < 2 or len(one.without) != len(other.without):
        return math.nan
    gaps = np.subtract(one.without, other.without)
    if not np.isfinite(gaps).all():
        return math.nan
    return float(np.sqrt((len(gaps) - 1) / len(gaps) * np.sum((gaps - gaps.mean()) ** 2)))


def by_chance(before: Score, after: Score, limit: float) -> float:
    """How much of a loss is chance; NaN where nothing is known of samples.

    That is its standard error, or all of it where the samples are too few to see ``limit`` and the loss rests on one of
    their groups: without that one it is within ``limit``. (A single picture that differs makes a loss of exactly one
    standard error.)
    """
    spread = error(before, after)
    if not spread > limit:
        return spread
    rest = min(float(one - other) for one, other in zip(before.without, after.without, strict=True))
    return max(spread, before.value - after.value) if rest <= limit else spread
