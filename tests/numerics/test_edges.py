"""Values and arguments at the very edges: what is not finite, nothing at all, the last bit of a limit."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quark.errors import DataError
from quark.numerics.affine import bounds
from quark.numerics.array_files import load_array
from quark.numerics.blocks import BLOCKS, largest_finite
from quark.numerics.elements import ELEMENTS, Float
from quark.numerics.formats import FORMATS
from quark.numerics.granularity import Block2D, Channel, Group, Tensor, Token
from quark.numerics.metrics import cosine

torch = pytest.importorskip("torch")
BOTH: list[Callable[[Any], Any]] = [np.asarray, torch.from_numpy]
SPOILT = [np.inf, -np.inf, np.nan]


# ---- what is not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", BOTH)
@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("shape", [(4, 32), (300, 512)], ids=["one piece", "several pieces"])
def test_what_is_not_finite_does_not_count_for_the_largest(
    made: Callable[[Any], Any], spoilt: float, shape: tuple[int, int]
) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    largest = float(np.abs(x[:, 1:]).max())
    x[:, 0] = spoilt
    assert float(largest_finite(made(x))) == largest
    assert float(largest_finite(made(x[:, :1]))) == 0.0
    assert float(largest_finite(made(x[:0]))) == 0.0


@pytest.mark.parametrize("made", BOTH)
@pytest.mark.parametrize("name", [name for name, row in BLOCKS.items() if row.nonfinite == "copy"])
def test_a_block_format_rounds_the_others_as_if_it_were_not_there(name: str, made: Callable[[Any], Any]) -> None:
    """In NVFP4 one infinity once made every value of the tensor NaN."""
    row = FORMATS[name]
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    x[1, 5] = 0.0
    expected = np.asarray(row.round(made(x)))
    for spoilt in SPOILT:
        given = x.copy()
        given[1, 5] = spoilt
        found = np.asarray(row.round(made(given)))
        np.testing.assert_array_equal(found[1, 5], spoilt)
        found[1, 5] = expected[1, 5]
        np.testing.assert_array_equal(found, expected)


# ---- floats by their definition --------------------------------------------------------------------------------------


def value_of(code: int, row: Float) -> float:
    """What the fields of a code mean, in float64."""
    sign = -1.0 if row.signed and code >> row.exponent_bits + row.mantissa_bits else 1.0
    exponent = code >> row.mantissa_bits & (1 << row.exponent_bits) - 1
    fraction = (code & (1 << row.mantissa_bits) - 1) / (1 << row.mantissa_bits)
    bias = 2 ** (row.exponent_bits - 1) - 1
    ones = exponent == (1 << row.exponent_bits) - 1
    if row.has_infinity and ones:
        return sign * np.inf if fraction == 0 else np.nan
    if row.has_nan and not row.has_infinity and ones and fraction == 1 - 2.0**-row.mantissa_bits:
        return np.nan
    return sign * (fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))


FLOATS = [row for row in ELEMENTS.values() if isinstance(row, Float)]


@pytest.mark.parametrize("made", BOTH)
@pytest.mark.parametrize("row", FLOATS, ids=lambda row: row.name)
def test_every_code_means_what_its_fields_say(row: Float, made: Callable[[Any], Any]) -> None:
    codes = np.arange(1 << row.bits, dtype=row.code_dtype)
    wanted = np.array([value_of(int(code), row) for code in codes], np.float32)
    given = codes.astype(np.int32) if row.bits > 8 and made is not np.asarray else codes
    np.testing.assert_array_equal(np.asarray(row.decode(made(given))), wanted)
    assert row.max == np.nanmax(np.where(np.isinf(wanted), np.nan, wanted))
    number = np.isfinite(wanted)
    np.testing.assert_array_equal(np.asarray(row.encode(made(wanted[number]))).astype(codes.dtype), codes[number])
    np.testing.assert_array_equal(np.asarray(row.round(made(wanted[number]))), wanted[number])


@pytest.mark.parametrize("made", BOTH)
@pytest.mark.parametrize("row", FLOATS, ids=lambda row: row.name)
def test_between_two_values_the_nearer_one_is_taken_and_ties_go_to_even_codes(
    row: Float, made: Callable[[Any], Any]
) -> None:
    """At every midpoint of neighbours, and one float32 to either side of it."""
    codes = np.arange(1 << row.exponent_bits + row.mantissa_bits)
    values = np.array([value_of(int(code), row) for code in codes])
    keep = np.isfinite(values)
    codes, values = codes[keep], values[keep].astype(np.float32)
    exact = (values[1:].astype(np.float64) + values[:-1]) / 2
    middle = exact.astype(np.float32)
    halfway = middle.astype(np.float64) == exact  # representable, so a tie
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))
    even = np.where(codes[1:] % 2 == 0, values[1:], values[:-1])
    np.testing.assert_array_equal(np.asarray(row.round(made(middle)))[halfway], even[halfway])
    usable = (below >= values[:-1]) & (above <= values[1:])
    np.testing.assert_array_equal(np.asarray(row.round(made(below)))[usable], values[:-1][usable])
    np.testing.assert_array_equal(np.asarray(row.round(made(above)))[usable], values[1:][usable])


@pytest.mark.parametrize("name", [name for name, row in ELEMENTS.items() if not isinstance(row, Float)])
def test_codes_of_integers_and_powers(name: str) -> None:
    row: Any = ELEMENTS[name]
    if name == "e8m0":
        codes = np.arange(255, dtype=np.uint8)
        np.testing.assert_array_equal(row.decode(codes), (2.0 ** (codes.astype(float) - 127)).astype(np.float32))
        np.testing.assert_array_equal(row.encode(row.decode(codes)), codes)
        assert np.isnan(row.decode(np.array([255], np.uint8))).all()
        return
    bits = int(name.removeprefix("u").removeprefix("int"))
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if name[0] == "i" else (0, 2**bits - 1)
    assert (row.bits, row.min, row.max, row.middle) == (bits, low, high, 0 if name[0] == "i" else 2 ** (bits - 1))
    assert row.divisor(False, False) == row.divisor(False, True) == high - low
    assert row.divisor(True, True) == 2 ** (bits - 1) - 1 and row.divisor(True, False) == (high - low) / 2
    assert np.iinfo(row.code_dtype).min <= low and np.iinfo(row.code_dtype).max >= high
    assert np.iinfo(row.code_dtype).bits == min(size for size in (8, 16, 32) if size >= bits)
    exact = np.float32 if bits <= 23 else np.float64
    assert row.work_dtype == np.dtype(exact).name
    edge = np.array([low, low + 1, -1, 0, 1, high - 1, high], np.float64).astype(exact)
    placed = np.clip(edge, low, high)
    if bits <= 16:
        np.testing.assert_array_equal(row.round(edge), placed)
        np.testing.assert_array_equal(row.round(np.array([low - 1.0, high + 1.0, -np.inf, np.inf])), [low, high] * 2)


# ---- nothing, and too much -------------------------------------------------------------------------------------------


def header(text: str, version: int = 1) -> bytes:
    size = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + size + text.encode("latin-1")


@pytest.mark.parametrize(
    ("descr", "shape", "told"),
    [
        ("|u1", "9223372036854775807,", "its shape"),
        ("<f2", f"{2**62 // 10},10", "promises 9223372036854775800 bytes"),
        ("<f2", f"{2**31}, {2**31}", "its shape"),
        ("<f2", f"{2**31}, {2**31 - 1}", "promises 9223372032559808512 bytes"),
        ("<f8", f"{2**30}, {2**30}", "its shape"),
        ("|u1", "1," * 33, "its shape"),
        ("|u1", "1," * 32, "promises 1 bytes"),
        ("|u1", f"{10**18 - 1},", "promises"),
        ("|u1", f"{10**18},", "its shape"),
    ],
)
def test_shapes_beyond_all_memory(descr: str, shape: str, told: str, tmp_path: Path) -> None:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}\n"
    (tmp_path / "a.npy").write_bytes(header(text))
    with pytest.raises(DataError, match=told):
        load_array(tmp_path / "a.npy")


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**16 + 1])
def test_headers_are_as_long_as_they_may_be(version: int, size: int, tmp_path: Path) -> None:
    if version == 1 and size >= 2**16:
        return
    text = "{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }"
    (tmp_path / "a.npy").write_bytes(header(text + " " * (size - len(text)), version) + b"abc")
    if size > 2**16:
        with pytest.raises(DataError, match="does not say what type"):
            load_array(tmp_path / "a.npy")
    else:
        assert load_array(tmp_path / "a.npy").tolist() == [97, 98, 99]


@pytest.mark.parametrize(
    ("granularity", "shape", "grid", "parameters"),
    [
        (Token(), (), (), ()),
        (Token(), (5,), (1,), ()),
        (Token(), (2, 5), (2, 1), (2,)),
        (Tensor(), (2, 5), (1, 1), ()),
        (Channel(1), (2, 5), (1, 5), (5,)),
        (Channel(-2), (2, 5), (2, 1), (2,)),
        (Group(-1, 2), (2, 5), (2, 3), (2, 3)),
        (Group(0, 2), (2, 5), (1, 5), (1, 5)),
        (Group(-1, 7), (2, 5), (2, 1), (2, 1)),
        (Block2D(2, 3), (3, 4, 5), (3, 2, 2), (3, 2, 2)),
    ],
    ids=str,
)
def test_how_many_parameters_there_are(
    granularity: Any, shape: tuple[int, ...], grid: tuple[int, ...], parameters: tuple[int, ...]
) -> None:
    assert tuple(granularity.grid(shape)) == grid
    assert tuple(granularity.parameter_shape(shape)) == parameters


def test_zero_points_have_the_narrowest_type_that_holds_every_code() -> None:
    wide = {name for name, row in ELEMENTS.items() if row.has_zero_point and row.zero_dtype == "int64"}
    assert wide == {"uint32"}
    assert all(row.zero_dtype == "int32" for name, row in ELEMENTS.items() if name not in wide)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "e4m3", "e5m3", "e8m0"])
def test_a_scale_is_never_below_the_smallest_that_its_format_has(name: str) -> None:
    from quark.numerics.scales import SCALE_RULES

    element: Any = SCALE_RULES[name].storage
    smallest = float(
        element.decode(np.array([0 if name == "e8m0" else 1], np.uint16 if element.bits > 8 else np.uint8))[0]
    )
    given = np.array([1e-45, smallest, smallest * 1.25, 3e38], np.float32)
    found = SCALE_RULES[name].snap(given)
    assert (found[:3] == np.float32(smallest)).all() and found[3] == np.float32(min(element.max, found[3])) > 0


@pytest.mark.parametrize("made", BOTH)
@pytest.mark.parametrize("name", ["mx4", "mx6", "mx9"])
def test_subnormal_inputs_count_as_zero_and_the_smallest_normal_does_not(name: str, made: Callable[[Any], Any]) -> None:
    """A block of numbers around 2**-126: the smallest normal number is kept, the float32 below it is 0."""
    smallest = np.float32(2.0**-126)
    x = np.zeros((1, 16), np.float32)
    x[0, :6] = smallest, np.nextafter(smallest, np.float32(0)), -smallest, smallest * 2, 1.5 * smallest, -smallest
    found = np.asarray(FORMATS[name].round(made(x)))
    np.testing.assert_array_equal(found[0, :6], x[0, :6] * [1, 0, 1, 1, 1, 1])


#: Exponent bits, mantissa bits, sign bits: IEEE 754, the upper half of float32, OCP's formats, E5M3 without sign.
FIELDS = {
    "float16": (5, 10, 1), "bfloat16": (8, 7, 1), "fp8_e4m3": (4, 3, 1), "fp8_e5m2": (5, 2, 1), "e5m3": (5, 3, 0),
    "fp6_e3m2": (3, 2, 1), "fp6_e2m3": (2, 3, 1), "fp4_e2m1": (2, 1, 1),
}  # fmt: skip
#: Infinity, NaN, saturation, a scale of 1: what overflows is infinite in the 16-bit types, the largest value in others.
WHAT = dict.fromkeys(("float16", "bfloat16"), (True, True, False, True))
WHAT |= {
    "fp8_e4m3": (False, True, True, False),
    "fp8_e5m2": (True, True, True, False),
    "e5m3": (False, True, True, False),
}
WHAT |= dict.fromkeys(("fp6_e3m2", "fp6_e2m3", "fp4_e2m1"), (False, False, True, False))


@pytest.mark.parametrize("name", FIELDS)
def test_rows_of_float_formats(name: str) -> None:
    row: Any = ELEMENTS[name]
    assert (row.exponent_bits, row.mantissa_bits, int(row.signed)) == FIELDS[name]
    assert row.bits == sum(FIELDS[name]) and row.code_dtype == ("uint16" if row.bits > 8 else "uint8")
    assert (row.has_infinity, row.has_nan, row.saturates, row.unit_scale) == WHAT[name]
    assert row.min == (-row.max if row.signed else 0.0) and row.rounding_bits == row.mantissa_bits


def test_every_float_format_has_its_fields_here() -> None:
    assert {row.name for row in FLOATS} == set(FIELDS) == set(WHAT)


#: The largest element of a block format, and its unit times the largest scale (by the texts of OCP and AMD).
LARGEST = {
    "mxint8": (127, 2.0**-6 * 2.0**127), "mxfp8_e4m3": (448, 2.0**127), "mxfp8_e5m2": (57344, 2.0**127),
    "mxfp6_e3m2": (28, 2.0**127), "mxfp6_e2m3": (7.5, 2.0**127), "mxfp4": (6, 2.0**127),
    "bfp16": (127, 2.0**-6 * 2.0**127), "mx4": (3, 2.0**-1 * 2.0**127), "mx6": (15, 2.0**-3 * 2.0**127),
    "mx9": (127, 2.0**-6 * 2.0**127), "nvfp4": (6, 448),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_value_of_a_block_format(name: str) -> None:
    element, unit = LARGEST[name]
    assert (BLOCKS[name].max, BLOCKS[name].min) == (element * unit, -element * unit)


@pytest.mark.parametrize(
    ("shape", "expected"), [((4, 1), (4, 1)), ((1, 4), (1, 4)), ((2, 0, 3), (1, 1, 3)), ((2, 3, 0), (1, 3, 1))]
)
def test_blocks_are_no_larger_than_the_tensor(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert Block2D(128, 128).blocks(shape) == expected


def test_no_angle_has_a_cosine_above_one() -> None:
    """Rounding gives some vectors one of 1 + 2**-52 with themselves."""
    for seed in range(200):
        x = np.random.default_rng(seed).standard_normal(7)
        assert 1 - 1e-12 < cosine(x, x) <= 1 and -1 <= cosine(x, -x) < -1 + 1e-12


@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("place", [0, 1])
def test_every_side_of_every_range_is_finite(spoilt: float, side: int, place: int) -> None:
    sides = [np.array([-1.0, -2.0]), np.array([1.0, 2.0])]
    np.testing.assert_array_equal(bounds(*sides), sides)
    sides[side][place] = spoilt
    with pytest.raises(DataError, match="a range must be finite"):
        bounds(*sides)
