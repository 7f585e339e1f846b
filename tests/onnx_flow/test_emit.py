"""Emission: the file holds what the Plan says, and ONNX Runtime computes what the arithmetic says.

Expected numbers are written out here with NumPy; none comes from the package.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.onnx import (
    Int4Spec,
    Int8Spec,
    Int16Spec,
    Int32Spec,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    UInt4Spec,
    UInt8Spec,
    UInt16Spec,
)
from quark.onnx.graph.model import load, to_proto
from quark.onnx.pipeline import prepare
from quark.onnx.qdq.emit import emit
from quark.onnx.qdq.parameters import observed, set_parameters
from quark.onnx.qdq.place import place

RNG = np.random.default_rng(7)
X = RNG.normal(size=(5, 12)).astype(np.float32)
W = (RNG.normal(size=(12, 6)) * np.exp2(np.arange(6) - 3)).astype(np.float32)
B = RNG.normal(size=6).astype(np.float32)


def gemm_model(weight: np.ndarray = W, bias: np.ndarray = B, opset: int = 13) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="fc")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 6])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "b")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def emitted(
    config: QConfig, ranges: dict[str, tuple[float, float]], proto: onnx.ModelProto | None = None
) -> onnx.ModelProto:
    job = config.compile()
    prepared = prepare(load(proto or gemm_model()), job)
    model, job = prepared.model, prepared.job
    plan = place(model, job)
    set_parameters(model, plan, {t.name: ranges[t.name] for t in observed(plan, job.options)}, job.options)
    result = to_proto(emit(model, plan, job.options))
    onnx.checker.check_model(result, full_check=True)
    return result


def stored(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: ir.serde.deserialize_tensor(tensor).numpy() for tensor in proto.graph.initializer}


def run(proto: onnx.ModelProto, x: np.ndarray = X) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def layer(inputs: object, weight: object, **more: object) -> QConfig:
    return QConfig(QLayerConfig(input_tensors=inputs, weight=weight), **more)  # type: ignore[arg-type]


FORCED = {"ForceQuantizeNoInputCheck": True}
FULL = {"x": (-4.0, 4.0), "y": (-100.0, 100.0)}


def test_int8_symmetric_stores_narrow_codes_int32_biases_and_computes_with_them() -> None:
    proto = emitted(layer(Int8Spec(), Int8Spec(), extra_options=FORCED), FULL)
    values = stored(proto)
    w_scale = np.float32(np.abs(W).max() / 127)
    np.testing.assert_allclose(values["w_scale"], w_scale, rtol=1e-7)
    np.testing.assert_array_equal(values["w_quantized"], np.clip(np.rint(W / values["w_scale"]), -127, 127))
    assert values["w_quantized"].dtype == np.int8 and values["b_quantized"].dtype == np.int32
    x_scale, y_scale = np.float32(4 / 127), np.float32(100 / 127)
    np.testing.assert_array_equal(
        values["b_quantized"], np.rint(B.astype(np.float64) / (np.float64(x_scale) * w_scale))
    )
    x_hat = np.clip(np.rint(X / x_scale), -128, 127) * x_scale
    w_hat = values["w_quantized"] * w_scale
    b_hat = values["b_quantized"] * (x_scale * w_scale)
    y_hat = np.clip(np.rint((x_hat @ w_hat + b_hat) / y_scale), -128, 127) * y_scale
    np.testing.assert_allclose(run(proto), y_hat, atol=1e-5)


def test_uint8_asymmetric_covers_the_range_and_keeps_zero_exact() -> None:
    proto = emitted(layer(UInt8Spec(), Int8Spec()), {"x": (-1.0, 3.0), "y": (-100.0, 100.0)})
    values = stored(proto)
    np.testing.assert_allclose(values["x_scale"], 4 / 255, rtol=1e-6)
    assert values["x_zero_point"] == np.round(255 / 4) and values["x_zero_point"].dtype == np.uint8


def test_per_channel_weights_and_biases_have_one_scale_per_column() -> None:
    proto = emitted(layer(Int8Spec(), Int8Spec(quant_granularity=QuantGranularity.Channel)), FULL)
    values = stored(proto)
    np.testing.assert_allclose(values["w_scale"], np.abs(W).max(0) / 127, rtol=1e-6)
    np.testing.assert_allclose(values["b_quantized_scale"], values["x_scale"] * values["w_scale"], rtol=1e-6)
    axes = {n.name: {a.name: a.i for a in n.attribute} for n in proto.graph.node if n.op_type == "DequantizeLinear"}
    assert axes["w_DequantizeLinear"] == {"axis": 1} and axes["b_DequantizeLinear"] == {"axis": 0}
    reference = np.clip(np.rint(X / (4 / 127)), -128, 127) * (4 / 127) @ (values["w_quantized"] * values["w_scale"])
    assert np.abs(run(proto) - reference - B).max() < 0.5 * 100 / 127 + 1e-2


def test_groups_of_four_bits_use_blocks_at_opset_21_and_half_a_byte() -> None:
    weight = UInt4Spec(quant_granularity=QuantGranularity.Group, group_size=4)
    proto = emitted(layer(Int8Spec(), weight), FULL)
    assert proto.opset_import[0].version == 21
    tensor = next(t for t in proto.graph.initializer if t.name == "w_quantized")
    assert tensor.data_type == TensorProto.UINT4 and len(tensor.raw_data) == W.size // 2
    node = next(n for n in proto.graph.node if n.name == "w_DequantizeLinear")
    assert {a.name: a.i for a in node.attribute} == {"axis": 0, "block_size": 4}
    groups = W.reshape(3, 4, 6)
    lo, hi = np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
    np.testing.assert_allclose(stored(proto)["w_scale"], (hi - lo) / 15, rtol=1e-6)
    assert np.isfinite(run(proto)).all()


def test_a_last_group_may_be_shorter() -> None:
    weight = Int4Spec(quant_granularity=QuantGranularity.Group, group_size=8)
    proto = emitted(layer(Int8Spec(), weight), FULL)
    assert stored(proto)["w_scale"].shape == (2, 6)
    rows = [np.abs(W[:8]).max(0) / 7, np.abs(W[8:]).max(0) / 7]
    np.testing.assert_allclose(stored(proto)["w_scale"], rows, rtol=1e-6)
    x_hat = np.clip(np.rint(X / np.float32(4 / 127)), -128, 127) * np.float32(4 / 127)
    scale = np.concatenate([np.repeat(rows[:1], 8, 0), np.repeat(rows[1:], 4, 0)])
    y = x_hat @ (np.clip(np.rint(W / scale), -7, 7) * scale) + B
    assert np.abs(run(proto) - y).max() <= 0.5 * 100 / 127 + 1e-4


@pytest.mark.parametrize(("spec", "dtype"), [(Int16Spec, np.int16), (UInt16Spec, np.uint16)])
def test_sixteen_bits_use_standard_operators_at_opset_21(spec: type, dtype: type) -> None:
    proto = emitted(layer(spec(), Int8Spec()), FULL)
    assert proto.opset_import[0].version == 21 and {n.domain for n in proto.graph.node} == {""}
    assert stored(proto)["x_zero_point"].dtype == dtype
    assert np.abs(run(proto) - run(gemm_model())).max() < np.abs(W).max() / 127 * 12 * 4


def test_int32_weights_are_stored_and_read_by_the_standard_operator() -> None:
    proto = emitted(layer(Int16Spec(), Int32Spec(), extra_options={"QuantizeBias": False}), FULL)
    assert stored(proto)["w_quantized"].dtype == np.int32
    np.testing.assert_allclose(run(proto), run(gemm_model()), atol=0.02)


def test_a_bias_that_would_overflow_makes_its_weight_scale_grow() -> None:
    weight = W.copy()
    weight[:, 2] = 1e-9  # a dead channel: its scale times the input's is far below bias / 2**31
    proto = emitted(layer(Int8Spec(), Int8Spec(quant_granularity=QuantGranularity.Channel)), FULL, gemm_model(weight))
    values = stored(proto)
    rebuilt = values["b_quantized"].astype(np.float64) * values["b_quantized_scale"]
    np.testing.assert_allclose(rebuilt, B, atol=1e-2)
    assert abs(values["b_quantized"].astype(np.int64)).max() < 2**31 - 1


def test_weights_only_leaves_activations_alone_and_needs_no_ranges() -> None:
    proto = emitted(layer(None, Int8Spec(), extra_options={"WeightsOnly": True}), {})
    assert [n.op_type for n in proto.graph.node] == ["DequantizeLinear", "Gemm"]
    scale = np.abs(W).max() / 127
    np.testing.assert_allclose(run(proto), X @ (np.rint(W / scale) * scale) + B, atol=1e-3)


def test_float_weights_can_stay_behind_a_pair() -> None:
    proto = emitted(layer(Int8Spec(), Int8Spec(), extra_options={"AddQDQPairToWeight": True}), FULL)
    np.testing.assert_array_equal(stored(proto)["w"], W)
    np.testing.assert_array_equal(run(proto), run(emitted(layer(Int8Spec(), Int8Spec()), FULL)))


def test_a_pair_per_consumer_on_request() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13]>
        g (float[2,4] x) => (float[2,4] y, float[2,4] z) { [a] y = Sigmoid(x)   [b] z = Tanh(x) }"""
    )
    ranges = {"x": (-1.0, 1.0), "y": (0.0, 1.0), "z": (-1.0, 1.0)}
    shared = emitted(layer(Int8Spec(), Int8Spec(), extra_options=FORCED), ranges, proto)
    dedicated = emitted(
        layer(Int8Spec(), Int8Spec(), extra_options={**FORCED, "DedicatedQDQPair": True}), ranges, proto
    )
    assert sum(n.op_type == "QuantizeLinear" for n in shared.graph.node) == 3
    assert sum(n.op_type == "QuantizeLinear" for n in dedicated.graph.node) == 4
    proto.graph.node[1].input[0] = "y"  # one reader each: there is nothing to share, and the result y is quantized, too
    graphs = [
        emitted(layer(Int8Spec(), Int8Spec(), extra_options={**FORCED, "DedicatedQDQPair": on}), ranges, proto).graph
        for on in (True, False)
    ]
    assert graphs[0] == graphs[1] and sum(n.op_type == "QuantizeLinear" for n in graphs[0].node) == 3


def test_graph_inputs_and_outputs_keep_their_names() -> None:
    proto = emitted(layer(Int8Spec(), Int8Spec()), FULL)
    assert [v.name for v in proto.graph.input] == ["x"] and [v.name for v in proto.graph.output] == ["y"]


def test_a_float_reader_of_a_float_tensor_keeps_the_float_values() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13]>
        g (float[2,4] x) => (float[2,4] y, float[2,4] z) { [a] y = Sigmoid(x)   [b] z = Exp(x) }"""
    )
    result = emitted(layer(Int8Spec(), Int8Spec()), {"x": (-1.0, 1.0), "y": (0.0, 1.0)}, proto)
    assert next(n for n in result.graph.node if n.op_type == "Exp").input[0] == "x"
