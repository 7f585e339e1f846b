"""Promises of options that no test of the flow has to itself, on the network of awkward shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto
from onnxruntime.quantization import QuantType
from tests.onnx_flow import models
from tests.seeds.awkward import GRAPH, Reader, decibels, eight, half, network, quantized, samples, weights
from tests.seeds.custom_operator import library

from quark.onnx import CalibMethod, ExtendedQuantType, ModelQuantizer, QConfig
from quark.onnx.flow import Result


def nodes(result: Result) -> set[str]:
    """Names of the nodes that are quantized."""
    return {name for name, node in result.plan.nodes.items() if node.quantized}


def types(result: Result) -> set[str]:
    return {node.op_type for node in result.plan.nodes.values() if node.quantized}


def test_selected() -> None:
    assert nodes(quantized(NodesToQuantize=["first", "turned"])) == {"first", "turned"}
    assert types(quantized(OpTypesToQuantize=["Conv"])) == {"Conv"}
    assert types(quantized(OpTypesToQuantize=["Conv"], ExtraOpTypesToQuantize=["Gemm"])) == {"Conv", "Gemm"}
    every = types(quantized())
    assert {"Conv", "ConvTranspose", "Gemm", "MatMul"} <= every
    assert every < types(quantized(QuantizeAllOpTypes=True))
    weights = quantized(WeightsOnly=True)
    roles = {tensor.role for name, tensor in weights.plan.tensors.items() if tensor.scale is not None}
    assert "activation" not in roles and decibels(weights.proto) > 35


def test_fp32_scale() -> None:
    proto = half(network())
    feeds = [{name: array.astype(np.float16) for name, array in feed.items()} for feed in samples()]
    for given, expected in ((None, TensorProto.FLOAT), (True, TensorProto.FLOAT), (False, TensorProto.FLOAT16)):
        options = {} if given is None else {"UseFP32Scale": given}
        found = quantized(None, proto, feeds, **options).proto
        stored = {tensor.name: tensor.data_type for tensor in found.graph.initializer}
        scales = {stored[node.input[1]] for node in found.graph.node if node.op_type == "QuantizeLinear"}
        assert scales == {expected}
        assert np.isfinite(models.run(found, feeds[0])[0].astype(np.float32)).all()


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    for given, printed in (({}, True), ({"PrintSummary": True}, True), ({"PrintSummary": False}, False)):
        ModelQuantizer(QConfig(eight(), extra_options=given)).quantize_model(network(), None, Reader(samples()))
        assert bool(capsys.readouterr().out.strip()) == printed


def test_bias() -> None:
    biases = ("b1", "b2", "b3", "b4", "b5", "b6")
    found = {flag: quantized(QuantizeBias=flag).proto for flag in (True, False)}
    kept = {flag: {t.name for t in proto.graph.initializer if t.data_type == 1} for flag, proto in found.items()}
    assert kept[False] >= {"b2", "b3", "b4", "b5", "b6"}  # that of the first convolution has taken up the normalization
    assert not kept[True] & set(biases)
    stored = {t.data_type for t in found[True].graph.initializer if t.name.startswith(biases) and len(t.dims)}
    assert TensorProto.INT32 in stored


@pytest.mark.parametrize("move", ["MaxPool <kernel_shape = [2, 1]> (x)", "Transpose <perm = [0, 1, 3, 2]> (x)"])
def test_force(move: str) -> None:
    """What only moves or chooses values has codes on both sides, though nothing before it is quantized."""
    graph = f"g (float[1, 6, 9, 7] x) => (float y) {{ [move] a = {move} [conv] y = Conv (a, w1, b1) }}"
    proto = models.model(graph, {name: weights()[name] for name in ("w1", "b1")}, opset=17)
    feeds = [{"x": feed["x"][:1]} for feed in samples()]
    forced, free = (quantized(None, proto, feeds, ForceQuantizeNoInputCheck=flag) for flag in (True, False))
    assert nodes(forced) == {"move", "conv"} and nodes(free) == {"conv"}


def test_percentile() -> None:
    layer = eight(calibration_method=CalibMethod.Percentile)
    every = np.sort(np.abs(np.concatenate([feed["x"].ravel() for feed in samples()])))
    for share in (90.0, 99.0, 100.0):
        found = quantized(layer, Percentile=share).plan.tensors["x"].range
        expected = every[int(np.ceil(share / 100 * every.size)) - 1]
        assert found is not None and max(-found[0], found[1]) == pytest.approx(expected)


@pytest.mark.parametrize("pairs", [[("Sigmoid", "Mul")], [["Sigmoid", "Mul"], ["ConvTranspose", "Mul"]]])
def test_between(pairs: list) -> None:
    assert quantized().plan.tensors["s"].scale is not None
    without = quantized(RemoveQDQBetweenOps=pairs)
    read = {name for node in without.proto.graph.node if node.op_type == "QuantizeLinear" for name in node.input[:1]}
    assert "s" not in read and decibels(without.proto) > 20


OVERRIDDEN = {
    "w1": {"quant_type": QuantType.QInt8, "axis": 1},
    "w2": {"quant_type": QuantType.QInt8, "axis": 0},
    "w3": {"quant_type": QuantType.QInt8, "axis": 1},
    "w4": {"quant_type": QuantType.QInt8, "axis": 1},
    "w5": {"quant_type": QuantType.QInt8, "axis": 0},
    "w6": {"quant_type": QuantType.QInt8, "axis": 1},
    "w7": {"quant_type": QuantType.QInt8, "axis": 0},
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_overrides(name: str) -> None:
    """A weight has a scale for every channel of the axis, an output another type, and the rest stays as it was."""
    entry = OVERRIDDEN[name]
    given = {name: [entry], "u": [{"quant_type": ExtendedQuantType.QInt16, "symmetric": True}]}
    result = quantized(TensorQuantOverrides=given)
    shape = next(tensor.dims for tensor in network().graph.initializer if tensor.name == name)
    plan = result.plan.tensors
    assert np.size(plan[name].scale) == shape[entry["axis"]]
    assert plan["u"].spec.format == "int16" and plan["s"].spec.format == "int8"
    plain = quantized().plan.tensors
    others = [one for one in plain if plain[one].role == "weight" and one != name]
    assert all(np.array_equal(plain[one].scale, plan[one].scale) for one in others)
    assert decibels(result.proto) > 25


def test_block_type_of_one_tensor() -> None:
    """The second example of the page: one output in a block format."""
    result = quantized(TensorQuantOverrides={"r": [{"quant_type": ExtendedQuantType.QBFP}]})
    assert "BFPQuantizeDequantize" in {node.op_type for node in result.proto.graph.node}
    assert decibels(result.proto) > 25


@pytest.mark.parametrize("form", ["file", "folder", "relative"])
def test_library(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real library: the operator runs in calibration, stays float, and everything around it is quantized."""
    made = library(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = {"file": str(made), "folder": str(tmp_path), "relative": made.name}[form]
    graph = GRAPH.replace("[relu] r = Relu (n)", "[relu] r0 = Relu (n) [own] r = my.domain.Twice (r0)")
    proto = models.model(graph, weights(), opset=17, domains={"my.domain": 1})
    result = quantized(None, proto, UserCustomOpLibPath=path)
    assert {"first", "depthwise", "turned"} <= nodes(result) and "own" not in nodes(result)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(made))
    runs = [
        onnxruntime.InferenceSession(one.SerializeToString(), options).run(None, samples()[0])[1]
        for one in (result.proto, proto)
    ]
    assert np.abs(runs[0] - runs[1]).max() < 0.05 * np.abs(runs[1]).max()
