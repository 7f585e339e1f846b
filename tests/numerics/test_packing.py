"""Packing, byte by byte: against the peers' layouts, worked examples, and itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark.errors import ConfigError
from quark.numerics.affine import Coding
from quark.numerics.formats import FORMATS
from quark.numerics.packing import AWQ_ORDER, halves, pack, unpack

torch = pytest.importorskip("torch")


def test_worked_examples():
    """Bytes written down from the layouts' definitions, not from a packer."""
    assert pack(np.arange(8), 4).tobytes().hex() == "10325476"
    assert pack(np.arange(8), 4, "high").tobytes().hex() == "01234567"
    assert pack(np.array([0, 1, 2, 3]), 2).tobytes().hex() == "e4"
    assert pack(np.array([0, 1, 2, 3]), 2, "high").tobytes().hex() == "1b"
    assert pack(np.array([0, 1, 2, 3, -4, -3, -2, -1]), 3).tobytes().hex() == "88c6fa"
    assert pack(np.arange(8), 4, order=AWQ_ORDER, word=4).view("<u4")[0] == 0x75316420
    assert pack(np.array([-8, 7, -1]), 4).tobytes().hex() == "780f"
    e2m3, e3m2 = FORMATS["fp6_e2m3"], FORMATS["fp6_e3m2"]
    assert pack(Coding(e2m3).quantize([0.125, 1, 7.5, -7.5], 1, 0), 6).tobytes().hex() == "01f2fd"
    assert pack(Coding(e3m2).quantize([0.0625, 1, 28, -28], 1, 0), 6).tobytes().hex() == "01f3fd"
    fp4 = Coding(FORMATS["fp4_e2m1"]).quantize([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -6], 1, 0)
    assert pack(fp4, 4).tobytes().hex() == "10325476f9"


def packed_by(case: dict, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes in the layout of ``case``, and the codes that come back."""
    bits, order = {"2": 2, "3": 3, "4": 4, "8": 8}.get(case["dtype"][-1], 4), AWQ_ORDER if case["reorder"] else None
    bits = 6 if case["dtype"].startswith("fp6") else bits
    first, word = ("high", 1) if bits == 2 else ("low", 4 if case["packed_dtype"] == "int32" else 1)
    packed = pack(codes, bits, first, order, word)
    on_torch = pack(torch.from_numpy(np.ascontiguousarray(codes)), bits, first, order, word)
    np.testing.assert_array_equal(packed, on_torch.numpy())
    back = unpack(packed, bits, codes.shape[1], first, order, signed=case["dtype"].startswith("int"))
    return (packed.view("<i4") if word == 4 else packed), back


def test_layouts_of_the_peer(golden):
    cases = json.loads((golden / "packing.json").read_text())["peer_torch"]
    seen = 0
    for case in cases:
        whole_bytes = case["dtype"] in ("int8", "uint8")
        if whole_bytes or case["dtype"] == "int2" or "error" in case:
            continue  # one value per byte or per int32: nothing is packed
        values = np.array(case["values"])
        row = FORMATS["fp4_e2m1" if case["dtype"] == "fp4" else case["dtype"]]
        codes = Coding(row).quantize(values.astype(np.float32), 1.0, 0)
        transposed = case["qscheme"] == "per_group" and case["dtype"] in ("int4", "uint4", "uint2")
        codes = codes.T if transposed else codes
        packed, back = packed_by(case, codes)
        np.testing.assert_array_equal(packed, np.array(case["packed"]), err_msg=case["note"])
        np.testing.assert_array_equal(back, codes)
        seen += 1
    assert seen > 30


def test_e8m0_bytes(golden):
    rule = json.loads((golden / "packing.json").read_text())["e8m0"]
    np.testing.assert_array_equal(Coding(FORMATS["e8m0"]).quantize(np.array(rule["scales"]), 1.0, 0), rule["bytes"])


def gguf(golden, kind: str) -> tuple[np.ndarray, np.ndarray]:
    table = json.loads((golden / "packing.json").read_text())["gguf"]["types"][kind]
    rows = [np.frombuffer(bytes.fromhex(row), np.uint8) for row in table["bytes_hex"]]
    return np.stack(rows), np.array(table["dequantized"], np.float32)


def test_gguf_mxfp4(golden):
    """A block is one E8M0 byte and 16 bytes of codes, byte j holding codes j and j + 16."""
    rows, values = gguf(golden, "MXFP4")
    blocks = rows.reshape(len(rows), -1, 17)
    codes = unpack(blocks[..., 1:], 4, 32, order=halves(32))
    scale = Coding(FORMATS["e8m0"]).dequantize(blocks[..., :1], 1.0, 0)
    found = Coding(FORMATS["fp4_e2m1"]).dequantize(codes, 1.0, 0) * scale
    np.testing.assert_array_equal(found.reshape(values.shape), values)
    np.testing.assert_array_equal(pack(codes, 4, order=halves(32)), blocks[..., 1:])


def test_gguf_q4_0(golden):
    """A block is a float16 scale and 16 bytes of codes with zero point 8."""
    rows, values = gguf(golden, "Q4_0")
    blocks = rows.reshape(len(rows), -1, 18)
    codes = unpack(blocks[..., 2:], 4, 32, order=halves(32))
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    found = (codes.astype(np.float32) - 8) * scale
    np.testing.assert_array_equal(found.reshape(values.shape), values)
    np.testing.assert_array_equal(pack(codes, 4, order=halves(32)), blocks[..., 2:])


def test_gguf_bfloat16(golden):
    rows, values = gguf(golden, "BF16")
    np.testing.assert_array_equal(Coding(FORMATS["bfloat16"]).dequantize(rows.view("<u2"), 1.0, 0), values)


@given(
    bits=st.integers(1, 8),
    shape=st.sampled_from([(1,), (7,), (3, 5), (2, 3, 16), (2, 0), (4, 33)]),
    first=st.sampled_from(["low", "high"]),
    order=st.sampled_from([None, AWQ_ORDER, halves(32)]),
    word=st.sampled_from([1, 4]),
    signed=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_unpack_undoes_pack(bits, shape, first, order, word, signed, seed):
    low = -(1 << bits - 1) if signed else 0
    codes = np.random.default_rng(seed).integers(low, low + (1 << bits), shape)
    packed = pack(codes, bits, first, order, word)
    assert packed.dtype == np.uint8 and packed.shape[-1] % word == 0
    if order is None:
        assert packed.shape[-1] == -(-codes.shape[-1] * bits // (8 * word)) * word
    np.testing.assert_array_equal(unpack(packed, bits, shape[-1], first, order, signed), codes)
    on_torch = pack(torch.from_numpy(codes), bits, first, order, word)
    np.testing.assert_array_equal(on_torch.numpy(), packed)
    np.testing.assert_array_equal(unpack(on_torch, bits, shape[-1], first, order, signed).numpy(), codes)


def test_refusals():
    with pytest.raises(ConfigError, match="9 bits"):
        pack(np.zeros(4, np.int32), 9)
    with pytest.raises(ConfigError, match="Did you mean 'high'"):
        pack(np.zeros(4, np.int32), 4, "hgh")
    with pytest.raises(ConfigError, match="2 bytes do not hold 5 codes"):
        unpack(np.zeros(2, np.uint8), 4, 5)


@pytest.mark.parametrize("shape", [(16, 64), (7, 24), (5, 8), (3, 13), (300, 1024)])
@pytest.mark.parametrize("bits", range(1, 9))
def test_eight_codes_at_a_time_are_the_same_bytes(shape, bits, monkeypatch):
    torch = pytest.importorskip("torch")
    codes = np.random.default_rng(bits).integers(-128, 128, shape).astype(np.int8)
    forms = [codes, codes.view(np.uint8), np.asfortranarray(codes), torch.from_numpy(codes.T.copy()).T]
    cases = [(x, order, word) for x in forms for order in (None, AWQ_ORDER) for word in (1, 4)]
    made = [np.asarray(pack(x, bits, order=order, word=word)) for x, order, word in cases]
    kept = [
        (found, order, signed) for found, (_, order, _) in zip(made, cases, strict=True) for signed in (False, True)
    ]
    back = [np.asarray(unpack(torch.from_numpy(found), bits, shape[1], "low", *rest)) for found, *rest in kept]
    monkeypatch.setattr("quark.numerics.packing.packed_by_eight", lambda *_: None)
    monkeypatch.setattr("quark.numerics.packing.unpacked_by_eight", lambda *_: None)
    for (x, order, word), found in zip(cases, made, strict=True):
        np.testing.assert_array_equal(found, np.asarray(pack(x, bits, order=order, word=word)))
    for (packed, *rest), found in zip(kept, back, strict=True):
        wanted = unpack(packed, bits, shape[1], "low", *rest)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
