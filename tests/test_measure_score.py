"""How much of a loss is chance: an error of the difference, and a loss that one sample makes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quark.measure.score import Score, by_chance, error, mean

FLOAT = mean(np.ones(40))


@pytest.mark.parametrize("lost", [1.0, 0.9])
def test_a_loss_that_one_sample_makes_is_all_chance_where_the_limit_cannot_be_seen(lost: float) -> None:
    one = np.ones(40)
    one[7] -= lost
    after = mean(one)
    assert error(FLOAT, after) == pytest.approx(lost / 40)  # what makes it a matter of rounding
    assert by_chance(FLOAT, after, 0.01) >= FLOAT.value - after.value
    assert by_chance(FLOAT, after, 0.03) == error(FLOAT, after)  # labels that see the limit decide


def test_a_loss_of_two_samples_is_one_of_its_standard_error() -> None:
    two = np.ones(40)
    two[[7, 21]] = 0.0
    after = mean(two)
    assert by_chance(FLOAT, after, 0.01) == error(FLOAT, after) < FLOAT.value - after.value


def test_what_knows_no_samples_is_no_chance() -> None:
    assert math.isnan(by_chance(Score(1.0), Score(0.5), 0.01))
    assert by_chance(FLOAT, FLOAT, 0.01) == 0.0
