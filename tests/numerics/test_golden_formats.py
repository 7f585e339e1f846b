"""Every element format against ml_dtypes: values, codes, and the saturating convention."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from quark.numerics.affine import Coding
from quark.numerics.formats import FORMATS, Float

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("torch_path")

NAMES = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "e4m3fn": "fp8_e4m3",
    "e5m2": "fp8_e5m2",
    "e3m2": "fp6_e3m2",
    "e2m3": "fp6_e2m3",
    "e2m1": "fp4_e2m1",
}
WITH_ML_DTYPE = [row for row in FORMATS.values() if isinstance(row, Float) and row.ml_dtype]


def bits(x: np.ndarray) -> np.ndarray:
    """The bits of float32, one pattern for all NaN: what "bit for bit" compares."""
    x = np.asarray(x, np.float32)
    return np.where(np.isnan(x), 0x7FC00000, x.view(np.int32))


def with_saturation(name: str, saturates: bool) -> Float:
    row = FORMATS[NAMES[name]]
    assert isinstance(row, Float)
    return replace(row, saturates=saturates)


@pytest.mark.parametrize("name", NAMES)
def test_saturating_cast(vectors, name):
    arrays, _ = vectors("formats.npz")
    x, expected = arrays["input"], arrays[f"{name}.sat_value"]
    row = with_saturation(name, True)
    np.testing.assert_array_equal(bits(row.round(x)), bits(expected))
    np.testing.assert_array_equal(bits(row.round(torch.from_numpy(x)).numpy()), bits(expected))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "e4m3fn", "e5m2"])
def test_overflowing_cast(vectors, name):
    arrays, _ = vectors("formats.npz")
    x, expected = arrays["input"], arrays[f"{name}.value"]
    row = with_saturation(name, False)
    np.testing.assert_array_equal(bits(row.round(x)), bits(expected))
    np.testing.assert_array_equal(bits(row.round(torch.from_numpy(x)).numpy()), bits(expected))
    codes = Coding(row).quantize(x, 1.0, 0)
    sign_of_nan = np.isnan(x) | (np.isnan(expected) & np.isinf(x))  # a NaN has no sign worth a test
    assert np.array_equal(codes[~sign_of_nan], arrays[f"{name}.code"][~sign_of_nan])
    np.testing.assert_array_equal(bits(Coding(row).dequantize(codes, 1.0, 0)), bits(expected))


@pytest.mark.parametrize("name", ["e3m2", "e2m3", "e2m1"])
def test_codes_of_formats_without_nan(vectors, name):
    arrays, _ = vectors("formats.npz")
    number = ~np.isnan(arrays["input"])  # ml_dtypes turns NaN into -0 here; `quantize` refuses it
    x, row = arrays["input"][number], FORMATS[NAMES[name]]
    np.testing.assert_array_equal(Coding(row).quantize(x, 1.0, 0), arrays[f"{name}.code"][number])
    np.testing.assert_array_equal(
        Coding(row).quantize(torch.from_numpy(x), 1.0, 0).numpy(), arrays[f"{name}.code"][number]
    )


def test_e8m0(vectors):
    arrays, _ = vectors("formats.npz")
    x, row = arrays["input"], FORMATS["e8m0"]
    # ml_dtypes takes subnormals strictly between 2**-127 and 1.5 * 2**-127 to 2**-126; the nearest power is 2**-127.
    wrong = (x > 2.0**-127) & (x < 1.5 * 2.0**-127)
    expected = np.where(wrong, np.float32(2.0**-127), arrays["e8m0.value"])
    np.testing.assert_array_equal(bits(row.round(x)), bits(expected))
    np.testing.assert_array_equal(Coding(row).quantize(x, 1.0, 0), np.where(wrong, 0, arrays["e8m0.code"]))


def test_e5m3(vectors):
    arrays, _ = vectors("formats.npz")
    x = arrays["input"]
    # the peer turns NaN into 98304; NaN should stay NaN.
    expected = np.where(np.isnan(x), x, arrays["peer.e5m3.value"])
    np.testing.assert_array_equal(FORMATS["e5m3"].round(x), expected)


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3fn", "e5m2"])
def test_torch_peer(vectors, name):
    arrays, _ = vectors("formats.npz")
    x, expected = arrays["input"], arrays[f"peer.{name}.value"]
    row = FORMATS[NAMES[name]]
    if row.bits < 8:  # the peer passes infinities of the small formats on; here they saturate
        expected = np.where(np.isinf(x), np.copysign(np.float32(row.max), x), expected)
    np.testing.assert_array_equal(row.round(x), expected)  # by value: the peer loses the sign of zero


@pytest.mark.parametrize(
    "row", [r for r in FORMATS.values() if isinstance(r, Float) and r.ml_dtype], ids=lambda r: r.name
)
def test_every_code_decodes_as_in_ml_dtypes(row):
    codes = np.arange(1 << row.bits, dtype=row.code_dtype)
    dtype = np.dtype(getattr(ml_dtypes, row.ml_dtype, row.ml_dtype))
    with np.errstate(invalid="ignore"):
        expected = codes.view(dtype).astype(np.float32)
    np.testing.assert_array_equal(bits(Coding(row).dequantize(codes, 1.0, 0)), bits(expected))
    np.testing.assert_array_equal(bits(Coding(row).dequantize(torch.from_numpy(codes), 1.0, 0).numpy()), bits(expected))


@pytest.mark.parametrize("row", WITH_ML_DTYPE, ids=lambda r: r.name)
def test_every_float16_and_bfloat16_input(row):
    """All 2**16 bfloat16 and all 2**16 float16 inputs against the ml_dtypes cast (saturating rows: clipped first)."""
    dtype = np.dtype(getattr(ml_dtypes, row.ml_dtype, row.ml_dtype))
    patterns = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        for x in (patterns.view(ml_dtypes.bfloat16), patterns.view(np.float16)):
            wide = x.astype(np.float32)
            clipped = np.clip(wide, row.min, row.max) if row.saturates else wide
            expected = np.where(np.isnan(wide), wide, clipped.astype(dtype).astype(np.float32))
            np.testing.assert_array_equal(bits(row.round(wide)), bits(expected))
