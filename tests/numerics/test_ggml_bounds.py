"""Which rows float16 scales of GGUF types hold: from the smallest scale with digits enough to the largest number."""

from __future__ import annotations

import numpy as np
import pytest

from quark.numerics.ggml import GGML

LEAST, COARSE, MOST = 2.0**-18, 2.0**-21, 65504.0


def beside(value: float, way: int) -> float:
    return float(np.nextafter(np.float32(value), np.float32(way * np.inf)))


@pytest.mark.parametrize("name", GGML)
def test_rows_that_float16_has_scales_for(name: str) -> None:
    """A scale is the largest magnitude over the codes (and units of a K-quant, whose minima are multiples of one)."""
    row = GGML[name]
    parts = row.largest * row.units
    least = (COARSE if row.units > 1 else LEAST) * parts
    most = MOST * (parts if row.signed else row.units)
    table = {0.0: True, least: True, beside(least, -1): False, 1.0: True, most: True, beside(most, 1): False}
    for value, expected in table.items():
        for sign in (1, -1):
            assert row.held(np.array([[0.0, sign * value]], np.float32)) is expected, (name, value)
    assert not row.held(np.array([[1.0, 1.0], [beside(least, -1), 0.0]], np.float32))


@pytest.mark.parametrize("name", GGML)
def test_bits_count_the_scales(name: str) -> None:
    """The bytes of a block as ggml has them (ggml-common.h), over its 32 or 256 values."""
    sizes = {
        "q4_0": 18,
        "q4_1": 20,
        "q5_0": 22,
        "q5_1": 24,
        "q8_0": 34,
        "q2_k": 84,
        "q3_k": 110,
        "q4_k": 144,
        "q5_k": 176,
        "q6_k": 210,
    }
    assert GGML[name].bits == 8 * sizes[name] / (256 if name.endswith("k") else 32)
