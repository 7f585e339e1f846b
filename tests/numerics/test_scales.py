"""Scale rules against exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark.numerics.scales import SCALE_RULES, of_format

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("torch_path")

SMALLEST = 2.0**-149
positive = st.floats(min_value=SMALLEST, max_value=float(np.finfo(np.float32).max), width=32)
scales = st.lists(positive, min_size=1, max_size=16).map(lambda x: np.array(x, np.float32))


def snapped(name: str, x: np.ndarray) -> list[float]:
    found = SCALE_RULES[name].snap(x)
    np.testing.assert_array_equal(SCALE_RULES[name].snap(torch.from_numpy(x)).numpy(), found)
    assert found.dtype == np.float32 and found.shape == x.shape
    return [float(v) for v in found]


@given(x=scales)
def test_power_of_two_is_nearest_on_a_logarithmic_axis(x):
    for value, found in zip(x, snapped("power_of_two", x), strict=True):
        exact, power = Fraction(float(value)), Fraction(found)
        assert math.frexp(found)[0] == 0.5
        assert power / 2 < exact * exact / power < power * 2 or found in (2.0**-127, 2.0**127)


def test_power_of_two_around_the_rounding_points():
    """sqrt(2) * 2**k lies between two neighbouring float32; the lower goes down, the upper up."""
    for k in (-126, -127, -20, 0, 3, 126):
        middle = np.float32(math.sqrt(2) * 2.0**k)
        exact = Fraction(float(middle)) ** 2 > Fraction(2) ** (2 * k + 1)
        below, above = (
            (np.nextafter(middle, np.float32(0)), middle) if exact else (middle, np.nextafter(middle, np.float32(3e38)))
        )
        assert snapped("power_of_two", np.array([below, above], np.float32)) == [
            max(2.0**k, 2.0**-127),
            min(2.0 ** (k + 1), 2.0**127),
        ]


def fraction_nearest(x: float) -> float:
    """The nearest M / 2**N by exhaustion over N."""
    best, exact = None, Fraction(x)
    for n in range(17):
        scaled = exact * 2**n
        for whole in (math.floor(scaled), math.ceil(scaled)):
            candidate = Fraction(min(max(whole, 1), 32767), 2**n)
            if best is None or abs(candidate - exact) < abs(best - exact):
                best = candidate
    return float(best)


@given(x=scales)
def test_int16_is_the_nearest_fraction(x):
    assert snapped("int16", x) == [fraction_nearest(float(value)) for value in x]


def test_int16_of_a_tiny_scale_is_never_zero():
    """A value M / 2**N does not exist below 2**-17; the least, 2**-16, stands for it."""
    assert snapped("int16", np.array([1e-9, 2.0**-18, 5e4], np.float32)) == [2.0**-16, 2.0**-16, 32767.0]


@pytest.mark.parametrize(
    ("name", "dtype", "largest"),
    [
        ("float16", np.float16, 65504.0),
        ("bfloat16", ml_dtypes.bfloat16, 255 * 2.0**120),
        ("e4m3", ml_dtypes.float8_e4m3fn, 448.0),
    ],
)
@given(x=scales)
def test_small_float_scales(name, dtype, largest, x):
    smallest = float(np.array([1], f"u{np.dtype(dtype).itemsize}").view(dtype)[0])
    expected = np.clip(x, smallest, largest).astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(snapped(name, x), expected)


@given(x=scales)
def test_shared_exponents(x):
    """2**floor, 2**ceil and the nearest power of two (1.5 * 2**k goes up), within E8M0, from frexp."""
    for value, floor, ceil, near in zip(
        x, snapped("e8m0_floor", x), snapped("e8m0_ceil", x), snapped("e8m0", x), strict=True
    ):
        mantissa, exponent = math.frexp(float(value))  # 0.5 <= mantissa < 1
        low = min(max(exponent - 1, -127), 127)
        up = low if mantissa == 0.5 else min(max(exponent, -127), 127)
        assert floor == 2.0**low
        assert ceil == 2.0**up
        clipped = min(max(float(value), 2.0**-127), 2.0**127)
        mantissa, exponent = math.frexp(clipped)
        assert near == 2.0 ** (exponent - 1 + (mantissa >= 0.75))


@pytest.mark.parametrize(
    ("name", "amax", "expected"),
    [  # FP4: emax 2, one mantissa bit. Worked out from the rules' text.
        ("e8m0_floor", [1.0, 1.99, 2.0, 6.0, 7.9], [0.25, 0.25, 0.5, 1.0, 1.0]),
        ("e8m0_even", [1.0, 1.74, 1.75, 6.0, 7.0, 7.9], [0.25, 0.25, 0.5, 1.0, 2.0, 2.0]),
        ("e8m0_ceil", [1.0, 1.01, 2.0, 6.0, 8.0], [0.25, 0.5, 0.5, 2.0, 2.0]),
        ("float32", [3.0, 6.0], [0.5, 1.0]),
        ("e4m3", [6.0, 6.0 * 500, 1e-9], [1.0, 448.0, 2.0**-9]),
    ],
)
def test_scale_of_a_block(name, amax, expected):
    found = SCALE_RULES[name].of(np.array(amax, np.float32), 6.0, 1)
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


@pytest.mark.parametrize(("bits", "expected"), [(1, 2.0), (22, 2.0), (23, 1.0), (31, 1.0)])
def test_the_largest_number_below_8_is_no_8_where_elements_have_its_bits(bits, expected):
    below = np.nextafter(np.float32(8), np.float32(0))
    assert SCALE_RULES["e8m0_even"].of(below.reshape(1), 6.0, bits) == expected


def test_just_below_a_power_of_two():
    """log2 rounds up here; the bits do not."""
    below = np.nextafter(np.float32(2.0**60), np.float32(0))
    assert SCALE_RULES["e8m0_floor"].snap(below) == 2.0**59


def test_numbers_and_scalars():
    assert SCALE_RULES["power_of_two"].snap(0.1) == 0.125
    assert SCALE_RULES["power_of_two"].snap(np.float64(0.088)) == 0.0625
    assert SCALE_RULES["e5m3"].snap(np.zeros((2, 0), np.float32)).shape == (2, 0)


@given(rows=st.lists(st.lists(st.floats(2.0**-8, 2.0**100, width=32), min_size=3, max_size=3), min_size=1, max_size=4))
def test_scales_of_a_row_are_fp8_under_one_factor(rows):
    """As a kernel makes them: divided by the largest / 448, rounded to FP8, divided by 8 and rounded again."""
    x = np.array(rows, np.float32)
    found = SCALE_RULES["e4m3_of_row"].snap(x)
    np.testing.assert_array_equal(SCALE_RULES["e4m3_of_row"].snap(torch.from_numpy(x)).numpy(), found)
    np.testing.assert_array_equal(SCALE_RULES["e4m3_of_row"].snap(found), found)
    np.testing.assert_array_equal(found.astype(ml_dtypes.bfloat16).astype(np.float32), found)
    factor = found.max(-1, keepdims=True) / np.float32(448)
    eighths = ((found / factor).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / 8).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(eighths.astype(np.float32) * (factor * 8), found)
    largest = x.max(-1, keepdims=True)
    near = np.abs(found / x - 1) <= 1 / 16 + 1 / 256
    assert (near | (x < largest / 1000)).all()
    assert (np.abs(found - x) <= largest / 1000 + x / 15).all()


def test_small_scales_of_a_row_are_a_bfloat16_off():
    """Kernels bound the factor from below: below 1 / 512 it is the bound, which no bfloat16 is a multiple of."""
    x = np.array([[0.0019, 0.0011, 0.0003]], np.float32)
    found = SCALE_RULES["e4m3_of_row"].snap(x)
    factor = np.float32(1 / (448 * 512))
    eighths = ((found / factor).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / 8).astype(ml_dtypes.float8_e4m3fn)
    off = np.abs(eighths.astype(np.float32) * (factor * 8) / found - 1)
    assert 0 < off.max() < 2**-8 and (np.abs(found / x - 1) < 1 / 15).all()


@pytest.mark.parametrize("shape", [(), (1,), (2, 0), (0,), (2, 3)])
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_scales_keep_their_shape(rule: str, shape: tuple[int, ...]) -> None:
    assert tuple(SCALE_RULES[rule].snap(np.full(shape, 0.5, np.float32)).shape) == shape


def test_the_smallest_shared_exponent_is_the_smallest_scale() -> None:
    for rule in ("e8m0", "e8m0_even"):
        for nearest in (SCALE_RULES[rule].snap, of_format("e8m0")):
            assert nearest(np.float32([1e-40, 2.0**-127])).tolist() == [2.0**-127] * 2
