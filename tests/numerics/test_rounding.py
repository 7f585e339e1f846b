"""Rounding against exact rational arithmetic, and the noise against SplitMix64 in Python integers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark.errors import ConfigError
from quark.numerics.formats import FORMATS
from quark.numerics.rounding import RULES, Stochastic, dither, rule_of, uniform

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("torch_path")
HALF = Fraction(1, 2)


def exact(x: float, rounding: str) -> int:
    """The definition of ``rounding`` in rational numbers."""
    value = Fraction(x)
    below, fraction = math.floor(value), value - math.floor(value)
    if rounding == "half_even":
        return round(value)
    if rounding == "half_up":
        return math.floor(value + HALF)
    if rounding == "half_away":
        return below + (fraction > HALF or (fraction == HALF and value > 0))
    return below if rounding == "floor" else math.trunc(value)


TRAPS = [0.5, -0.5, 0.49999997, -0.49999997, 1.5, 2.5, -2.5, 8388607.5, 8388609.0, -1e-30, 16777215.0, 3e38]


@pytest.mark.parametrize("rounding", RULES)
@given(x=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_exact(rounding, x):
    values = np.array([*x, *TRAPS], np.float32)
    expected = [exact(float(value), rounding) for value in values]
    assert [int(v) for v in RULES[rounding](values.copy())] == expected
    assert [int(v) for v in RULES[rounding](torch.from_numpy(values.copy()))] == expected


def splitmix64(state: int) -> int:
    """One output of SplitMix64 from its published definition."""
    mask = (1 << 64) - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_the_helper_is_splitmix64():
    """The published first output for seed 1234567."""
    assert splitmix64(1234567 + 0x9E3779B97F4A7C15) == 6457827717110365317


@pytest.mark.parametrize("seed", [0, 1, 2**40, -7])
def test_noise_is_splitmix64_at_the_flat_index(seed):
    shape = (3, 50000)  # more than one chunk
    noise = uniform(seed, shape, np.zeros(1)).reshape(-1)
    for index in (0, 1, 32768, 65536, 149999):
        state = splitmix64(seed) + (index + 1) * 0x9E3779B97F4A7C15
        assert noise[index] == (splitmix64(state) >> 40) / 2**24
    np.testing.assert_array_equal(uniform(seed, shape, torch.zeros(1)).numpy().reshape(-1), noise)


def test_stochastic_is_unbiased_and_keeps_integers():
    row = FORMATS["int8"]
    x = np.full(100_000, 3.3, np.float32)
    found = row.round(x, Stochastic(4))
    assert set(np.unique(found)) == {3.0, 4.0}
    assert abs(found.mean() - 3.3) < 5 * math.sqrt(0.3 * 0.7 / x.size)
    whole = np.arange(-128, 128, dtype=np.float32)
    np.testing.assert_array_equal(row.round(whole, "stochastic"), whole)


def test_the_least_noise_keeps_integers_and_the_most_drops_fractions():
    x, most = np.array([3.0, 3.5, -2.0], np.float32), np.full(3, 1 - 2.0**-24, np.float32)
    assert dither(x, np.zeros(3, np.float32)).tolist() == [3, 4, -2]
    assert dither(x, most).tolist() == [3, 3, -2]


def test_seeds():
    x, row = np.linspace(-20, 20, 1000, dtype=np.float32), FORMATS["int8"]
    np.testing.assert_array_equal(row.round(x, "stochastic"), row.round(x, Stochastic(0)))
    assert (row.round(x, Stochastic(0)) != row.round(x, Stochastic(1))).any()


def test_unknown_rounding():
    with pytest.raises(ConfigError, match="Did you mean 'half_even'"):
        FORMATS["int8"].round(np.zeros(3), "half_evn")
    assert rule_of("floor", None)(np.array([1.7], np.float32)) == 1
