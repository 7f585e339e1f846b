"""Stored weights: bytes of known values, every block format exact against ``quark.numerics``, and the size."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from tests.operators.running import assert_same, awkward, model_of, run, run_operator

from quark.errors import ConfigError
from quark.numerics.affine import Coding
from quark.numerics.blocks import BLOCKS
from quark.numerics.elements import ELEMENTS
from quark.numerics.granularity import Channel
from quark.numerics.granularity import Tensor as WholeTensor
from quark.operators import node, stored, stream
from quark.operators.storage import BLOCK_INPUTS, packed_formats

SHAPES = [
    ((8, 64), -1),
    ((8, 64), 0),
    ((6, 37), 1),
    ((4, 40, 3, 3), 1),
    ((3, 3, 5, 5), 1),
    ((33,), 0),
    ((2, 48, 3), -2),
]


def read_back(block: str, weight: np.ndarray, axis: int, opset: int = 21) -> tuple[np.ndarray, np.ndarray]:
    """The weight that a session reads, and the one that ``quark.numerics`` decodes."""
    row = BLOCKS[block]
    above = np.float32(np.abs(weight).max() / 2688) if row.tensor_scale else None
    encoded = row.encode(weight, axis, tensor_scale=above)
    kept = stored(encoded, row, axis, above)
    constants = {name: kept.tensors.get(name) for name in BLOCK_INPUTS}
    model = model_of("BlockDequantize", kept.attributes, {}, constants, opset=opset)
    return run(model, {}), row.decode(encoded, axis, above)


@pytest.mark.parametrize("block", BLOCKS)
def test_exact(block: str) -> None:
    for shape, axis in SHAPES:
        assert_same(*read_back(block, awkward(shape), axis))


@pytest.mark.parametrize("block", ["mxfp4", "mxfp6_e2m3", "mx6", "nvfp4"])
def test_older_opset(block: str) -> None:
    assert_same(*read_back(block, awkward((3, 3, 5, 5)), 1, opset=13))


def test_bytes_of_mxfp4() -> None:
    """Codes 0.5, 1, 1.5, 2, 3, 4, 6 are 1..7, bit 3 is the sign, the first code is the low nibble; E8M0 2**0 is 127."""
    weight = np.zeros((1, 32), np.float32)
    weight[0, :8] = 0.5, 1, 1.5, 2, 3, 4, 6, -6
    kept = stored(BLOCKS["mxfp4"].encode(weight), BLOCKS["mxfp4"], -1)
    assert kept.tensors["codes"].tolist() == [0x21, 0x43, 0x65, 0xF7] + [0] * 12
    assert kept.tensors["scales"].tolist() == [[127]]
    assert kept.attributes == {"format": "mxfp4", "axis": -1, "length": 0}


def test_sizes_over_float() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    for block, bits in [("mxfp4", 4.25), ("mxfp6_e3m2", 6.25), ("mxint8", 8.25), ("bfp16", 9), ("mx6", 6), ("mx4", 4)]:
        kept = stored(BLOCKS[block].encode(weight), BLOCKS[block], -1)
        assert sum(tensor.nbytes for tensor in kept.tensors.values()) * 8 == bits * weight.size


def test_the_weight_is_computed_once_when_the_model_is_loaded(tmp_path: object) -> None:
    weight = awkward((64, 128))
    kept = stored(BLOCKS["mx6"].encode(weight), BLOCKS["mx6"], -1)
    model = model_of("BlockDequantize", kept.attributes, {}, {name: kept.tensors.get(name) for name in BLOCK_INPUTS})
    options = ort.SessionOptions()
    options.optimized_model_filepath = f"{tmp_path}/folded.onnx"
    options.log_severity_level = 4
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    folded = onnx.load(f"{tmp_path}/folded.onnx")
    assert not {n.op_type for n in folded.graph.node} - {"Identity"}


@pytest.mark.parametrize("name", packed_formats())
@pytest.mark.parametrize("opset", [13, 21])
def test_packed_element_formats(name: str, opset: int) -> None:
    element = ELEMENTS[name]
    weight = awkward((5, 7)) if name != "e8m0" else np.exp2(np.arange(-17.0, 18)).astype(np.float32).reshape(5, 7)
    point = element.middle
    for scale, granularity in [
        (np.float32(0.3), WholeTensor()),
        (np.linspace(0.1, 2, 5).astype(np.float32), Channel(0)),
    ]:
        points = np.full(scale.shape, point, np.int32)
        codes = Coding(element, granularity).quantize(weight, scale, points)
        constants = {
            "codes": stream(codes, element.bits),
            "scale": scale,
            "zero_point": points,
            "shape": np.array(weight.shape, np.int64),
        }
        got = run(model_of("PackedDequantize", {"format": name}, {}, constants, opset=opset), {})
        assert_same(got, Coding(element, granularity).dequantize(codes, scale, points))


def test_refusals() -> None:
    weight = np.ones((2, 32), np.float32)
    with pytest.raises(ConfigError, match="mxfp4 has no tensor scale"):
        stored(BLOCKS["mxfp4"].encode(weight), BLOCKS["mxfp4"], -1, 1.0)
    with pytest.raises(ConfigError, match="nvfp4 needs tensor scale"):
        stored(BLOCKS["nvfp4"].encode(weight, tensor_scale=np.float32(1)), BLOCKS["nvfp4"], -1)
    with pytest.raises(ConfigError, match="counted from the back"):
        node("BlockDequantize", ["c", "s"], ["y"], {"axis": 0})


def test_a_stored_weight_feeds_a_product() -> None:
    """A weight in MXFP4 behind a MatMul is the weight that numerics quantizes."""
    x, weight = awkward((1, 64)), awkward((64, 16), 1)
    row = BLOCKS["mxfp4"]
    kept = stored(row.encode(weight, 0), row, 0)
    got = run_operator("BlockDequantize", kept.tensors["codes"], kept.attributes, {"scales": kept.tensors["scales"]})
    np.testing.assert_array_equal(x @ got, x @ row.round(weight, 0))
