"""Numbers at the boundaries of their formats, against what the formats are defined to be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quark.errors import ConfigError
from quark.numerics.elements import ELEMENTS, Float, Int
from quark.numerics.formats import register_format, unregister_format
from quark.numerics.scales import of_format


@pytest.mark.parametrize("name", [name for name, row in ELEMENTS.items() if isinstance(row, Float)])
def test_nothing_but_nan_stays_nan(name: str) -> None:
    """Also those whose bits are all ones, which rounding in the bits would carry into the sign."""
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000], np.uint32)
    for count in (1, 4):
        assert np.isnan(ELEMENTS[name].round(bits.view(np.float32)[:count])).all()


@pytest.mark.parametrize(("exponent", "mantissa", "works"), [(1, 3, False), (2, 3, True), (2, 0, False), (2, 1, True)])
def test_fields_of_a_registered_float(exponent: int, mantissa: int, works: bool) -> None:
    """With e exponent bits, m mantissa bits and no special codes: the largest is (2 - 2^-m) 2^(2^e - 1 - bias)."""
    bias = (1 << exponent - 1) - 1
    largest = (2 - 2.0**-mantissa) * 2.0 ** ((1 << exponent) - 1 - bias)
    row = Float("e_own_m", exponent, mantissa, largest)
    if not works:
        with pytest.raises(ConfigError, match="two exponent bits and one mantissa bit"):
            register_format(row)
        return
    register_format(row)
    try:
        codes = np.arange(1 << row.bits, dtype=np.uint8)
        fields = [(code >> exponent + mantissa, code >> mantissa & (1 << exponent) - 1, code & (1 << mantissa) - 1)
                  for code in codes.tolist()]  # fmt: skip
        expected = [
            (-1.0) ** sign * math.ldexp(low + (1 << mantissa if high else 0), max(high, 1) - bias - mantissa)
            for sign, high, low in fields
        ]
        assert row.decode(codes).tolist() == expected
    finally:
        unregister_format("e_own_m")


@pytest.mark.parametrize("name", [name for name, row in ELEMENTS.items() if not isinstance(row, Int)])
def test_scales_of_a_format_are_its_positive_values(name: str) -> None:
    """The nearest of all its positive values; what is smaller than each takes the smallest."""
    row = ELEMENTS[name]
    codes = np.arange(1 << row.bits, dtype=row.code_dtype)
    values = row.decode(codes).astype(np.float64)
    values = np.unique(values[np.isfinite(values) & (values > 0)])
    draw = np.random.default_rng(0)
    inside = values[values < 1e30][:-1]
    scales = draw.choice(inside, 200) * draw.uniform(1.01, 1.4, 200)
    scales = np.concatenate([scales, [0.0, 1e-45], values[:3], values[-3:]]).astype(np.float32)
    found = of_format(name)(scales).astype(np.float64)
    distance = np.abs(scales[:, None].astype(np.float64) - values)
    np.testing.assert_array_equal(np.abs(found - scales), distance.min(-1))
    assert np.isin(found, values).all()
