"""Equalization by data in a graph: the float function stays, and formats per tensor keep what they lost."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.errors import ConfigError
from quark.files.journal import Journal
from quark.onnx import CalibMethod, ChannelEqualizationConfig, Int8Spec, ModelQuantizer, QConfig, QLayerConfig
from quark.onnx.algorithms import equalization
from quark.onnx.algorithms.context import JobContext
from quark.onnx.graph.model import load, to_proto
from quark.onnx.scratch import Scratch

INT8 = Int8Spec(calibration_method=CalibMethod.MinMax)
SAMPLES = [{"x": models.normal(1, 3, 8, 8, seed=seed)} for seed in range(8)]


def net() -> onnx.ModelProto:
    """Conv, SiLU, depthwise Conv, SiLU, Concat with a second branch (ReLU, pool), Conv; channels differ in size."""
    graph = """
    net (float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y) {
        u1 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1, b1)
        s1 = Sigmoid (u1)
        v1 = Mul (u1, s1)
        u2 = Conv <group = 6, kernel_shape = [3, 3]> (v1, w2, b2)
        s2 = Sigmoid (u2)
        v2 = Mul (s2, u2)
        u3 = Conv <kernel_shape = [1, 1]> (x, w3, b3)
        r3 = Relu (u3)
        m3 = MaxPool <kernel_shape = [3, 3]> (r3)
        c = Concat <axis = 1> (v2, m3)
        y = Conv <kernel_shape = [1, 1]> (c, w4, b4)
    }"""
    sizes = (4.0 ** np.arange(-2, 4)).astype(np.float32).reshape(6, 1, 1, 1)
    weights = {
        "w1": models.normal(6, 3, 3, 3) * sizes, "b1": models.normal(6) * 0.1, "w2": models.normal(6, 1, 3, 3) / sizes,
        "b2": models.normal(6) * 0.1, "w3": models.normal(5, 3, 1, 1), "b3": models.normal(5) * 0.1,
        "w4": models.normal(4, 11, 1, 1), "b4": models.normal(4),
    }  # fmt: skip
    return onnx.shape_inference.infer_shapes(models.model(graph, weights))


NET = net()


def quantized(algorithms: list[object], proto: onnx.ModelProto = NET) -> onnx.ModelProto:
    config = QConfig(QLayerConfig(INT8, weight=INT8), algo_config=algorithms, extra_options={"PrintSummary": False})
    found = ModelQuantizer(config).quantize_model(proto, None, SAMPLES)
    onnx.checker.check_model(found, full_check=True)
    return found


def equalized(config: ChannelEqualizationConfig, proto: onnx.ModelProto = NET) -> tuple[onnx.ModelProto, int]:
    model, job = load(proto), QConfig(QLayerConfig(INT8, weight=INT8)).compile()
    with Scratch(job.options) as scratch:
        report = equalization.run(model, config, JobContext(job, SAMPLES, scratch, Journal(), lambda *_: None))
    return to_proto(model), report.fired


def outputs(proto: onnx.ModelProto) -> np.ndarray:
    session = models.session(proto)
    return np.concatenate([session.run(None, feed)[0] for feed in SAMPLES])


def test_the_float_function_stays_to_the_last_bits() -> None:
    proto, fired = equalized(ChannelEqualizationConfig())
    assert fired == 3 and proto != NET
    np.testing.assert_allclose(outputs(proto), outputs(NET), rtol=2e-4, atol=2e-4)


def test_weights_per_tensor_of_unlike_channels_keep_their_values() -> None:
    reference = outputs(NET)
    plain, better = (
        np.square(outputs(quantized(one)) - reference).mean() for one in ([], [ChannelEqualizationConfig()])
    )
    assert better < plain / 8


def test_only_the_gate_reads_the_rescaled_result() -> None:
    proto, _ = equalized(ChannelEqualizationConfig())
    added = [node for node in proto.graph.node if node.op_type == "Mul" and node.input[1].endswith("_s")]
    assert len(added) == 2
    for node in added:
        assert [reader.op_type for reader in proto.graph.node if node.output[0] in reader.input] == ["Sigmoid"]
    plain, _ = equalized(ChannelEqualizationConfig(through_silu=False))
    assert [node.op_type for node in plain.graph.node] == [node.op_type for node in NET.graph.node]


def test_what_the_gate_reads_is_no_wider_than_where_it_is_flat() -> None:
    proto = quantized([ChannelEqualizationConfig()])
    scales = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    quantizers = {node.input[0]: node.input[1] for node in proto.graph.node if node.op_type == "QuantizeLinear"}
    wholes = [name for name in quantizers if name.endswith("_whole")]
    assert len(wholes) == 2
    for name in wholes:
        np.testing.assert_allclose(scales[quantizers[name]], 8 / 127, rtol=1e-6)


@pytest.mark.parametrize("reader", ["Add", "output"])
def test_results_that_others_read_stay(reader: str) -> None:
    proto = onnx.ModelProto.FromString(NET.SerializeToString())
    node = onnx.helper.make_node("Neg", ["c"], ["z"]) if reader == "Add" else None
    if node is not None:
        proto.graph.node.append(node)
    proto.graph.output.append(onnx.helper.make_tensor_value_info("z" if node else "c", 1, None))
    _, fired = equalized(ChannelEqualizationConfig(), proto)
    assert fired == 1  # the first pair only: the others meet in the tensor that is read elsewhere


@pytest.mark.parametrize(("field", "value"), [("steps", 0), ("widest", 0.5), ("through_silu", 1), ("data_size", True)])
def test_bad_settings_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"ChannelEqualizationConfig: {field}=.* must be"):
        ChannelEqualizationConfig(**{field: value})


def test_every_chain_is_gone_through_so_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [], equalization.equalizing_scales

    def counted(*given: object) -> np.ndarray:
        calls.append(given)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(equalization, "equalizing_scales", counted)
    assert equalized(ChannelEqualizationConfig(steps=2))[1] == 3 and len(calls) == 3 * 2


@pytest.mark.parametrize("changed", [{"through_silu": False}, {"widest": 2.0}, {"data_size": 1}], ids=str)
def test_a_field_has_an_effect(changed: dict[str, object]) -> None:
    base, other = (equalized(ChannelEqualizationConfig(**fields))[0] for fields in ({}, changed))  # type: ignore[arg-type]
    assert base.SerializeToString() != other.SerializeToString()
