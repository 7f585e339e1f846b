"""Passes that change operators: outputs stay, names of graph outputs stay, a second run finds nothing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.onnx.graph.lift import lift
from quark.onnx.graph.model import load, to_proto
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.passes import float16_to_float32, reduce_mean_to_pool


def means(axes: list[int], keepdims: int, opset: int) -> onnx.ModelProto:
    if opset < 18:
        node = f"m = ReduceMean <axes = {axes}, keepdims = {keepdims}> (x)"
        return models.model(f"g (float[2,3,5,4] x) => (float[a,b] y) {{ {node}  y = Relu(m) }}", {}, opset)
    node = f"m = ReduceMean <keepdims = {keepdims}> (x, axes)"
    weights = {"axes": np.array(axes, np.int64)}
    return models.model(f"g (float[2,3,5,4] x) => (float[a,b] y) {{ {node}  y = Relu(m) }}", weights, opset)


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [[2, 3], [-1, -2], [1, 2], [3]])
def test_a_spatial_mean_becomes_a_pool(axes: list[int], keepdims: int, opset: int) -> None:
    proto = means(axes, keepdims, opset)
    del proto.graph.output[0].type.tensor_type.shape.dim[:]
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    feed = models.feeds(proto)
    model = load(proto)
    infer_shapes(model)
    report = reduce_mean_to_pool.run(model)
    spatial = sorted(axis % 4 for axis in axes) == [2, 3]
    assert report.fired == spatial and (spatial or "not the spatial ones" in report.refused[0])
    assert reduce_mean_to_pool.run(model).fired == 0
    after = to_proto(model)
    assert ("GlobalAveragePool" in models.op_types(after)) == spatial
    models.assert_close(models.run(after, feed), models.run(proto, feed), 1e-6)


def test_a_mean_that_is_the_output_keeps_its_name() -> None:
    proto = models.model("g (float[2,3,5,4] x) => (float[2,3] y) { y = ReduceMean <axes = [2, 3], keepdims = 0> (x) }")
    model = load(proto)
    infer_shapes(model)
    assert reduce_mean_to_pool.run(model).fired == 1
    after, feed = to_proto(model), models.feeds(proto)
    assert [value.name for value in after.graph.output] == ["y"]
    models.assert_close(models.run(after, feed), models.run(proto, feed), 1e-6)


def test_a_float16_model_computes_in_float32() -> None:
    half = {"w": models.normal(4, 3).astype(np.float16), "k": np.array([2], np.float16)}
    body = "h = MatMul(x, w)  c = Cast <to = 10> (z)  s = Add(h, c)  y = Mul(s, k)"
    proto = models.model(f"g (float16[n,4] x, float[n,3] z) => (float16[n,3] y) {{ {body} }}", half)
    model = lift(load(proto), 13)
    assert float16_to_float32.run(model).fired >= 4
    after = to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    x, z = models.normal(5, 4).astype(np.float16), models.normal(5, 3)
    expected = (x.astype(np.float32) @ half["w"].astype(np.float32) + z) * 2
    np.testing.assert_allclose(
        models.run(after, {"x": x.astype(np.float32), "z": z})[0], expected, rtol=1e-5, atol=1e-5
    )
    assert float16_to_float32.run(model).fired == 0


@pytest.mark.parametrize("kept", [False, True])
def test_a_bfloat16_model_computes_in_float32_and_a_rounded_one_stays(kept: bool) -> None:
    half, x = models.normal(4, 3).astype(ml_dtypes.bfloat16), models.normal(5, 4).astype(ml_dtypes.bfloat16)
    proto = models.model("g (bfloat16[5,4] x) => (bfloat16[5,3] y) { h = MatMul(x, w) y = Relu(h) }", {"w": half})
    model = lift(load(proto), 13)
    assert float16_to_float32.run(model, keep_interface=kept).fired >= 2
    after = to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    kinds = {value.type.tensor_type.elem_type for value in (*after.graph.input, *after.graph.output)}
    assert kinds == {onnx.TensorProto.BFLOAT16 if kept else onnx.TensorProto.FLOAT}
    if not kept:
        wide = x.astype(np.float32)
        expected = np.maximum(wide @ half.astype(np.float32), 0)
        np.testing.assert_allclose(models.run(after, {"x": wide})[0], expected, rtol=1e-6, atol=1e-6)
    rounded = "g (float[2] x) => (float[2] y) { h = Cast <to = 16> (x)  y = Cast <to = 1> (h) }"
    assert float16_to_float32.run(lift(load(models.model(rounded, {})), 13)).fired == 0
