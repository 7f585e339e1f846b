"""Scales along any axis of any constant: what the layer reads, what its bias becomes, what the runtime makes of it.

The expected weight is computed here, slice by slice. Sizes are all different, so that no axis passes for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.onnx_flow import models

from quark.errors import ConfigError
from quark.onnx import (
    AdaRoundConfig,
    BFloat16Spec,
    BFP16Spec,
    BiasCorrectionConfig,
    CalibMethod,
    Float16Spec,
    GPTQConfig,
    Int8Spec,
    Int16Spec,
    Int32Spec,
    ModelQuantizer,
    MXInt8Spec,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    QuantType,
    UInt8Spec,
    XInt8Spec,
)

MINMAX, CHANNEL = CalibMethod.MinMax, QuantGranularity.Channel
LAYERS = {
    "int8": QLayerConfig(input_tensors=Int8Spec(calibration_method=MINMAX), weight=Int8Spec()),
    "uint8 per channel": QLayerConfig(
        input_tensors=UInt8Spec(calibration_method=MINMAX), weight=Int8Spec(quant_granularity=CHANNEL)
    ),
    "int16": QLayerConfig(input_tensors=Int16Spec(calibration_method=MINMAX), weight=Int8Spec()),
    "npu": QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()),
}
QUIET = {"PrintSummary": False, "QuantizeAllOpTypes": True}


@dataclass(frozen=True)
class Case:
    """A layer [op] with the constant ``w``, and ``b`` where it has a bias, in front of a Relu."""

    op: str
    input: tuple[int, ...]
    weight: tuple[int, ...]
    output: tuple[int, ...]
    bias: tuple[int, ...] | None = None
    first: bool = False

    @property
    def proto(self) -> onnx.ModelProto:
        """The float model."""
        operands = ["w", "x"] if self.first else ["x", "w"]
        operands += [] if self.bias is None else ["b"]
        body = f"[layer] a = {self.op}({', '.join(operands)}) y = Relu(a)"
        graph = f"g (float{list(self.input)} x) => (float{list(self.output)} y) {{ {body} }}"
        weights = {"w": models.normal(*self.weight, seed=1)}
        return models.model(
            graph, weights | ({} if self.bias is None else {"b": models.normal(*self.bias, seed=2)}), 17
        )


def conv(groups: int, each: int, made: int, bias: bool, dims: int) -> Case:
    """Conv of ``groups`` with ``each`` input channels and ``made`` output channels a group."""
    out = groups * made
    op = f"Conv<group = {groups}>"
    return Case(
        op, (1, groups * each, *[7] * dims), (out, each, *[3] * dims), (1, out, *[5] * dims), (out,) if bias else None
    )


def transpose(groups: int, each: int, made: int, bias: bool, dims: int) -> Case:
    """ConvTranspose, likewise."""
    out, op = groups * made, f"ConvTranspose<group = {groups}>"
    weight = (groups * each, made, *[3] * dims)
    return Case(op, (1, groups * each, *[5] * dims), weight, (1, out, *[7] * dims), (out,) if bias else None)


def gemm(rows: int, inner: int, columns: int, bias: str, turned: tuple[bool, bool]) -> Case:
    """Gemm with either operand transposed, and a bias of any shape that broadcasts."""
    shape = {
        "none": None,
        "full": (columns,),
        "one": (1,),
        "scalar": (),
        "row": (1, columns),
        "column": (rows, 1),
    }[bias]
    op = f"Gemm<transA = {int(turned[0])}, transB = {int(turned[1])}>"
    data, weight = ((rows, inner), (inner, columns))
    return Case(op, data[:: -1 if turned[0] else 1], weight[:: -1 if turned[1] else 1], (rows, columns), shape)


SIZES = st.permutations([2, 3, 5]).map(tuple)
CONVS = st.builds(
    lambda make, sizes, bias, dims: make(*sizes, bias, dims),
    st.sampled_from([conv, transpose]),
    st.one_of(SIZES, SIZES.map(lambda s: (1, *s[1:])), st.sampled_from([(5, 1, 1), (5, 1, 2), (3, 2, 1)])),
    st.booleans(),
    st.integers(1, 2),
)
BIASES = st.sampled_from(["none", "full", "one", "scalar", "row", "column"])
GEMMS = st.builds(
    gemm, st.just(4), st.integers(3, 7), st.integers(3, 7), BIASES, st.tuples(st.booleans(), st.booleans())
)
OTHERS = st.sampled_from(
    [
        Case("MatMul", (4, 6), (6, 5), (4, 5)),
        Case("MatMul", (2, 4, 6), (2, 6, 5), (2, 4, 5)),
        Case("MatMul", (4, 6), (6,), (4,)),
        Case("MatMul", (6, 5), (4, 6), (4, 5), first=True),
        Case("Gemm", (6, 5), (4, 6), (4, 5), (5,), first=True),
        Case("Add", (1, 6, 5, 4), (6, 1, 4), (1, 6, 5, 4)),
        Case("PRelu", (1, 6, 5, 4), (6, 1, 1), (1, 6, 5, 4)),
        Case("InstanceNormalization", (1, 6, 5, 4), (6,), (1, 6, 5, 4), (6,)),
    ]
)


def by_slice(weight: np.ndarray, axis: int) -> np.ndarray:
    """int8, symmetric and narrow, one scale for every slice along ``axis``."""
    made = np.empty_like(weight)
    for index in range(weight.shape[axis]):
        at = (slice(None),) * axis + (index,)
        scale = np.float32(np.abs(weight[at]).max() / np.float32(127))
        made[at] = np.rint(weight[at] / scale) * scale
    return made


def unoptimized(proto: onnx.ModelProto, feed: dict[str, np.ndarray], *tensors: str) -> list[np.ndarray]:
    """The model's output and the values of tensors, computed node by node."""
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(shown.SerializeToString(), options).run(None, feed)


def sqnr(expected: np.ndarray, found: np.ndarray) -> float:
    error = np.square(expected.astype(np.float64) - found).sum()
    return float("inf") if error == 0 else float(10 * np.log10(np.square(expected, dtype=np.float64).sum() / error))


def quantized(case: Case, layer: QLayerConfig, **options: Any) -> tuple[onnx.ModelProto, list[np.ndarray]]:
    """The checked model, and what its layer reads: [output, weight, bias]; it runs the same in both ways."""
    proto, config = case.proto, QConfig(layer, extra_options=QUIET | options)
    feed = models.feeds(proto)
    made = ModelQuantizer(config).quantize_model(proto, None, [feed])
    assert made is not None
    onnx.checker.check_model(made, full_check=True)
    [node] = [node for node in made.graph.node if node.name == "layer"]
    read = [node.input[not case.first], *node.input[2:]]
    initializers = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    plain = unoptimized(made, feed, *(name for name in read if name not in initializers))
    seen = dict(zip([name for name in read if name not in initializers], plain[1:], strict=True)) | initializers
    assert sqnr(models.run(proto, feed)[0], plain[0]) > 20
    assert sqnr(plain[0], models.run(made, feed)[0]) > 30
    return made, [plain[0], *(seen[name] for name in read)]


@settings(max_examples=20)
@given(st.one_of(CONVS, GEMMS, OTHERS), st.integers(0, 3), st.sampled_from(list(LAYERS)), st.booleans())
def test_a_constant_has_its_scales_along_the_axis_that_it_was_told(
    case: Case, axis: int, layer: str, typed: bool
) -> None:
    axis %= len(case.weight)
    told = {"axis": axis - len(case.weight) * typed} | ({"quant_type": QuantType.QInt8} if typed else {})
    _, (_, weight, *bias) = quantized(case, LAYERS[layer], TensorQuantOverrides={"w": [told]})
    values = models.normal(*case.weight, seed=1)
    if layer != "npu" and not (case.first or case.op == "Add"):  # operands have the activation's type
        np.testing.assert_allclose(weight, by_slice(values, axis), rtol=2e-6)
    else:
        assert sqnr(values, weight) > 25
    if bias and case.bias is not None:
        step = np.abs(weight).max() / 127 if layer != "npu" else 0.1
        np.testing.assert_allclose(bias[0], models.normal(*case.bias, seed=2), atol=step)


@settings(max_examples=20)
@given(st.one_of(CONVS, GEMMS), st.integers(0, 3), st.sampled_from(["int8", "uint8 per channel", "int16"]))
def test_an_axis_by_operator_type_is_the_same(case: Case, axis: int, layer: str) -> None:
    axis %= len(case.weight)
    specs = QLayerConfig(
        input_tensors=LAYERS[layer].input_tensors, weight=Int8Spec(quant_granularity=QuantGranularity.Channel)
    )
    op = case.op.split("<")[0]
    _, (_, weight, *_) = quantized(case, specs, QDQOpTypePerChannelSupportToAxis={op: axis})
    np.testing.assert_allclose(weight, by_slice(models.normal(*case.weight, seed=1), axis), rtol=2e-6)


@settings(max_examples=20)
@given(
    st.one_of(CONVS, GEMMS),
    st.sampled_from(["w", "x"]),
    st.sampled_from(["int16", "int32", "bfloat16", "bfp16", "mx9", "uint8"]),
    st.sampled_from(list(LAYERS)),
)
def test_a_layer_told_another_type_keeps_its_bias(case: Case, name: str, kind: str, layer: str) -> None:
    told = {"quant_type": kind} | ({"symmetric": False} if kind == "uint8" else {})
    quantized(case, LAYERS[layer], TensorQuantOverrides={name: [told]})


@pytest.mark.parametrize("layer", list(LAYERS))
@pytest.mark.parametrize("adjusted", [True, False])
@pytest.mark.parametrize("case", [gemm(4, 6, 5, "full", (False, True)), conv(1, 6, 5, True, 2)], ids=["Gemm", "Conv"])
def test_a_bias_of_32_bits_at_a_scale_of_its_own_is_not_taken_for_a_product(
    case: Case, layer: str, adjusted: bool
) -> None:
    """The runtime's integer kernels take every int32 bias for codes at input scale x weight scale."""
    specs = QLayerConfig(input_tensors=LAYERS[layer].input_tensors, weight=LAYERS[layer].weight, bias=Int32Spec())
    _, (*_, bias) = quantized(case, specs, AdjustBiasScale=adjusted)
    assert sqnr(models.normal(*case.bias or (), seed=2), bias) > 30


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("algorithm", [AdaRoundConfig(num_iterations=20), GPTQConfig(), BiasCorrectionConfig()])
def test_algorithms_round_along_the_axis(axis: int, turned: bool, algorithm: Any) -> None:
    """What they write are codes of the very scales that rounding to nearest has: their steps tell."""
    case = gemm(16, 6, 5, "full", (False, turned))
    proto, feeds = case.proto, [models.feeds(case.proto, seed) for seed in range(4)]
    options = QUIET | {"TensorQuantOverrides": {"w": [{"axis": axis}]}}
    made = ModelQuantizer(QConfig(LAYERS["int8"], algo_config=[algorithm], extra_options=options)).quantize_model(
        proto, None, feeds
    )
    assert made is not None
    [node] = [node for node in made.graph.node if node.name == "layer"]
    plain = unoptimized(made, feeds[0], node.input[1])
    values = models.normal(*case.weight, seed=1)
    steps = np.abs(values).max(1 - axis, keepdims=True) / 127
    codes = plain[1] / steps
    np.testing.assert_allclose(codes, np.rint(codes), atol=2e-3)
    assert np.abs(codes - values / steps).max() < 1.01
    assert sqnr(plain[0], models.run(made, feeds[0])[0]) > 30


@pytest.mark.parametrize("spec", [BFloat16Spec, BFP16Spec, MXInt8Spec, Float16Spec])
def test_an_axis_of_a_type_without_scales_per_channel_is_refused(spec: Any) -> None:
    case = gemm(4, 6, 5, "full", (False, True))
    config = QConfig(
        QLayerConfig(input_tensors=spec(), weight=spec()),
        extra_options=QUIET | {"TensorQuantOverrides": {"w": [{"axis": 0}]}},
    )
    with pytest.raises(ConfigError, match=r"\['w'\]: the data type '.*' has no scale per channel; leave out axis"):
        ModelQuantizer(config).quantize_model(case.proto, None, [models.feeds(case.proto)])


def test_a_weight_of_two_layers_with_different_channels_is_right_for_both() -> None:
    graph = """g (float[5,6] x) => (float[5,6] y) {
        a = Gemm<transB = 1>(x, w, b) c = Gemm(a, w, b) y = Relu(c) }"""
    proto = models.model(graph, {"w": models.normal(6, 6, seed=1), "b": models.normal(6, seed=9)}, 17)
    feed = models.feeds(proto)
    for axis in (0, 1):
        options = QUIET | {"TensorQuantOverrides": {"w": [{"axis": axis}]}}
        made = ModelQuantizer(QConfig(LAYERS["int8"], extra_options=options)).quantize_model(proto, None, [feed])
        assert made is not None
        plain = unoptimized(made, feed)[0]
        assert sqnr(models.run(proto, feed)[0], plain) > 20 and sqnr(plain, models.run(made, feed)[0]) > 30
