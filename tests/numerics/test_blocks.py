"""Block formats: worked examples, storage, axes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.operators.amd_operators import bfp_block, bfp_quantize_dequantize, mx_quantize_dequantize

from quark.errors import ConfigError, DataError
from quark.numerics.affine import Coding, Grid
from quark.numerics.blocks import BLOCKS
from quark.numerics.formats import FORMATS
from quark.numerics.granularity import Group
from quark.numerics.rounding import ROUNDINGS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("torch_path")


@pytest.mark.parametrize(
    ("name", "expected"),
    [  # block of 1.99, 1.9, 0 .. under the floor rule; OCP MX v1.0
        ("mxint8", 1.90625),
        ("mxfp8_e5m2", 1.75),
        ("mxfp8_e4m3", 1.75),
        ("mxfp6_e3m2", 1.75),
        ("mxfp6_e2m3", 1.875),
        ("mxfp4", 1.5),
        ("mxfp4_even", 2.0),
        ("mxfp4_ceil", 2.0),
        ("bfp16", 1.90625),
    ],
)
def test_one_value(name, expected):
    x = np.array([1.99, 1.9] + [0] * 30, np.float32)
    assert BLOCKS[name].round(x)[1] == expected


def test_bits_per_value():
    bits = {name: block.bits for name, block in BLOCKS.items()}
    assert (bits["mxfp4"], bits["mxfp6_e2m3"], bits["mxfp8_e4m3"], bits["mxint8"]) == (4.25, 6.25, 8.25, 8.25)
    assert (bits["mx4"], bits["mx6"], bits["mx9"], bits["bfp16"]) == (4, 6, 9, 9)
    assert (bits["nvfp4"], bits["amdfp4"], bits["amdfp4_g32"]) == (4.5, 4.5, 4.25)


def test_two_levels_by_hand():
    """MX6: step 2**(E - 3), halved for a pair that lies below 2**E; E = 0 here."""
    x = np.array([1.99, 0.3, 0.4, 0.1] + [0] * 12, np.float32)
    assert BLOCKS["mx6"].round(x)[:4].tolist() == [1.875, 0.25, 0.375, 0.125]
    stored = BLOCKS["mx6"].encode(x)
    assert stored.codes[:4].tolist() == [15, 2, 6, 2]
    assert stored.scale.tolist() == [127]
    assert stored.shift.tolist() == [0, 1, 1, 1, 1, 1, 1, 1]


def test_a_block_of_zeros_has_valid_codes():
    for name, block in BLOCKS.items():
        stored = block.encode(np.zeros(block.size, np.float32))
        assert not stored.codes.any(), name
        assert stored.shift is None or not stored.shift.any(), name
        assert (block.round(np.zeros(block.size, np.float32)) == 0).all()


def test_carry():
    """The exponent rises where the largest element would clip; beyond E8M0 there is no such block to store."""
    block = replace(BLOCKS["bfp16"], carry=True, narrow=False)
    x = np.array([1.999, 0.4], np.float32)
    assert (block.round(x)[0], BLOCKS["bfp16"].round(x)[0]) == (2.0, 127 / 64)
    assert block.encode(x).scale.tolist() == [128]
    np.testing.assert_array_equal(block.decode(block.encode(x)), block.round(x))
    with pytest.raises(DataError, match="above 2\\*\\*127"):
        block.encode(np.array([1.0] * 40 + [3.4e38, 1.0], np.float32))


def test_nvfp4_by_hand():
    """Tensor scale amax / 2688; a block scale is the E4M3 of its amax / (6 * tensor scale)."""
    x = np.zeros((2, 16), np.float32)
    x[0, 0], x[1, :3] = 2688.0, (6.3, 3.0, 0.4)
    above, _ = Grid(FORMATS["nvfp4"]).parameters(x.min(), x.max())
    assert above == 1.0
    stored = Coding(FORMATS["nvfp4"]).quantize(x, above, 0)
    assert stored.scale.tolist() == [[0x7E], [0x38]]  # 448, and 1.05 -> 1
    assert stored.codes[1, :3].tolist() == [7, 5, 1]
    assert Coding(FORMATS["nvfp4"]).fake_quantize(x, above, 0)[1, :3].tolist() == [6, 3, 0.5]
    np.testing.assert_array_equal(BLOCKS["nvfp4"].round(x), Coding(FORMATS["nvfp4"]).fake_quantize(x, above, 0))


def test_a_small_block_of_nvfp4_keeps_a_scale():
    """A block scale is never 0: the least E4M3 value stands for it."""
    x = np.zeros(32, np.float32)
    x[0], x[16] = 2688.0, 0.01
    assert BLOCKS["nvfp4"].round(x)[16] == np.float32(2.0**-9 * 6)


def test_amdfp4_by_hand():
    x = np.array([6.1, 5.0, 1.0, 0.2] + [0] * 12, np.float32)  # scale e5m3(6.1 / 6) = 1.0
    assert BLOCKS["amdfp4"].round(x)[:4].tolist() == [6, 4, 1, 0]
    stored = BLOCKS["amdfp4"].encode(x)
    assert stored.scale.tolist() == [15 << 3]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("shape", "axis"), [((3, 40), 1), ((40, 3), 0), ((2, 70, 3), 1), ((50,), -1), ((2, 3, 5), -2)])
def test_axes_and_storage(name, shape, axis):
    """Blocks along any axis are those along the last one of the swapped tensor; codes and scales give the values."""
    block = BLOCKS[name]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * 10
    last = np.ascontiguousarray(np.moveaxis(x, axis, -1))
    found = block.round(x, axis)
    np.testing.assert_array_equal(found, np.moveaxis(block.round(last), -1, axis))
    np.testing.assert_array_equal(block.round(torch.from_numpy(x), axis).numpy(), found)
    above = Grid(block).parameters(x.min(), x.max())[0]
    stored = Coding(block, Group(axis, block.size)).quantize(x, above, 0)
    assert stored.codes.shape == x.shape and stored.codes.dtype == block.code_dtype
    assert stored.scale.shape == Group(axis, block.size).parameter_shape(shape)
    np.testing.assert_array_equal(Coding(block, Group(axis, block.size)).dequantize(stored, above, 0), found)


def test_padding_changes_nothing():
    """A short last block is the same block filled with zeros."""
    x = np.random.default_rng(1).standard_normal((5, 37)).astype(np.float32)
    padded = np.pad(x, ((0, 0), (0, 27)))
    for name, block in BLOCKS.items():
        np.testing.assert_array_equal(block.round(x), block.round(padded)[:, :37], err_msg=name)


def test_storage_refuses_what_it_cannot_hold():
    x = np.ones(70, np.float32)
    x[-1] = np.inf  # in one block of three
    with pytest.raises(DataError, match="mxfp4 cannot store an infinity"):
        BLOCKS["mxfp4"].encode(x)
    with pytest.raises(ConfigError, match="no 8-bit format"):
        replace(BLOCKS["mxfp4"], rule="float32").encode(x[:1])


def test_nonfinite_blocks_become_nan():
    x = np.ones((2, 32), np.float32)
    x[1, 5] = np.inf
    found = replace(BLOCKS["mxfp4"], nonfinite="nan").round(x)
    assert np.isnan(found).all(axis=1).tolist() == [False, True]


def test_attributes_of_the_operators():
    with pytest.raises(ConfigError, match="Did you mean 'to_bfp_prime'"):
        bfp_block("to_bfp_prim")
    with pytest.raises(ConfigError, match="bit_width 9"):
        bfp_block(bit_width=9)
    with pytest.raises(ConfigError, match="rounding_mode"):
        bfp_quantize_dequantize(np.ones((2, 2)), rounding_mode=3)
    with pytest.raises(ConfigError, match="element_dtype"):
        mx_quantize_dequantize(np.ones((2, 2)), element_dtype="fp4")
    with pytest.raises(ConfigError, match="axis 2"):
        mx_quantize_dequantize(np.ones((2, 2)), axis=2)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ["mxfp4", "mx6", "bfp16", "nvfp4"])
def test_the_positions_of_a_kernel_do_not_mix(name, rounding):
    """NumPy turns small kernels round to work on them; the noise must turn with them. Torch's functions do not turn."""
    x = np.random.default_rng(5).standard_normal((9, 70, 3, 3)).astype(np.float32)
    found = BLOCKS[name].round(x, 1, rounding)
    np.testing.assert_array_equal(BLOCKS[name].round(torch.from_numpy(x), 1, rounding).numpy(), found)
    above = Grid(BLOCKS[name]).parameters(x.min(), x.max())[0] if BLOCKS[name].tensor_scale else None
    codes = BLOCKS[name].encode(x, 1, rounding, above)
    np.testing.assert_array_equal(BLOCKS[name].decode(codes, 1, above), BLOCKS[name].round(x, 1, rounding, above))
