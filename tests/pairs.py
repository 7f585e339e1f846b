"""Parameters of tests of which the quick suite has some: every pair of a product, or one of so many."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def pairs(*axes: Iterable[Any]) -> list[Any]:
    """Parameters of a test: all combinations, of which those that repeat a pair are slow.

    The sum of the positions is a multiple of the number of values of the shortest axis (a Latin square). Of three axes
    and more, whatever two values of two axes are in one combination; of two axes, every value is in one.
    """
    values = [list(enumerate(axis)) for axis in axes]
    shortest = min(map(len, values))
    chosen = [([value for _, value in one], sum(place for place, _ in one) % shortest) for one in product(*values)]
    return [pytest.param(*one, marks=[pytest.mark.slow] * bool(rest)) for one, rest in chosen]


def thinned(values: Iterable[Any], of: int) -> list[Any]:
    """Parameters of a test: one of ``of`` values is quick, the others are slow."""
    return [pytest.param(value, marks=[pytest.mark.slow] * (place % of > 0)) for place, value in enumerate(values)]
