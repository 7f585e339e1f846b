"""Bias correction in the flow: means come back, biases stay on their grid, nothing gets worse."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.onnx import BiasCorrectionConfig, CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, XInt8Spec


def net() -> onnx.ModelProto:
    graph = """
    net (float[N, 3, 8, 8] x) => (float[N, 4] y, float[N, 8, 8, 8] c) {
        c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1, b1)
        s = Sigmoid (c)
        m = Mul (c, s)
        d = Conv <group = 8, kernel_shape = [3, 3]> (m, w2, b2)
        g = GlobalAveragePool (d)
        f = Flatten (g)
        y = Gemm <transB = 1> (f, v, e)
    }"""
    sizes = np.exp(np.linspace(0, -4, 8)).astype(np.float32).reshape(8, 1, 1, 1)
    weights = {
        "w1": models.normal(8, 3, 3, 3) * sizes + 0.02, "b1": models.normal(8) * 0.1,
        "w2": models.normal(8, 1, 3, 3) * sizes,
        "b2": models.normal(8), "v": models.normal(4, 8), "e": models.normal(4),
    }  # fmt: skip
    return models.model(graph, weights)


NET = net()
SAMPLES = [{"x": models.normal(1, 3, 8, 8, seed=seed) + 1} for seed in range(16)]


def outputs(spec, algos: list) -> list[np.ndarray]:
    config = QConfig(
        QLayerConfig(input_tensors=spec, weight=spec), algo_config=algos, extra_options={"PrintSummary": False}
    )
    proto = ModelQuantizer(config).quantize_model(NET, None, SAMPLES)
    onnx.checker.check_model(proto, full_check=True)
    run = models.session(proto)
    return [np.concatenate(parts) for parts in zip(*(run.run(None, s) for s in SAMPLES), strict=True)]


FLOAT = [np.concatenate(p) for p in zip(*(models.session(NET).run(None, s) for s in SAMPLES), strict=True)]


@pytest.mark.parametrize("spec", [Int8Spec(calibration_method=CalibMethod.MinMax), XInt8Spec()], ids=["int8", "xint8"])
def test_means_come_back_and_the_error_falls(spec) -> None:
    plain, fixed = outputs(spec, []), outputs(spec, [BiasCorrectionConfig()])
    shifts = [np.abs((found[1] - FLOAT[1]).mean((0, 2, 3))).sum() for found in (plain, fixed)]
    assert shifts[1] < 0.5 * shifts[0]
    errors = [np.square(found[0] - FLOAT[0]).mean() for found in (plain, fixed)]
    assert errors[1] < 0.7 * errors[0]
