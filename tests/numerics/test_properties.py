"""Properties of every row of the table: a new row is tested without writing a test.

At a fixed scale and for the nearest roundings: idempotent, monotone, nearest, symmetric. For all roundings: NumPy
equals torch, quantize and dequantize equal fake_quantize, packed codes come back.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quark.errors import DataError
from quark.numerics.affine import Coding
from quark.numerics.formats import FORMATS, Block, Power
from quark.numerics.granularity import Block2D, Channel, Group, Tensor, Token
from quark.numerics.packing import pack, unpack
from quark.numerics.rounding import NEAREST, ROUNDINGS, Stochastic

torch = pytest.importorskip("torch")
few = settings(max_examples=8)

ROWS = list(FORMATS.values())
ELEMENTS = [row for row in ROWS if not isinstance(row, Block)]
BLOCKS = [row for row in ROWS if isinstance(row, Block)]

anything = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=20), elements=st.floats(width=32))
numbers = hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-1e5, 1e5, width=32))
powers = st.integers(-12, 8).map(lambda e: 2.0**e)
roundings = st.sampled_from([*ROUNDINGS, Stochastic(9)])
granularities = st.sampled_from([Tensor(), Channel(0), Channel(-1), Group(-1, 7), Token()])


def named(rows):
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


def zero_point(row, seed: int) -> int:
    return int(np.random.default_rng(seed).integers(row.min, row.max + 1)) if row.has_zero_point else 0


def scale_for(row, seed: int) -> float:
    """Any scale; for 32-bit codes, where the product rounds, a power of two."""
    value = 2.0 ** np.random.default_rng(seed).uniform(-12, 8)
    return 2.0 ** round(np.log2(value)) if row.bits > 16 else value


def bits(x: np.ndarray) -> np.ndarray:
    """Bits of float32, one pattern for all NaN."""
    return np.where(np.isnan(x), 0x7FC00000, np.asarray(x, np.float32).view(np.int32))


@named(ELEMENTS)
@few
@given(x=numbers, rounding=st.sampled_from(NEAREST), seed=st.integers(0, 99))
def test_idempotent(row, x, rounding, seed):
    scale, zero = scale_for(row, seed), zero_point(row, seed)
    once = Coding(row, rounding=rounding).fake_quantize(x, scale, zero)
    np.testing.assert_array_equal(Coding(row, rounding=rounding).fake_quantize(once, scale, zero), once)


@named(ELEMENTS)
@few
@given(x=numbers, rounding=st.sampled_from([*NEAREST, "floor", "toward_zero"]), seed=st.integers(0, 99))
def test_monotone(row, x, rounding, seed):
    x = np.sort(np.abs(x) + np.float32(1e-3) if isinstance(row, Power) else x)
    found = Coding(row, rounding=rounding).fake_quantize(x, scale_for(row, seed), zero_point(row, seed))
    assert (found[1:] >= found[:-1]).all()


@named([row for row in ELEMENTS if row.bits <= 16])
@few
@given(x=numbers, scale=powers, rounding=st.sampled_from(NEAREST))
def test_nearest(row, x, scale, rounding):
    """No value of the format is nearer; at ties the rule decides."""
    codes = np.arange(1 << row.bits).astype(row.code_dtype)
    if row.has_zero_point:
        codes = np.arange(row.min, row.max + 1).astype(row.code_dtype)
    values = Coding(row).dequantize(codes, scale, 0).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    x = np.clip(x, values[0], values[-1])
    found = Coding(row, rounding=rounding).fake_quantize(x, scale, 0).astype(np.float64)
    at = np.clip(np.searchsorted(values, x.astype(np.float64)), 1, len(values) - 1)
    best = np.minimum(np.abs(values[at] - x), np.abs(values[at - 1] - x))
    np.testing.assert_array_equal(np.abs(found - x), best)
    assert np.isin(found, values).all()


@named([row for row in ELEMENTS if row.min < 0])
@few
@given(x=numbers, rounding=st.sampled_from(["half_even", "half_away", "toward_zero"]), seed=st.integers(0, 99))
def test_symmetric(row, x, rounding, seed):
    scale = scale_for(row, seed)
    positive = Coding(row, rounding=rounding, narrow=True).fake_quantize(x, scale, 0)
    np.testing.assert_array_equal(Coding(row, rounding=rounding, narrow=True).fake_quantize(-x, scale, 0), -positive)


@pytest.mark.usefixtures("torch_path")
@named(ROWS)
@few
@given(x=anything, rounding=roundings, granularity=granularities, seed=st.integers(0, 99))
def test_numpy_equals_torch(row, x, rounding, granularity, seed):
    rng = np.random.default_rng(seed)
    shape = granularity.parameter_shape(x.shape)
    scale = (2.0 ** rng.uniform(-14, 10, shape)).astype(np.float32)
    zero = np.asarray(zero_point(row, seed) + np.zeros(shape, np.int64))
    if isinstance(row, Block):
        scale, zero = 0.25, 0
    found = Coding(row, granularity, rounding).fake_quantize(x, scale, zero)
    tensors = (torch.from_numpy(np.ascontiguousarray(v)) if np.ndim(v) else v for v in (x, scale, zero))
    np.testing.assert_array_equal(bits(Coding(row, granularity, rounding).fake_quantize(*tensors).numpy()), bits(found))


@pytest.mark.usefixtures("torch_path")
@named(ROWS)
@few
@given(x=anything, rounding=roundings, granularity=granularities, seed=st.integers(0, 99))
def test_codes_give_the_same_values(row, x, rounding, granularity, seed):
    if not row.has_nan:
        x = np.where(np.isnan(x), np.float32(1), x)
    if isinstance(row, Block):
        x = np.where(np.isfinite(x), x, np.float32(1))
    shape = granularity.parameter_shape(x.shape)
    scale = (2.0 ** np.random.default_rng(seed).uniform(-14, 10, shape)).astype(np.float32)
    zero = np.asarray(zero_point(row, seed) + np.zeros(shape, np.int64))
    if isinstance(row, Block):
        scale, zero = 0.25, 0
    codes = Coding(row, granularity, rounding).quantize(x, scale, zero)
    values = Coding(row, granularity).dequantize(codes, scale, zero)
    np.testing.assert_array_equal(values, Coding(row, granularity, rounding).fake_quantize(x, scale, zero))
    try:
        on_torch = Coding(row, granularity, rounding).quantize(torch.from_numpy(x), scale, zero)
    except DataError:
        pytest.fail("torch refuses what NumPy takes")
    for ours, theirs in zip(codes, on_torch, strict=True) if isinstance(row, Block) else [(codes, on_torch)]:
        np.testing.assert_array_equal(ours, theirs)


@named([row for row in ELEMENTS if row.bits < 8])
@few
@given(x=numbers, first=st.sampled_from(["low", "high"]))
def test_packed_codes_come_back(row, x, first):
    codes = Coding(row).quantize(x, 0.5, 0)
    packed = pack(codes, row.bits, first)
    assert packed.nbytes == -(-x.size * row.bits // 8)
    back = unpack(packed, row.bits, x.size, first, signed=row.code_dtype.startswith("int"))
    assert back.dtype == codes.dtype
    np.testing.assert_array_equal(back, codes)


@named([row for row in BLOCKS if row.rule == "e8m0_floor"])
@few
@given(x=numbers)
def test_a_block_under_the_floor_rule_is_idempotent(row, x):
    once = row.round(x)
    np.testing.assert_array_equal(row.round(once), once)


@named([row for row in BLOCKS if row.storage.name == "e8m0"])
@few
@given(x=numbers, shift=st.integers(-20, 20))
def test_a_block_scales_with_powers_of_two(row, x, shift):
    """Exponents are shared, so a factor 2**k on the data is a factor 2**k on the result."""
    x = np.where(np.abs(x) < 1e-3, 0, x).astype(np.float32)
    factor = np.float32(2.0**shift)
    np.testing.assert_array_equal(row.round(x * factor), row.round(x) * factor)


def hard_values() -> np.ndarray:
    """Rows of ordinary numbers with every special value among them."""
    x = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    x[0, :6] = np.inf, -np.inf, np.nan, 1e-40, -0.0, 3e38
    x[3] *= 1e-38
    return x


@named(ROWS)
def test_the_path_of_a_gpu(row, monkeypatch):
    """One chunk, and no question that would wait for the device: the same values and codes, on CPU tensors."""
    x = hard_values()
    monkeypatch.setattr("quark.numerics.array.on_gpu", lambda x: isinstance(x, torch.Tensor))
    for rounding in ROUNDINGS:
        found = Coding(row, rounding=rounding).fake_quantize(torch.from_numpy(x), 0.25, 0)
        np.testing.assert_array_equal(
            bits(found.numpy()), bits(Coding(row, rounding=rounding).fake_quantize(x, 0.25, 0))
        )
    finite = x[4:]
    on_torch, expected = (Coding(row).quantize(v, 0.25, 0) for v in (torch.from_numpy(finite), finite))
    for ours, theirs in zip(expected, on_torch, strict=True) if isinstance(row, Block) else [(expected, on_torch)]:
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.gpu
@named(ROWS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_gpu_equals_numpy(row, rounding):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x = hard_values()
    on_gpu = Coding(row, rounding=rounding).fake_quantize(torch.from_numpy(x).cuda(), 0.25, 0)
    np.testing.assert_array_equal(
        bits(on_gpu.cpu().numpy()), bits(Coding(row, rounding=rounding).fake_quantize(x, 0.25, 0))
    )
    x = np.where(np.isfinite(x), x, np.float32(2))
    codes, expected = (Coding(row, rounding=rounding).quantize(v, 0.25, 0) for v in (torch.from_numpy(x).cuda(), x))
    for ours, theirs in zip(expected, codes, strict=True) if isinstance(row, Block) else [(expected, codes)]:
        np.testing.assert_array_equal(ours, theirs if theirs is None else theirs.cpu().numpy())


@pytest.mark.gpu
@named(ELEMENTS)
@pytest.mark.parametrize("granularity", [Channel(1), Group(0, 10), Group(-1, 32), Block2D(7, 5), Token()], ids=str)
def test_gpu_equals_numpy_for_every_granularity(row, granularity):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x = hard_values()
    shape = granularity.parameter_shape(x.shape)
    scale = (2.0 ** np.random.default_rng(1).uniform(-6, 2, shape)).astype(np.float32)
    zero = np.asarray(zero_point(row, 3) + np.zeros(shape, np.int64))
    on_gpu = Coding(row, granularity).fake_quantize(*(torch.from_numpy(v).cuda() for v in (x, scale, zero)))
    np.testing.assert_array_equal(
        bits(on_gpu.cpu().numpy()), bits(Coding(row, granularity).fake_quantize(x, scale, zero))
    )
