"""Defaults for which the text has a rule: each rule on models that it tells apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from tests.onnx_flow import models
from tests.seeds.awkward import eight, half, network, quantized, samples
from tests.seeds.values import BLOCKS, BRAIN, POWERS

from quark.onnx import (
    CalibMethod,
    Config,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    get_default_config,
)
from quark.onnx.flow import Result

SIXTEEN = QLayerConfig(input_tensors=Int16Spec(calibration_method=CalibMethod.MinMax), weight=eight().weight)


def operators(result: Result) -> set[str]:
    return {node.op_type for node in result.proto.graph.node}


def test_float16_models_compute_in_float16_by_themselves() -> None:
    """QuantizeFP16 and UseFP32Scale."""
    feeds = [{name: array.astype(np.float16) for name, array in feed.items()} for feed in samples()]
    found = quantized(None, half(network()), feeds).proto
    assert found.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT16
    stored = {tensor.name: tensor.data_type for tensor in found.graph.initializer}
    scales = {stored[node.input[1]] for node in found.graph.node if node.op_type == "QuantizeLinear"}
    assert scales == {TensorProto.FLOAT}  # as QuantizeFP16, which is on
    assert network().graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT


@pytest.mark.parametrize(("layer", "expected"), [(eight(), "int32"), (SIXTEEN, "int32"), (POWERS, "int8")])
def test_biases_have_32_bits_but_in_the_flow_of_the_npu(layer: QLayerConfig, expected: str) -> None:
    plan = quantized(layer).plan.tensors
    assert {plan[name].spec.format for name in ("b2", "b3", "b5")} == {expected}


def test_a_matmul_of_two_activations_is_quantized_statically_and_not_dynamically() -> None:
    graph = """g (float[2, 5, 7] x) => (float y) {
        t = Transpose <perm = [0, 2, 1]> (x)
        [two] m = MatMul (x, t)
        [one] y = MatMul (m, w)
    }"""
    proto = models.model(graph, {"w": models.normal(5, 3)}, opset=17)
    feeds = [models.feeds(proto)]
    static = quantized(None, proto, feeds).plan.nodes
    dynamic = ModelQuantizer(Config(get_default_config("UINT8_DYNAMIC_QUANT"))).run(proto, None, None).plan.nodes
    assert static["two"].quantized and static["one"].quantized
    assert not dynamic["two"].quantized and dynamic["one"].quantized


@pytest.mark.parametrize(
    ("method", "symmetric"),
    [("MinMax", False), ("Entropy", False), ("Percentile", True), ("LayerwisePercentile", True)],
)
def test_ranges_are_symmetric_by_method(method: str, symmetric: bool) -> None:
    """Data of one side: symmetric methods judge |x| by one threshold, and end where the data end unless told."""
    layer = eight(calibration_method=CalibMethod[method], symmetric=False)
    feeds = [{"x": np.clip(np.abs(feed["x"]) * 3, 0, 3) - 0.5, "z": feed["z"]} for feed in samples()]
    default, mirrored, free = (
        quantized(layer, None, feeds, CalibTensorRangeSymmetric=flag).plan.tensors["x"].range
        for flag in (None, True, False)
    )
    least = float(min(feed["x"].min() for feed in feeds))
    assert mirrored[0] == -mirrored[1]
    assert default == ((max(mirrored[0], least), mirrored[1]) if symmetric else free)


def test_the_least_error_of_powers_of_two_is_symmetric() -> None:
    layer = QLayerConfig(input_tensors=POWERS.input_tensors, weight=POWERS.weight)
    default, said = (
        quantized(layer, None, None, **given).plan.tensors["x"] for given in ({}, {"CalibTensorRangeSymmetric": True})
    )
    assert default.range == said.range and int(default.zero_point) in (0, 128)


FORMS = {
    "ConvertBNToConv": ("BatchNormalization (x, s, s, s, s)", "BatchNormalization"),
    "ConvertReduceMeanToGlobalAvgPool": ("ReduceMean <axes = [2, 3], keepdims = 1> (x)", "ReduceMean"),
    "SplitLargeKernelPool": ("GlobalAveragePool (x)", "GlobalAveragePool"),
    "ConvertSplitToSlice": ("Slice (x, a, b, b)", "Split"),
}


@pytest.mark.parametrize("option", FORMS)
@pytest.mark.parametrize(
    ("layer", "options", "on"),
    [
        (eight(), {}, False),
        (POWERS, {}, True),
        (SIXTEEN, {}, True),
        (BRAIN, {"BF16QDQToCast": True}, False),
        (BRAIN, {"EnableVaimlBF16": True}, False),
    ],
    ids=["int8", "powers of two", "extended", "casts", "vaiml"],
)
def test_forms_for_devices(option: str, layer: QLayerConfig, options: dict[str, Any], on: bool) -> None:
    size = "32, 20"  # more than 512 pixels
    body = {
        "ConvertBNToConv": "n = BatchNormalization (x, s, s, s, v) y = Relu (n)",
        "ConvertReduceMeanToGlobalAvgPool": "m = ReduceMean <axes = [2, 3], keepdims = 1> (x) y = Relu (m)",
        "SplitLargeKernelPool": "g = GlobalAveragePool (x) y = Relu (g)",
        "ConvertSplitToSlice": "a, b = Split <axis = 1> (x, parts) y = Concat <axis = 0> (a, b)",
    }[option]
    stays = FORMS[option][1]
    words = {"s": np.full(6, 0.5, np.float32), "v": np.full(6, 2, np.float32), "parts": np.array([3, 3], np.int64)}
    used = {name: array for name, array in words.items() if f"{name}," in body or f"{name})" in body}
    proto = models.model(f"net (float[1, 6, {size}] x) => (float y) {{ {body} }}", used, opset=13)
    found = quantized(layer, proto, [models.feeds(proto)], QuantizeAllOpTypes=True, **options)
    done = "AveragePool" in operators(found) if option == "SplitLargeKernelPool" else stays not in operators(found)
    assert done == on


DEVICE = {
    "ConvertLeakyReluToDPUVersion": "LeakyRelu <alpha = 0.1> (a)",
    "ConvertSigmoidToHardSigmoid": "Sigmoid (a)",
    "ConvertHardSigmoidToDPUVersion": "HardSigmoid <alpha = 0.16666667> (a)",
    "ConvertAvgPoolToDPUVersion": "GlobalAveragePool (a)",
    "ConvertReduceMeanToDPUVersion": "ReduceMean <axes = [2, 3], keepdims = 1> (a)",
}


@pytest.mark.parametrize("option", DEVICE)
def test_functions_of_the_device(option: str) -> None:
    """On in the flow of the NPU; elsewhere on request only, and never without SimulateDPU."""
    graph = f"g (float[1, 6, 9, 9] x) => (float y) {{ a = Conv (x, w, b) y = {DEVICE[option]} }}"
    proto = models.model(graph, {"w": models.normal(4, 6, 3, 3) * 0.2, "b": models.normal(4)}, opset=13)
    keep = {"ConvertReduceMeanToGlobalAvgPool": False}

    def text(layer: QLayerConfig, **given: Any) -> bytes:
        return quantized(layer, proto, [models.feeds(proto)], **keep, **given).proto.graph.SerializeToString()

    assert text(POWERS) == text(POWERS, **{option: True}) != text(POWERS, **{option: False})
    assert text(SIXTEEN) == text(SIXTEEN, **{option: False})


@pytest.mark.parametrize("option", ["AlignConcat", "AlignPool", "AlignPad", "AlignSlice"])
def test_alignment_is_for_powers_of_two(option: str) -> None:
    plans = [
        quantized(layer, None, None, **given).plan
        for layer in (POWERS, SIXTEEN)
        for given in ({}, {option: layer is POWERS})
    ]
    assert [plan.tensors[name].scale for plan in plans[:1] for name in ("c", "j")] == [
        plan.tensors[name].scale for plan in plans[1:2] for name in ("c", "j")
    ]
    assert {name: float(np.ravel(one.scale)[0]) for name, one in plans[2].tensors.items() if one.scale is not None} == {
        name: float(np.ravel(one.scale)[0]) for name, one in plans[3].tensors.items() if one.scale is not None
    }


def test_normalizations_fold_as_far_as_the_model_is_optimized() -> None:
    assert "BatchNormalization" not in operators(quantized())
    assert "BatchNormalization" in operators(quantized(OptimizeModel=False))
    assert "BatchNormalization" not in operators(quantized(OptimizeModel=False, FoldBatchNorm=True))


def test_blocks_run_along_the_summed_axis() -> None:
    proto = models.model(
        "g (float[2, 5, 24] x) => (float y) { y = MatMul (x, w) }", {"w": models.normal(24, 7)}, opset=17
    )
    given = ({}, {"RefineBlockAxis": True}, {"RefineBlockAxis": False})
    default, said, other = (quantized(BLOCKS, proto, [models.feeds(proto)], **one).proto for one in given)
    axes = [
        [
            attribute.i
            for node in proto.graph.node
            for attribute in node.attribute
            if attribute.name == "axis" and "Quantize" in node.op_type
        ]
        for proto in (default, said, other)
    ]
    assert axes[0] == axes[1] != axes[2]


@pytest.mark.parametrize("spec", [Int8Spec, Int16Spec])
def test_no_option_is_needed(spec: type) -> None:
    """The three statements of the page, with a reader that has get_next only."""
    config = QConfig(
        global_config=QLayerConfig(input_tensors=spec(), weight=Int8Spec()), extra_options={"PrintSummary": False}
    )
    assert quantized(config.global_config).proto is not None
