"""Integer operators in the place of Q/DQ: whatever the types of the codes, the file loads and computes the same."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.onnx_flow import models

from quark.onnx.shapeshifter import transform

TYPES = {"int8": (np.int8, 0), "uint8": (np.uint8, 128)}
SHAPES = {"Conv": ("float[1, 4, 5, 5]", (6, 4, 3, 3)), "MatMul": ("float[3, 4]", (4, 6))}
SHAPES |= {"Add": ("float[3, 4]", (3, 4)), "Mul": ("float[3, 4]", (3, 4))}


def quantized(op: str, types: tuple[str, str, str], opset: int, axis: int | None = None) -> onnx.ModelProto:
    """One operator between codes of three types; a scale per channel of ``axis`` for the second operand."""
    shape, constant = SHAPES[op]
    rank = 4 if op == "Conv" else 2
    along = "" if axis is None else f"<axis = {axis}>"
    graph = f"""
    g ({shape} x) => (float[{", ".join("abcd"[:rank])}] y) {{
        xq = QuantizeLinear (x, s, zx) xd = DequantizeLinear (xq, s, zx) wd = DequantizeLinear {along} (w, sw, zw)
        o = {op} (xd, wd) oq = QuantizeLinear (o, so, zo) y = DequantizeLinear (oq, so, zo)
    }}"""
    rng, count = np.random.default_rng(0), 1 if axis is None else constant[axis]
    zeros = {f"z{k}": np.array(TYPES[t][1], TYPES[t][0]) for k, t in zip("xwo", types, strict=True)}
    dtype, zero = TYPES[types[1]]
    scales = {"s": np.float32(0.05), "so": np.float32(0.3), "sw": np.linspace(0.02, 0.2, count, dtype=np.float32)}
    if axis is None:
        scales["sw"] = scales["sw"].reshape(())
    zeros["zw"] = np.full(scales["sw"].shape, zero, dtype)
    weight = (rng.integers(-100, 100, constant) + zero).astype(dtype)
    arrays = {**{name: np.asarray(array) for name, array in scales.items()}, **zeros, "w": weight}
    return models.model(graph, arrays, opset)


def as_written(proto: onnx.ModelProto, feed: dict[str, np.ndarray]) -> np.ndarray:
    """The result without the rewriting of the runtime, which takes scales along any axis for those of the outputs."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feed)[0]


def check(proto: onnx.ModelProto) -> int:
    """How many operators became integer ones; their results are those of the float ones, but for a code."""
    done = transform(proto, {"passes": ["convert_qdq_to_qop"]})
    feed = models.feeds(proto)
    assert done.proto is not None
    got, expected = as_written(done.proto, feed), as_written(proto, feed)
    assert np.abs(got - expected).max() <= 0.31
    return done.reports[0].fired


@pytest.mark.parametrize("op", SHAPES)
def test_every_combination_of_types_loads(op: str) -> None:
    for opset in (13, 21):
        made = {types: check(quantized(op, types, opset)) for types in itertools.product(TYPES, repeat=3)}
        assert made["int8", "int8", "int8"] and made["uint8", "uint8", "uint8"]
        assert bool(made["uint8", "int8", "uint8"]) == (op in ("Conv", "MatMul"))
        assert not made["int8", "uint8", "int8"] and not made["uint8", "uint8", "int8"]


@pytest.mark.parametrize(("op", "axis", "fits"), [("Conv", 0, 1), ("Conv", 1, 0), ("MatMul", 1, 1), ("MatMul", 0, 0)])
def test_scales_per_channel_where_the_kernel_has_them(op: str, axis: int, fits: int) -> None:
    assert check(quantized(op, ("uint8", "int8", "uint8"), 13, axis)) == fits


def test_no_kernel_adds_with_a_scale_per_channel() -> None:
    assert check(quantized("Add", ("int8", "int8", "int8"), 13, 1)) == 0
