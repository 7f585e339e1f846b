"""The block formats against the block operators, the torch quantizers of the peer, and microxcaling (OCP MX).

Values are compared with ==, NaN with NaN. The sign of a zero is not: the operators give it by rounding mode, and a code
of an integer element has none.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.operators.amd_operators import bfp_quantize_dequantize, mx_quantize_dequantize

from quark.numerics.affine import Coding, Grid
from quark.numerics.blocks import BLOCKS, Block
from quark.numerics.formats import FORMATS
from quark.numerics.granularity import Group

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("torch_path")

OPERATORS = {"BFPQuantizeDequantize": bfp_quantize_dequantize, "MXQuantizeDequantize": mx_quantize_dequantize}
SUBNORMAL = [2, 3]  # rows of the input `special` of mx_torch.npz whose blocks are subnormal
EMAX = {"int8": 0, "fp8_e5m2": 15, "fp8_e4m3": 8, "fp6_e3m2": 4, "fp6_e2m3": 2, "fp4_e2m1": 2}  # OCP MX v1.0, table 1


def below_e8m0(x: np.ndarray, element: str) -> np.ndarray:
    """Rows whose scale 2**(floor(log2 amax) - emax) would be below 2**-127, the least that E8M0 holds."""
    amax = np.max(np.where(np.isfinite(x), np.abs(x), 0), axis=1)
    return (amax > 0) & (amax < 2.0 ** (EMAX[element] - 127)) & (element != "int8")


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(vectors, name):
    arrays, meta = vectors("block.npz")
    operator = OPERATORS[name]
    cases = [case for case in meta["cases"] if case["op"] == name]
    assert len(cases) > 40
    for case in cases:
        x, expected = arrays[f"in.{case['input']}"], arrays[case["output"]]
        found = operator(x, **case["attributes"])
        on_torch = operator(torch.from_numpy(x), **case["attributes"]).numpy()
        np.testing.assert_array_equal(found.view(np.int32), on_torch.view(np.int32), err_msg=str(case))
        if case["input"] == "special" and name == "MXQuantizeDequantize":
            # there the operator takes a scale that E8M0 cannot hold; test_subnormal_blocks has the right values
            kept = ~below_e8m0(x, case["attributes"]["element_dtype"])
            found, expected = found[kept], expected[kept]
        np.testing.assert_array_equal(found, expected, err_msg=str(case))


def test_input_is_left_alone(vectors):
    """The peer's kernel overwrites its input when it converts to bfloat16 first."""
    x = vectors("block.npz")[0]["in.a"]
    before = x.copy()
    bfp_quantize_dequantize(x, convert_to_bfloat_before_bfp=1)
    np.testing.assert_array_equal(x, before)


ELEMENTS = {
    "fp4_e2m1": "mxfp4",
    "fp6_e2m3": "mxfp6_e2m3",
    "fp6_e3m2": "mxfp6_e3m2",
    "fp8_e4m3": "mxfp8_e4m3",
    "fp8_e5m2": "mxfp8_e5m2",
    "int8": "mxint8",
}
ROUNDINGS = {"even": "half_even", "nearest": "half_away", "floor": "toward_zero"}  # microxcaling rounds magnitudes


@pytest.mark.parametrize("element", [*ELEMENTS, "int4"])
def test_microxcaling(vectors, element):
    """The published rule: every case, subnormal blocks and NaN blocks included."""
    arrays, meta = vectors("mx_torch.npz")
    block = BLOCKS[ELEMENTS[element]] if element != "int4" else Block("mxint4", FORMATS["int4"], 32, unit=0.25)
    block = replace(block, narrow=True, nonfinite="nan")
    cases = [c for c in meta["cases"] if c["oracle"] == "microxcaling" and c["format"] == element]
    assert len(cases) > 5
    for case in cases:
        found = block.round(arrays[f"in.{case['input']}"], -1, ROUNDINGS[case["round"]])
        np.testing.assert_array_equal(found, arrays[case["output"]], err_msg=str(case))


def torch_peer(name: str, x: np.ndarray) -> np.ndarray:
    """``x`` in the format that the peer's torch flow calls ``name``."""
    kind, *rest = name.split()
    if rest[-1:] == ["scale"]:  # "fp4 g32 float scale": groups under float32 scales
        row, group = FORMATS["fp4_e2m1" if kind == "fp4" else kind], Group(-1, 32)
        tiles = group.tile(x)
        scale, zero = Grid(row).parameters(tiles.min(-1), tiles.max(-1))
        return Coding(row, group).fake_quantize(x, scale, zero)
    if kind == "bfp16":
        return replace(BLOCKS["bfp16"], carry=True, narrow=False).round(x)
    if kind in ("mx6", "mx9"):
        return BLOCKS[kind].round(x)
    if kind == "amdfp4":
        return BLOCKS["amdfp4" if rest == ["g16"] else "amdfp4_g32"].round(x)
    rule = {"floor": "", "even": "_even", "ceil": "_ceil"}[rest[0]]
    return replace(BLOCKS[kind + rule], narrow=True).round(x)


def test_torch_peer(vectors):
    arrays, meta = vectors("mx_torch.npz")
    cases = [c for c in meta["cases"] if c["oracle"] == "peer torch"]
    assert len(cases) > 60
    for case in cases:
        if case["input"] == "nonfinite":
            continue  # see test_nonfinite_blocks
        x, expected = arrays[f"in.{case['input']}"], arrays[case["output"]]
        found = torch_peer(case["format"], x)
        if case["input"] == "special":
            # subnormal blocks: the peer flushes them, or takes a scale below 2**-127 that E8M0 cannot hold, or (float
            # scales) one below the smallest normal float32. microxcaling is right, and test_microxcaling has it.
            found, expected = np.delete(found, SUBNORMAL, 0), np.delete(expected, SUBNORMAL, 0)
        np.testing.assert_array_equal(found, expected, err_msg=str(case))


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "nvfp4"])
def test_nonfinite_blocks(name):
    """Infinities and NaN are copied and the rest is quantized as if they were zeros (the peers disagree among them)."""
    x = np.random.default_rng(5).standard_normal((3, 64)).astype(np.float32)
    x[0, 3], x[1, 40], x[2, 63] = np.inf, np.nan, -np.inf
    finite = np.isfinite(x)
    found = BLOCKS[name].round(x)
    np.testing.assert_array_equal(found[~finite], x[~finite])
    np.testing.assert_array_equal(found[finite], BLOCKS[name].round(np.where(finite, x, 0))[finite])


@pytest.mark.parametrize("name", [name for name in BLOCKS if name.startswith("mxfp")])
def test_subnormal_blocks(name):
    """A block below what E8M0 can scale is quantized against 2**-127: multiples of the least step times 2**-127."""
    x = (np.arange(-16, 16) * 2.0**-132).astype(np.float32)
    element = BLOCKS[name].element
    expected = element.round(x * np.float32(2.0**127)).astype(np.float64) * 2.0**-127
    np.testing.assert_array_equal(BLOCKS[name].round(x), expected.astype(np.float32))
