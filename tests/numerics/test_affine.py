"""Grids and affine arithmetic on values worked out by hand, and every kind of input."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from quark.errors import ConfigError, DataError
from quark.numerics.affine import Coding, Grid
from quark.numerics.blocks import Block
from quark.numerics.formats import FORMATS, get_format
from quark.numerics.granularity import Channel, Group, Tensor
from quark.numerics.rounding import RULES, half_even
from quark.numerics.scales import SCALE_RULES

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("torch_path")

INT8, UINT8, INT4 = FORMATS["int8"], FORMATS["uint8"], FORMATS["int4"]


@pytest.mark.parametrize(
    ("grid", "lo", "hi", "scale", "zero"),
    [
        (Grid(INT8), -1.0, 2.54, 2.54 / 127, 0),
        (Grid(INT8, narrow=False), -1.0, 2.0, 2.0 / 127.5, 0),
        (Grid(INT4, narrow=False), -1.0, 2.0, 2.0 / 7.5, 0),
        (Grid(UINT8), -1.0, 2.54, 2.54 / 127, 128),
        (Grid(UINT8, symmetric=False), -1.0, 2.0, 3 / 255, 85),
        (Grid(INT8, symmetric=False), -1.0, 2.0, 3 / 255, -43),
        (Grid(FORMATS["uint4"], symmetric=False), -1.0, 2.0, 0.2, 5),
        (Grid(UINT8, symmetric=False), 1.0, 5.1, 5.1 / 255, 0),  # 0 is forced into the range
        (Grid(INT8, symmetric=False), -2.55, -1.0, 0.01, 127),
        (Grid(INT8, scale_rule="power_of_two"), -1.0, 1.0, 2.0**-7, 0),
        (Grid(UINT8, scale_rule="power_of_two"), -1.0, 1.0, 2.0**-7, 128),
        (Grid(FORMATS["fp8_e4m3"]), -3.0, 1.0, 3 / 448, 0),
        (Grid(FORMATS["fp8_e4m3"], symmetric=False), -3.0, 1.0, 3 / 448, 0),  # floats have no zero point
        (Grid(FORMATS["bfloat16"]), -3.0, 1.0, 1.0, 0),
        (Grid(FORMATS["fp4_e2m1"], scale_rule="e8m0_floor"), -7.9, 1.0, 1.0, 0),
        (Grid(FORMATS["mxfp4"]), -3.0, 1.0, 1.0, 0),
        (Grid(FORMATS["nvfp4"]), -3.0, 1.0, 3 / (448 * 6), 0),
        (Grid(FORMATS["uint32"]), -1.0, 1.0, 1 / (2**31 - 1), 2**31),
        (Grid(INT8), 0.0, 0.0, 1.0, 0),
        (Grid(UINT8, symmetric=False), 0.0, 0.0, 1.0, 0),
        (Grid(INT8), -1e-44, 1e-44, 1.0, 0),  # the scale would be subnormal
        (Grid(INT8), -3.4e38, 3.4e38, float(np.finfo(np.float32).max) / 2 / 127, 0),
    ],
)
def test_parameters(grid, lo, hi, scale, zero):
    found = grid.parameters(lo, hi)
    assert found[0].dtype == np.float32
    assert found[0] == np.float32(scale)
    assert found[1] == zero
    if grid.centred:  # beside a usual range too
        widest = np.maximum(-np.minimum(lo, 0.0), np.maximum(hi, 0.0))
        np.testing.assert_array_equal(grid.scales(np.array([widest, 1.0]))[:1], found[0])
        assert grid.scales(torch.tensor([widest], dtype=torch.float64)).numpy() == found[0]


def test_parameters_of_many_ranges_at_once():
    lo, hi = np.array([[-1.0, 0.0], [-4.0, -3.0]]), np.array([[1.27, 12.7], [0.0, 0.0]])
    scale, zero = Grid(INT8).parameters(lo, hi)
    np.testing.assert_array_equal(scale, np.array([[0.01, 0.1], [4 / 127, 3 / 127]], np.float32))
    assert zero.shape == (2, 2) and zero.dtype == np.int32 and not zero.any()


def test_a_range_must_be_finite_and_ordered():
    for lo, hi in ((0.0, np.inf), (np.nan, 1.0)):
        with pytest.raises(DataError, match="finite"):
            Grid(INT8).parameters(lo, hi)
        with pytest.raises(DataError, match="finite"):
            Grid(INT8).scales(np.array([1.0, max(abs(lo), hi), 2.0]))
    with pytest.raises(DataError, match="empty"):
        Grid(INT8).parameters(1.0, 0.5)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.has_zero_point])
def test_zero_is_exact(name, symmetric):
    row = FORMATS[name]
    for lo, hi in ((-0.3, 0.7), (0.2, 0.9), (-5.0, -1.0), (-1e-3, 1e4)):
        scale, zero = Grid(row, symmetric).parameters(lo, hi)
        assert Coding(row).fake_quantize(np.zeros(3, np.float32), scale, zero).tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", FORMATS)
def test_tensors_have_the_parameters_of_arrays(name):
    """Bit for bit, under every scale rule, symmetric or not; -0 and empty ranges too."""
    lo, hi = np.float64([[-1], [1]]) * 10.0 ** np.random.default_rng(0).uniform(-42, 38.5, (2, 40))
    lo[:4], hi[:4] = (0.0, -0.0, -3.0, 1.0), (-0.0, -0.0, 0.0, 2.0)
    ranges = lo, hi
    for rule, symmetric, narrow in itertools.product(SCALE_RULES, (True, False), (True, False)):
        grid = Grid(FORMATS[name], symmetric, narrow, rule)
        found = grid.parameters(*map(torch.from_numpy, ranges))
        for one, other in zip(grid.parameters(*ranges), found, strict=True):
            assert str(other.dtype) == f"torch.{one.dtype}"
            np.testing.assert_array_equal(other.numpy().view(f"i{one.itemsize}"), one.view(f"i{one.itemsize}"))
    with pytest.raises(DataError, match="finite"):
        grid.parameters(torch.tensor([0.0, torch.nan]), torch.ones(2))


def test_by_hand():
    x = np.array([-10, -1.26, -0.05, 0.0, 0.05, 0.15, 0.25, 1.27, 10], np.float32)
    codes = Coding(INT8).quantize(x, 0.1, 3)
    assert codes.dtype == np.int8
    # 0.05/0.1 = 0.5 and 0.25/0.1 = 2.5 are ties in float32; 0.15/0.1 = 1.5 rounds in float32 to 1.5
    assert codes.tolist() == [-97, -10, 3, 3, 3, 5, 5, 16, 103]
    assert Coding(INT8).quantize(np.array([1e9, -1e9], np.float32), 0.1, 3).tolist() == [127, -128]
    assert Coding(INT8, narrow=True).quantize(np.array([1e9, -1e9], np.float32), 0.1, 0).tolist() == [127, -127]
    assert Coding(INT8, narrow=True).fake_quantize(np.float32([1e9, -1e9]), 0.5, 0).tolist() == [63.5, -63.5]
    assert Coding(INT8).dequantize(np.array([127, -128], np.int8), 0.5, -28).tolist() == [77.5, -50.0]


def test_wide_integers_saturate_exactly():
    """float32 cannot hold 2**31 - 1: a detour through it would overflow the conversion."""
    x = np.array([3e9, -3e9, np.inf, -np.inf, 5, 2147483520.0], np.float32)
    highest = 2**31 - 1
    expected = [highest, -(2**31), highest, -(2**31), 5, 2147483520]
    assert Coding(FORMATS["int32"]).quantize(x, 1.0, 0).tolist() == expected
    assert Coding(FORMATS["int32"]).quantize(torch.from_numpy(x), 1.0, 0).tolist() == expected
    assert Coding(FORMATS["uint32"]).quantize(np.array([5e9, -1], np.float32), 1.0, 0).tolist() == [2**32 - 1, 0]
    assert Coding(FORMATS["int32"]).quantize(np.array([7.0], np.float32), 1.0, highest - 3).tolist() == [highest]
    big = np.array([highest], np.int32)
    assert Coding(FORMATS["int32"]).dequantize(big, 1.0, highest - 3).tolist() == [3.0]


def test_overflow_of_the_quotient():
    """x / scale beyond float32 is the highest code, not the lowest."""
    tiny = np.float32(1e-40)
    for name in ("int4", "uint4", "int2", "uint2", "int8", "int16", "int32"):
        row = FORMATS[name]
        found = Coding(row).quantize(np.array([1.0, -1.0], np.float32), tiny, 0)
        assert found.tolist() == [row.max, row.min]


def test_nan():
    x = np.array([1.0, np.nan], np.float32)
    with pytest.raises(DataError, match="NaN has no code in int8"):
        Coding(INT8).quantize(x, 0.5, 0)
    with pytest.raises(DataError, match="NaN"):
        Coding(FORMATS["fp4_e2m1"]).quantize(torch.from_numpy(x), 0.5, 0)
    assert np.isnan(Coding(INT8).fake_quantize(x, 0.5, 0)).tolist() == [False, True]
    stored = Coding(FORMATS["fp8_e4m3"]).quantize(x, 0.5, 0)
    assert np.isnan(Coding(FORMATS["fp8_e4m3"]).dequantize(stored, 0.5, 0)).tolist() == [False, True]


@pytest.mark.parametrize("name", ["int8", "uint4", "fp8_e4m3", "bfloat16", "mxfp4", "mx6", "bfp16"])
def test_kinds_of_input(name):
    """Types, layouts, empty arrays and scalars; the arithmetic is float32 whatever comes in."""
    row = FORMATS[name]
    rng = np.random.default_rng(1)
    base = rng.standard_normal((6, 8, 10)).astype(np.float32)
    wide = Coding(row).fake_quantize(base, 0.05, 0)
    for dtype in (np.float16, np.float64, ml_dtypes.bfloat16):
        x = base.astype(dtype)
        found = Coding(row).fake_quantize(x, 0.05, 0)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, Coding(row).fake_quantize(x.astype(np.float32), 0.05, 0).astype(dtype))
    half = torch.from_numpy(base).bfloat16()
    found = Coding(row).fake_quantize(half, 0.05, 0)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, Coding(row).fake_quantize(half.float(), 0.05, 0).bfloat16())
    strided = np.ascontiguousarray(base.transpose(2, 0, 1)).transpose(1, 2, 0)
    assert not strided.flags.c_contiguous
    np.testing.assert_array_equal(Coding(row).fake_quantize(strided, 0.05, 0), wide)
    np.testing.assert_array_equal(Coding(row).fake_quantize(torch.from_numpy(strided), 0.05, 0).numpy(), wide)
    np.testing.assert_array_equal(Coding(row).fake_quantize(base[::2, :, ::-1][..., ::-1], 0.05, 0), wide[::2])
    assert Coding(row).fake_quantize(np.zeros((0, 4), np.float32), 0.05, 0).shape == (0, 4)
    assert Coding(row).fake_quantize(torch.zeros(3, 0), 0.05, 0).shape == (3, 0)
    assert Coding(row).fake_quantize(np.float32(1.0), 0.05, 0).shape == ()
    assert Coding(row).fake_quantize(torch.tensor(1.0), 0.05, 0).shape == ()


def test_inputs_are_left_alone():
    x = np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32)
    tensor = torch.from_numpy(x.copy()).requires_grad_()
    before = x.copy()
    for row in FORMATS.values():
        for rounding in ("half_even", "half_away", "floor", "stochastic"):
            Coding(row, rounding=rounding).fake_quantize(x, 1.0, 0)
            result = Coding(row, rounding=rounding).fake_quantize(tensor, 1.0, 0)
            assert not result.requires_grad
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(tensor.detach().numpy(), before)


@pytest.mark.parametrize("granularity", [Tensor(), Channel(0), Channel(1), Group(-1, 5), Group(0, 2)], ids=str)
@pytest.mark.parametrize("rows", [3, 70000])
def test_granularity_equals_expanded_parameters(granularity, rows):
    """The same numbers as with one scale per element, over several chunks."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((rows, 7, 2)).astype(np.float32)
    shape = granularity.parameter_shape(x.shape)
    scale = rng.uniform(0.01, 0.1, shape).astype(np.float32)
    zero = rng.integers(-20, 20, shape).astype(np.int32)
    wide_scale, wide_zero = granularity.expand(scale, x.shape), granularity.expand(zero, x.shape)
    expected = np.clip(np.rint(x / wide_scale) + wide_zero, -128, 127)
    np.testing.assert_array_equal(Coding(INT8, granularity).quantize(x, scale, zero), expected)
    values = ((expected - wide_zero) * wide_scale).astype(np.float32)
    np.testing.assert_array_equal(Coding(INT8, granularity).fake_quantize(x, scale, zero), values)
    on_torch = Coding(INT8, granularity).fake_quantize(
        torch.from_numpy(x), torch.from_numpy(scale), torch.from_numpy(zero)
    )
    np.testing.assert_array_equal(on_torch.numpy(), values)


@pytest.mark.parametrize("rounding", sorted(RULES))
def test_parameters_beside_values_round_as_those_of_channels(rounding):
    """Every format whose elements are rounded alone, with arrays of zero points and with one for all."""
    rng = np.random.default_rng(0)
    x, scale = rng.normal(0, 3, (5, 64)).astype(np.float32), rng.uniform(0.01, 0.9, 5).astype(np.float32)
    zeros = 0 * rng.integers(-2, 3, 5), rng.integers(0, 3, 5), None
    alone = [Coding(FORMATS[name], Channel(0), rounding, narrow) for name in FORMATS for narrow in (False, True)]
    for coding, zero in itertools.product([coding for coding in alone if coding.alone], zeros):
        middle = coding.format.middle if zero is None else zero
        wanted = coding.fake_quantize(x, scale, np.broadcast_to(middle, 5))
        column = middle if zero is None else zero[:, None]
        np.testing.assert_array_equal(coding.beside(x, scale[:, None], column), wanted, err_msg=coding.format.name)
        tensors = [
            torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in (scale[:, None], column)
        ]
        np.testing.assert_array_equal(coding.beside(torch.from_numpy(x), *tensors).numpy(), wanted)
    assert not any(coding.alone for coding in alone if isinstance(coding.format, Block))
    assert not Coding(INT4, rounding="stochastic").alone and not Coding(INT4, scale_rule="e4m3_of_row").alone


def test_rows_of_the_table():
    assert get_format("int8") is INT8 and get_format(INT8) is INT8
    with pytest.raises(ConfigError, match="Did you mean 'fp8_e4m3'"):
        get_format("fp8_e4m3fn")
    assert (INT8.min, INT8.max, UINT8.max, INT4.min) == (-128, 127, 255, -8)
    carriers = {name: row.onnx_type for name, row in FORMATS.items() if row.onnx_type}
    assert carriers["fp8_e4m3"] == "FLOAT8E4M3FN" and carriers["int2"] == "INT2" and "fp6_e2m3" not in carriers


def test_onnx_types_exist():
    onnx = pytest.importorskip("onnx")
    for row in FORMATS.values():
        if row.onnx_type:
            onnx.TensorProto.DataType.Value(row.onnx_type)
        if row.torch_dtype:
            assert isinstance(getattr(torch, row.torch_dtype), torch.dtype)
        if row.ml_dtype:
            np.dtype(getattr(ml_dtypes, row.ml_dtype, row.ml_dtype))


@pytest.mark.parametrize("name", ["int32", "uint32"])
@pytest.mark.parametrize("narrow", [False, True])
def test_wide_integers_need_no_float64_to_be_rounded(name, narrow):
    """What ``place`` says of float32, against the float64 of ``snap``, around every bound and every tie."""
    row, rng = FORMATS[name], np.random.default_rng(4)
    powers = (rng.uniform(-1, 1, 4000) * 2.0 ** rng.integers(-3, 34, 4000)).astype(np.float32)
    ties = np.arange(-40, 40, dtype=np.float32) / 4
    edges = np.float32([2**31, 2**32, 2**24, 2**23, np.inf, np.nan])
    near = [np.nextafter(edge, np.float32(way)) for edge in edges for way in (-np.inf, np.inf)]
    x = np.concatenate([powers, ties, edges, -edges, near, np.negative(near)]).astype(np.float32)
    for zero_point in (0, 1, row.max, row.min, 12345, row.max - 3):
        zero = np.float64(zero_point)
        with np.errstate(invalid="ignore"):
            expected = row.snap(x.copy(), zero, half_even, narrow).astype(np.float32)
            found = row.place(x.copy(), zero, half_even, narrow)
        np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("row", [row for row in FORMATS.values() if row.name != "e8m0"], ids=lambda row: row.name)
def test_how_values_lie_in_memory_changes_nothing(row):
    """Strided, reversed, transposed, read-only, broadcast and bfloat16 arrays of NumPy and torch."""
    x = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    scale, zero = Grid(row).parameters(-3.0, 3.0)
    expected = Coding(row).fake_quantize(x, scale, zero)
    frozen = x.copy()
    frozen.flags.writeable = False
    laid = [np.asfortranarray(x), np.repeat(x, 2, 1)[:, ::2], x[::-1, ::-1].copy()[::-1, ::-1], frozen]
    laid += [torch.from_numpy(x.T.copy()).T, torch.nn.Parameter(torch.from_numpy(x))]
    for one in laid:
        np.testing.assert_array_equal(np.asarray(Coding(row).fake_quantize(one, scale, zero)), expected)
    wide = Coding(row).fake_quantize(np.broadcast_to(x[:1], (6, 64)), scale, zero)
    np.testing.assert_array_equal(wide, np.broadcast_to(Coding(row).fake_quantize(x[:1], scale, zero), (6, 64)))
    half = x.astype(ml_dtypes.bfloat16)
    found = Coding(row).fake_quantize(half, scale, zero)
    assert found.dtype == half.dtype
    rounded = Coding(row).fake_quantize(half.astype(np.float32), scale, zero).astype(half.dtype)
    np.testing.assert_array_equal(found.astype(np.float32), rounded.astype(np.float32))


@pytest.mark.slow
def test_more_than_two_to_the_31_values():
    """2.2e9 values that share one row in memory; the codes take 2.2 GB."""
    row = np.linspace(-2, 2, 32768, dtype=np.float32)
    codes = Coding(FORMATS["int8"]).quantize(np.broadcast_to(row, (67000, 32768)), 0.01, 0)
    assert codes.shape == (67000, 32768)
    expected = Coding(FORMATS["int8"]).quantize(row, 0.01, 0)
    for index in (0, 65535, 65536, 66999):
        np.testing.assert_array_equal(codes[index], expected)


@pytest.mark.parametrize("largest", [0.7, 0.011, 0.0007])
def test_products_of_int4_and_fp8_scales_are_rounded_as_kernels_do(largest):
    """Scales below 1 / 512 are under a factor that no bfloat16 is a multiple of: 0.4 % off, with the same codes."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(8, 256)).astype(np.float32) * rng.uniform(0.2, 1, (8, 1)).astype(np.float32) * largest * 2
    grid = Grid(get_format("int4"), narrow=False, scale_rule="e4m3_of_row")
    top = np.abs(x.reshape(8, 8, 32)).max(-1)
    scale, zero_point = grid.parameters(-top, top)
    coding, how = Coding(grid.format, Group(-1, 32), scale_rule="e4m3_of_row"), (scale, zero_point)
    found, codes = coding.fake_quantize(x, *how), coding.quantize(x, *how)
    np.testing.assert_array_equal(found, coding.dequantize(codes, *how))
    np.testing.assert_array_equal(found, coding.fake_quantize(found, *how))
    np.testing.assert_array_equal(coding.fake_quantize(torch.from_numpy(x), *how).numpy(), found)
    fp8 = ml_dtypes.float8_e4m3fn
    factor = np.maximum(scale.max(-1, keepdims=True) / np.float32(448), np.float32(1 / (448 * 512)))
    eighths = ((scale / factor).astype(fp8).astype(np.float32) / 8).astype(fp8).astype(np.float32)
    made = (eighths.repeat(32, -1) * codes.astype(np.float32)).astype(fp8).astype(np.float32) * (8 * factor)
    np.testing.assert_array_equal(found, made) if largest > 0.1 else np.testing.assert_allclose(found, made, rtol=3e-7)
    plain = Coding(grid.format, Group(-1, 32)).dequantize(codes, scale, zero_point)
    assert 0.03 < np.abs(found[codes != 0] / plain[codes != 0] - 1).max() < 0.07
