"""Every branch of the helpers of numerics against a few lines of plain Python: bits, limits, powers, blocks, copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quark.numerics import array, granularity
from quark.numerics.affine import Coding
from quark.numerics.blocks import BLOCKS
from quark.numerics.elements import ELEMENTS, Float, Int
from quark.numerics.formats import FORMATS
from quark.numerics.packing import AWQ_ORDER, halves, pack, unpack
from quark.numerics.scales import SCALE_RULES

torch = pytest.importorskip("torch")
BOTH: list[Callable[[Any], Any]] = [np.asarray, torch.from_numpy]


def bytes_of(row: list[int], bits: int, first: str, order: tuple[int, ...] | None, word: int) -> list[int]:
    """A row of codes as bytes, bit by bit."""
    run = len(order) if order else 1
    row = [*row, *[0] * (-len(row) % run)]
    if order:
        row = [row[start + k] for start in range(0, len(row), run) for k in order]
    stream = [(code >> k) & 1 for code in row for k in (range(bits) if first == "low" else range(bits - 1, -1, -1))]
    stream += [0] * (-len(stream) % (8 * word))
    parts = [stream[start : start + 8] for start in range(0, len(stream), 8)]
    places = range(8) if first == "low" else range(7, -1, -1)
    return [sum(bit << place for bit, place in zip(part, places, strict=True)) for part in parts]


@pytest.mark.parametrize("first", ["low", "high"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_bits_of_every_width(bits: int, first: str) -> None:
    rng = np.random.default_rng(bits)
    for count in (1, 3, 7, 8, 16, 29, 64):
        for word in (1, 4) if bits in (2, 3, 4) and first == "low" else (1,):
            for rows in (1, 3):
                codes = rng.integers(0, 1 << bits, (rows, count)).astype(np.uint8)
                wanted = [bytes_of([int(code) for code in row], bits, first, None, word) for row in codes]
                for made in BOTH:
                    packed = pack(made(codes), bits, first, None, word)
                    np.testing.assert_array_equal(np.asarray(packed), np.array(wanted, np.uint8))
                    np.testing.assert_array_equal(np.asarray(unpack(packed, bits, count, first)), codes)


@pytest.mark.parametrize("order", [AWQ_ORDER, halves(8), halves(32)], ids=["AWQ", "8 halves", "32 halves"])
def test_bits_in_an_order(order: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    for count in (len(order), 2 * len(order), 8 * len(order)):
        codes = rng.integers(0, 16, (5, count)).astype(np.uint8)
        wanted = np.array([bytes_of([int(code) for code in row], 4, "low", order, 4) for row in codes], np.uint8)
        across = np.asfortranarray(codes)  # in memory, its columns are rows
        for made in BOTH:
            for given in (codes, across):
                np.testing.assert_array_equal(np.asarray(pack(made(given), 4, "low", order, 4)), wanted)
        np.testing.assert_array_equal(unpack(wanted, 4, count, "low", order), codes)
    assert halves(8) == (0, 4, 1, 5, 2, 6, 3, 7)


@pytest.mark.parametrize("made", BOTH)
@pytest.mark.parametrize(
    ("shape", "bounds"),
    [((), ()), ((5,), ()), ((3, 4), (4,)), ((3, 4), (3, 1)), ((1 << 9, 1 << 8), ()), ((1 << 9, 1 << 8), (1 << 8,))],
)
def test_limits(made: Callable[[Any], Any], shape: tuple[int, ...], bounds: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = np.asarray(3 * rng.standard_normal(shape), np.float32)
    low, high = np.full(bounds, -1.5, np.float32), np.full(bounds, 2.0, np.float32)
    wanted = np.where(x < low, low, np.where(x > high, high, x))
    given = x.copy()
    found = array.clip(made(given), made(low) if bounds else -1.5, made(high) if bounds else 2.0)
    np.testing.assert_array_equal(np.asarray(found), wanted)
    np.testing.assert_array_equal(given, x)  # what was given stays


@pytest.mark.parametrize("made", BOTH)
def test_limits_of_single_numbers(made: Callable[[Any], Any]) -> None:
    for x, wanted in ((-3.0, -1.0), (0.5, 0.5), (7.0, 2.0)):
        assert float(array.clip(made(np.array(x, np.float32)), -1.0, 2.0)) == wanted


@pytest.mark.parametrize("made", BOTH)
def test_powers_of_two_are_exact(made: Callable[[Any], Any]) -> None:
    exponents = np.arange(-160, 129, dtype=np.int32)
    wanted = np.array([math.ldexp(1.0, int(e)) if -149 <= e < 128 else 0.0 if e < 0 else math.inf for e in exponents])
    np.testing.assert_array_equal(np.asarray(array.pow2(made(exponents))), wanted.astype(np.float32))


@pytest.mark.parametrize("made", BOTH)
def test_questions_about_arrays(made: Callable[[Any], Any]) -> None:
    for values, nan in (([1.0, 2.0], False), ([-np.inf, 3.0], False), ([1.0, np.nan], True), ([], False)):
        assert array.has_nan(made(np.array(values, np.float32))) is nan
    for values, limit, reached in (([1, 5], 5, True), ([1, 4], 5, False), ([9, 1], 5, True), ([], 0, False)):
        assert array.reaches(made(np.array(values, np.int32)), limit) is reached
    nothing = made(np.zeros((0, 4), np.float32))
    for name in ("fp8_e5m2", "fp8_e4m3", "int8", "fp4_e2m1"):
        assert tuple(Coding(FORMATS[name]).quantize(nothing, 1.0, 0).shape) == (0, 4)
    assert array.maybe(made(np.array([False, True]))) and not array.maybe(made(np.array([False, False])))
    plain = made(np.ones((2, 2), np.float32))
    assert array.shares_memory(plain) is (made is not np.asarray)
    if made is not np.asarray:
        assert array.shares_memory(torch.nn.Parameter(plain)) and not array.shares_memory(plain.to_sparse())
        assert not array.shares_memory(plain.as_subclass(type("Own", (torch.Tensor,), {})))


@pytest.mark.parametrize("made", BOTH)
@pytest.mark.parametrize(("shape", "axis"), [((3, 8), -1), ((3, 12), 1), ((3, 7), -1), ((4, 3, 2), 1), ((4, 3), 0)])
def test_maxima_and_repeats(made: Callable[[Any], Any], shape: tuple[int, ...], axis: int) -> None:
    x = np.random.default_rng(0).permutation(math.prod(shape)).reshape(shape).astype(np.float32)
    found = np.asarray(array.block_max(made(x), axis))
    np.testing.assert_array_equal(found, x.max(axis=axis, keepdims=True))
    for count in (1, 3, 4, 5, 9):
        found = np.asarray(array.repeat(made(x), count, axis % len(shape)))
        np.testing.assert_array_equal(found, np.repeat(x, count, axis=axis))


@pytest.mark.parametrize(
    ("shape", "wide"), [((3, 1), 1), ((3, 1), 2), ((3, 1), 64), ((3, 1), 65), ((1, 1), 4), ((3, 4), 4)]
)
def test_parameters_are_written_out(shape: tuple[int, ...], wide: int) -> None:
    parameter = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    found = array.spread(parameter, (3, wide))
    np.testing.assert_array_equal(np.broadcast_to(found, (3, wide)), np.broadcast_to(parameter, (3, wide)))
    assert (found.shape[-1] == wide) == ((shape == (3, 1) and 1 < wide <= 64) or shape[-1] == wide)


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("block", range(1, 10))
def test_spans_cover_an_axis_once(length: int, block: int) -> None:
    seen: list[tuple[int, int]] = []
    for span in granularity.spans_of(length, block):
        elements, blocks = range(length)[span.elements], range(-(-length // block))[span.blocks]
        assert math.prod(span.shape) == len(elements)
        parameters = np.broadcast_to(np.arange(len(blocks)).reshape(span.parameter_shape), span.shape).reshape(-1)
        seen += [(element, blocks[index]) for element, index in zip(elements, parameters, strict=True)]
    assert seen == [(element, element // block) for element in range(length)]


@pytest.mark.parametrize("made", BOTH)
def test_zeros_fill_up(made: Callable[[Any], Any]) -> None:
    x = np.ones((2, 3), np.float32)
    wanted = np.zeros((4, 5), np.float32)
    wanted[:2, :3] = 1
    np.testing.assert_array_equal(np.asarray(granularity.pad(made(x), (4, 5))), wanted)
    given = made(x)
    assert granularity.pad(given, (2, 3)) is given


# ---- tables, against the definitions of the formats ------------------------------------------------------------------

#: Block format -> elements, values of a block, rule of its scales (OCP MX 1.0; Microsoft MX and BFP; NVFP4; AMD).
DEFINED = {
    **{f"mx{name}": (element, 32, "e8m0") for name, element in (
        ("int8", "int8"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2"), ("fp6_e3m2", "fp6_e3m2"),
        ("fp6_e2m3", "fp6_e2m3"), ("fp4", "fp4_e2m1"))},
    "bfp16": ("int8", 8, "e8m0"), "mx4": ("int3", 16, "e8m0"), "mx6": ("int5", 16, "e8m0"), "mx9": ("int8", 16, "e8m0"),
    "nvfp4": ("fp4_e2m1", 16, "e4m3"), "amdfp4": ("fp4_e2m1", 16, "e5m3"), "amdfp4_g32": ("fp4_e2m1", 32, "e5m3"),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_of_block_formats(name: str) -> None:
    row, plain = BLOCKS[name], name.removesuffix("_even").removesuffix("_ceil")
    element, size, rule = DEFINED[plain]
    assert (row.element.name, row.size) == (element, size)
    if rule == "e8m0":
        assert row.rule == (f"e8m0{name[len(plain) :]}" if name != plain else BLOCKS[plain].rule)
        assert row.rule.startswith("e8m0")
    else:
        assert row.rule == rule
    whole = isinstance(row.element, Int)
    assert row.unit == (2.0 ** (2 - row.element.bits) if whole else 1.0)
    assert row.narrow == (plain in ("bfp16", "mx4", "mx6", "mx9")) and row.tensor_scale == (plain == "nvfp4")
    assert (row.sub_block, row.shift_bits) == (
        (2, 1) if plain in ("mx4", "mx6", "mx9") else (BLOCKS["mxfp4"].sub_block, 0)
    )


@pytest.mark.parametrize("name", [name for name, row in ELEMENTS.items() if isinstance(row, Float)])
def test_largest_values_of_float_formats_follow_from_their_bits(name: str) -> None:
    row = ELEMENTS[name]
    assert isinstance(row, Float)
    codes = np.arange(1 << row.exponent_bits + row.mantissa_bits)
    values = np.asarray(row.decode(codes.astype(np.int32)))
    finite = values[np.isfinite(values)]
    assert finite.max() == row.max and (np.diff(finite) > 0).all() and finite[0] == 0
    assert row.bits == row.exponent_bits + row.mantissa_bits + row.signed
    assert np.isinf(values).any() == row.has_infinity and np.isnan(values).any() == row.has_nan
    np.testing.assert_array_equal(np.asarray(row.encode(finite)), codes[: len(finite)])
    for made in BOTH:
        empty = row.encode(made(np.zeros(0, np.float32)))
        assert tuple(empty.shape) == (0,)


@pytest.mark.parametrize("name", [name for name, rule in SCALE_RULES.items() if rule.storage is not None])
def test_scales_stay_within_what_their_format_holds(name: str) -> None:
    storage = SCALE_RULES[name].storage
    assert storage is not None
    codes = np.arange(1 << min(storage.bits, 16))
    values = np.asarray(storage.decode(codes.astype(np.int32)))
    positive = values[np.isfinite(values) & (values > 0)]
    low, high = SCALE_RULES[name].snap(np.array([1e-45, 3.4e38], np.float32))
    if name == "power_of_two":  # positions of a binary point, and no exponents of blocks
        assert math.log2(low).is_integer() and math.log2(high).is_integer()
    else:
        assert low == positive.min() or storage.name == "e8m0"
        assert high == positive.max() or storage.name == "e8m0"
        assert storage.name != "e8m0" or {low, high} <= set(positive.tolist())
