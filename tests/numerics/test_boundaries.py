"""Numbers at the boundaries of their formats, against what the formats are defined to be."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quark.errors import ConfigError, DataError
from quark.numerics import ggml, ggml_fit
from quark.numerics.affine import Grid
from quark.numerics.array import reaches
from quark.numerics.blocks import BLOCKS, Block, named
from quark.numerics.elements import ELEMENTS, Float, Int
from quark.numerics.formats import FORMATS, register_format, unregister_format
from quark.numerics.ggml import GGML
from quark.numerics.granularity import Group
from quark.numerics.packing import unpack
from quark.numerics.scales import of_format


@pytest.mark.parametrize("name", ELEMENTS)
def test_values_that_are_coded_without_a_zero_point_have_that_of_0(name: str) -> None:
    row = ELEMENTS[name]
    codes = np.arange(8, dtype=row.code_dtype)
    values = row.decode(codes)
    assert np.array_equal(values, row.decode(codes, 0)) and np.array_equal(row.encode(values), row.encode(values, 0))
    assert np.array_equal(row.encode(values), codes)


@pytest.mark.parametrize("name", [name for name, row in ELEMENTS.items() if isinstance(row, Float)])
def test_nothing_but_nan_stays_nan(name: str) -> None:
    """Also those whose bits are all ones, which rounding in the bits would carry into the sign."""
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000], np.uint32)
    for count in (1, 4):
        assert np.isnan(ELEMENTS[name].round(bits.view(np.float32)[:count])).all()


@pytest.mark.parametrize(
    ("exponent", "mantissa", "works"), [(1, 3, False), (2, 3, True), (2, 0, True), (3, 0, True), (2, 1, True)]
)
def test_fields_of_a_registered_float(exponent: int, mantissa: int, works: bool) -> None:
    """With e exponent bits, m mantissa bits and no special codes: the largest is (2 - 2^-m) 2^(2^e - 1 - bias)."""
    bias = (1 << exponent - 1) - 1
    largest = (2 - 2.0**-mantissa) * 2.0 ** ((1 << exponent) - 1 - bias)
    row = Float("e_own_m", exponent, mantissa, largest)
    if not works:
        with pytest.raises(ConfigError, match="two exponent bits or more"):
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


@pytest.mark.parametrize(("encodes", "rounds"), [(False, True), (True, False), (True, True)])
def test_a_registered_format_rounds_to_its_values_and_codes_them(encodes: bool, rounds: bool) -> None:
    class Own(Float):
        def encode(self, x: Any, *given: Any) -> Any:
            return super().encode(x, *given) ^ (not encodes)

        def round(self, x: Any, *given: Any) -> Any:
            return super().round(x, *given) * (1 if rounds else 2)

    row = Own("e_own_m", 3, 2, 28.0)
    if encodes and rounds:
        register_format(row)
        unregister_format("e_own_m")
        return
    with pytest.raises(ConfigError, match="its codes and values do not belong together"):
        register_format(row)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_the_row_of_its_name_or_the_nearest_in_size(name: str) -> None:
    block = BLOCKS[name]
    assert named(block).name == name
    kin = [row for row in BLOCKS.values() if replace(row, name=name, size=block.size) == block]
    for other in kin:
        assert named(replace(block, size=other.size)).size == other.size
    assert named(replace(block, size=7)).name == name
    with pytest.raises(ConfigError, match="no block format has the elements"):
        named(replace(block, rule="of nobody"))


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


@pytest.mark.parametrize("size", [0, 1, 2])
def test_blocks_and_groups_have_an_element_or_more(size: int) -> None:
    row = Block("own_block", ELEMENTS["fp8_e4m3"], size) if size else None
    if row is None:
        with pytest.raises(ConfigError, match="blocks of one element or more"):
            register_format(Block("own_block", ELEMENTS["fp8_e4m3"], 0))
        with pytest.raises(ConfigError, match="group size 0 must be 1 or more"):
            Group(-1, 0)
        return
    register_format(row)
    unregister_format("own_block")
    assert Group(-1, size).blocks((3, 4)) == (1, size)


def test_scales_that_float16_has_stay_as_they_are() -> None:
    """Others are the next one outward, at most 2^-10 of themselves away."""
    exact = np.arange(0x0400, 0x7C00, 7, dtype=np.uint16).view(np.float16).astype(np.float32)
    exact = np.concatenate([exact, -exact])
    np.testing.assert_array_equal(ggml_fit.not_below(exact), exact)
    found = ggml_fit.not_below(exact[:-1] * np.float32(1 + 2**-13))
    assert (np.abs(found) > np.abs(exact[:-1])).all()
    assert (np.abs(found) <= np.abs(exact[:-1]) * (1 + 2.0**-10)).all()


@pytest.mark.parametrize("factor, kept", [(1.0, True), (1 - 2.0**-20, False)])
def test_the_scale_of_a_tensor_is_a_normal_number_or_one(factor: float, kept: bool) -> None:
    """NVFP4: the largest magnitude / (6 · 448), where that is at least 2^-126."""
    row = FORMATS["nvfp4"]
    assert isinstance(row, Block)
    largest = np.float32(6 * 448 * 2.0**-126 * factor)
    found = row.above(np.array([[largest, 0, -largest / 2]], np.float32), None)
    assert found is not None and float(found) == (2.0**-126 if kept else 1.0)


@pytest.mark.parametrize("units", [1.0, 1 - 2.0**-20])
def test_the_scale_of_a_range_is_a_normal_number_or_one(units: float) -> None:
    """Of int8 the range / 127, where that is at least 2^-126."""
    high = np.float64(127 * 2.0**-126 * units)
    scale, _ = Grid(FORMATS["int8"]).parameters(-high, high)
    assert float(scale) == (2.0**-126 if units == 1 else 1.0)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_bits_of_a_value_are_those_of_its_codes_and_its_share_of_scales(name: str) -> None:
    """Counted in the arrays of codes: 8 bits of scale per block, one of shift per pair where there are pairs."""
    block, x = BLOCKS[name], np.ones((2, 64), np.float32)
    codes = block.encode(x)
    shifts = 0 if codes.shift is None else codes.shift.size
    assert block.bits * x.size == block.element.bits * x.size + 8 * codes.scale.size + shifts


def test_a_block_without_minima_keeps_the_scale_of_least_squares() -> None:
    """Where no multiple of the minimum is used nothing is known of it, and the scale alone is fitted."""
    row = GGML["q4_k"]
    draw = np.random.default_rng(3)
    x = np.abs(draw.standard_normal((2, 8, 32))).astype(np.float32)
    codes = np.rint(x * 5).astype(np.float32)
    zeros = np.zeros((2, 8), np.float32)
    found = ggml.Fields(np.full(2, 9, np.float32), np.full(2, 0.25, np.float32), zeros + 2, zeros, codes)
    fitted = ggml.refitted(found, x, np.ones_like(x))
    flat = 2 * codes.reshape(2, -1).astype(np.float64)
    expected = (flat * x.reshape(2, -1)).sum(-1) / np.square(flat).sum(-1)
    np.testing.assert_allclose(fitted.d, expected, rtol=2**-10)
    np.testing.assert_array_equal(fitted.dmin, np.full(2, 0.25, np.float32))
    assert row.units == 63


def test_a_minimum_that_least_squares_makes_nothing_of_is_none() -> None:
    """Values that codes and scales give exactly, beside minima that are not needed: d = 2 and dmin = 0."""
    codes = np.zeros((1, 8, 32), np.float32)
    codes[..., 1::2] = 4
    ones = np.ones((1, 8), np.float32)
    found = ggml.Fields(np.full(1, 9, np.float32), np.full(1, 0.25, np.float32), ones, ones, codes)
    fitted = ggml.refitted(found, 2 * codes, np.ones_like(codes))
    assert (float(fitted.d[0]), float(fitted.dmin[0])) == (2.0, 0.0)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_one_value_among_many_blocks_that_is_no_number_is_refused(name: str, value: float) -> None:
    block = BLOCKS[name]
    x = np.ones((2, 4 * min(block.size, 64)), np.float32)
    x[1, -1] = value
    with pytest.raises(DataError, match="cannot store an infinity or a NaN"):
        block.encode(x)


def test_one_block_among_many_whose_scale_is_too_large_is_refused() -> None:
    block = replace(BLOCKS["bfp16"], carry=True, narrow=False)
    x = np.ones((2, 32), np.float32)
    block.encode(x)
    x[0, 0] = np.finfo(np.float32).max
    with pytest.raises(DataError, match="needs a scale above"):
        block.encode(x)


def test_values_whose_squares_are_no_floats_get_the_step_of_their_range() -> None:
    x = np.linspace(-1, 1, 32, dtype=np.float32)[None] * np.float32(1e25)
    with np.errstate(over="ignore", invalid="ignore"):
        wide, low = ggml_fit.fit_affine(x, np.ones_like(x), 15, False)
    assert (wide, low) == (pytest.approx(2e25 / 15, rel=1e-6), pytest.approx(-1e25, rel=1e-6))


@pytest.mark.parametrize("name", [name for name, row in GGML.items() if row.signed and row.units == 1])
def test_rows_are_held_up_to_the_largest_scale_of_float16(name: str) -> None:
    row = GGML[name]
    top = np.float32(65504) * np.float32(row.largest)
    for value, held in ((top, True), (np.nextafter(top, np.float32(np.inf)), False), (np.float32(0), True)):
        assert row.held(np.array([[value, 0], [top, 1]], np.float32)) is held


@pytest.mark.parametrize("name", [name for name, row in ELEMENTS.items() if row.bits <= 8])
def test_a_format_has_what_its_codes_decode_to(name: str) -> None:
    row = ELEMENTS[name]
    if isinstance(row, Int):
        return
    values = np.asarray(row.decode(np.arange(1 << row.bits, dtype=np.uint8)))
    assert row.has_nan == np.isnan(values).any()
    finite = values[np.isfinite(values)]
    assert (float(row.max), row.signed) == (float(finite.max()), bool((finite < 0).any()))
    if isinstance(row, Float):
        assert (finite.max() - finite.min()) / row.divisor(False, False) == 1 == finite.max() / row.divisor(True, False)


@pytest.mark.parametrize("name", [name for name, row in FORMATS.items() if not row.has_zero_point])
def test_a_format_without_zero_points_has_0_in_the_middle(name: str) -> None:
    assert FORMATS[name].middle == 0 == ELEMENTS["e8m0"].middle


@pytest.mark.parametrize("kind", GGML)
def test_the_least_scale_that_float16_holds_is_held(kind: str) -> None:
    """2**-18, or 2**-21 where multiples of it make up for lost digits; half of that is not."""
    row = GGML[kind]
    least = 2.0 ** (-18 if row.units == 1 else -21) * row.largest * row.units
    assert row.held(np.full((2, row.size), least, np.float32))
    assert not row.held(np.array([[1.0] * row.size, [least / 2] * row.size], np.float32))


@pytest.mark.parametrize("name", BLOCKS)
def test_one_number_and_columns_of_two_are_blocks_like_others(name: str) -> None:
    row, x = BLOCKS[name], np.random.default_rng(3).normal(size=(40, 2)).astype(np.float32)
    assert np.array_equal(row.round(x, 0), row.round(np.ascontiguousarray(x.T), 1).T)
    one = np.float32(0.75)
    assert row.decode(row.encode(one)).tolist() == row.decode(row.encode(np.array([one]))).tolist()


@pytest.mark.parametrize(
    ("name", "infinity", "nan"),
    [
        ("fp8_e4m3", 0x7F, 0x7F),  # no infinity: the code of NaN stands for it
        ("fp8_e5m2", 0x7C, 0x7E),
        ("float16", 0x7C00, 0x7E00),
        ("bfloat16", 0x7F80, 0x7FC0),
    ],
)
def test_codes_of_what_is_no_number(name: str, infinity: int, nan: int) -> None:
    row: Any = ELEMENTS[name]
    assert (row.infinity_code, row.nan_code) == (infinity, nan)


@pytest.mark.parametrize(("values", "expected"), [([1, 5], True), ([1, 6], True), ([1, 4], False), ([], False)])
def test_a_limit_is_reached_where_a_value_equals_it(values: list[int], expected: bool) -> None:
    assert reaches(np.array(values, np.int32), 5) is expected


@pytest.mark.parametrize("name", [name for name, row in ELEMENTS.items() if isinstance(row, Float)])
@pytest.mark.parametrize("rule", ["half_even", "half_up", "floor"])
def test_zero_keeps_its_sign_where_the_format_has_one(name: str, rule: Any) -> None:
    row: Any = ELEMENTS[name]
    found = row.round(np.array([-0.0, 0.0], np.float32), rule)
    assert found.tolist() == [0, 0] and np.signbit(found).tolist() == [row.signed, False]


@pytest.mark.parametrize(("axis", "works"), [(-1, True), (1, True), (0, False), (-2, False)])
def test_blocks_of_ggml_run_along_the_last_axis_by_either_number(axis: int, works: bool) -> None:
    row, x = GGML["q8_0"], np.ones((32, 32), np.float32)
    with nullcontext() if works else pytest.raises(ConfigError, match="along the last axis"):
        assert row.rows(x, axis).shape == x.shape


@pytest.mark.parametrize(("bytes_", "count", "bits"), [(8, 8, 8), (1, 2, 4), (3, 8, 3), (7, 9, 6)])
def test_codes_that_rows_are_too_short_for_are_refused(bytes_: int, count: int, bits: int) -> None:
    row = np.zeros((1, bytes_), np.uint8)
    assert unpack(row, bits, count).shape == (1, count)
    with pytest.raises(ConfigError, match=f"{bytes_} bytes do not hold {count + 1} codes"):
        unpack(row, bits, count + 1)


@pytest.mark.parametrize("size", [0, 1, 2])
def test_a_group_has_one_number_at_least(size: int) -> None:
    with nullcontext() if size else pytest.raises(ConfigError, match="must be 1 or more"):
        assert Group(0, size).blocks((4, 3)) == (size, 1)
