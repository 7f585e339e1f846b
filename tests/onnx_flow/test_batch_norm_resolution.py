"""BatchNormalization is not folded where that would drown channels of a depthwise weight with one scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.onnx import Config, ModelQuantizer, get_default_config


def depthwise_norm(spread: float) -> onnx.ModelProto:
    """A depthwise convolution and a BatchNormalization; every second channel comes out ``spread`` times smaller."""
    graph = """
    depthwise (float[1, 8, 9, 9] x) => (float[1, 8, 9, 9] y) {
        c = Conv <group = 8, kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
        y = BatchNormalization (c, n_scale, n_bias, n_mean, n_var)
    }"""
    scales = np.where(np.arange(8) % 2, spread, 1).astype(np.float32)
    norm = {**models.batch_norm("n", 8), "n_scale": scales, "n_var": np.ones(8, np.float32)}
    return models.model(graph, {"w": models.normal(8, 1, 3, 3), **norm})


def quantized(model: onnx.ModelProto, preset: str, options: dict[str, Any]) -> onnx.ModelProto:
    chosen = get_default_config(preset)
    chosen.extra_options = {**chosen.extra_options, "UseRandomData": True, "PrintSummary": False, **options}
    config = Config(global_quant_config=chosen)
    return ModelQuantizer(config).quantize_model(model, None)


@pytest.mark.parametrize(
    ("spread", "preset", "options", "stays"),
    [
        (1e-3, "A8W8", {}, True),
        (1e-3, "A8W8", {"FoldBatchNorm": True}, False),
        (1e-3, "A8W8_CPU", {}, False),
        (1e-3, "XINT8", {}, False),
        (0.5, "A8W8", {}, False),
    ],
)
def test_a_batch_norm_stays_where_one_scale_would_drown_channels(
    spread: float, preset: str, options: dict[str, Any], stays: bool
) -> None:
    assert ("BatchNormalization" in models.op_types(quantized(depthwise_norm(spread), preset, options))) == stays


def norm_alone(spread: float) -> onnx.ModelProto:
    """A BatchNormalization that nothing can take in."""
    graph = """
    alone (float[1, 8, 9, 9] x) => (float[1, 8, 9, 9] y) {
        r = Relu (x)
        n = BatchNormalization (r, n_scale, n_bias, n_mean, n_var)
        y = Conv <kernel_shape = [1, 1]> (n, w)
    }"""
    scales = np.where(np.arange(8) % 2, spread, 1).astype(np.float32)
    norm = {**models.batch_norm("n", 8), "n_scale": scales, "n_var": np.ones(8, np.float32)}
    return models.model(graph, {"w": models.normal(4, 8, 1, 1), **norm})


@pytest.mark.parametrize(
    ("spread", "preset", "options", "stays"),
    [
        (1e-3, "A16W8", {"EnableNPUCnn": False}, True),
        (1e-3, "A16W8", {"EnableNPUCnn": False, "ConvertBNToConv": True}, False),
        (0.5, "A16W8", {"EnableNPUCnn": False}, False),
        (1e-3, "XINT8", {}, False),
    ],
)
def test_a_batch_norm_alone_stays_where_a_convolution_would_drown_channels(
    spread: float, preset: str, options: dict[str, Any], stays: bool
) -> None:
    assert ("BatchNormalization" in models.op_types(quantized(norm_alone(spread), preset, options))) == stays
