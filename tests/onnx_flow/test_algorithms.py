"""A contract over the table of algorithms: none is worse than rounding to nearest on its own calibration data."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models
from tests.onnx_flow import test_linear_algorithms as linear

from quark.algorithms.rounders import ROUNDERS
from quark.errors import ConfigError
from quark.onnx import (
    AlgoConfig,
    AutoMixprecisionConfig,
    CalibMethod,
    CalibrationSearchConfig,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    XInt8Spec,
)
from quark.onnx.algorithms.stages import TRANSFORMS, TUNES
from quark.onnx.quantization.config.algorithm import ALGO_NAME_TO_CLASS, checked, from_dict

SPECS = {"int8": Int8Spec(calibration_method=CalibMethod.MinMax), "xint8": XInt8Spec()}
#: Fewer steps than by default, so that the test is short.
SHORT = {"adaround": {"num_iterations": 60}, "adaquant": {"num_iterations": 60, "learning_rate": 1e-3}}


def net() -> onnx.ModelProto:
    """Layers whose channels differ in size, a depthwise one among them."""
    graph = """
    net (float[N, 3, 8, 8] x) => (float[N, 5] y) {
        c1 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1, b1)
        a1 = Relu (c1)
        c2 = Conv <group = 8, kernel_shape = [3, 3]> (a1, w2, b2)
        a2 = Relu (c2)
        c3 = Conv <kernel_shape = [1, 1]> (a2, w3, b3)
        g = GlobalAveragePool (c3)
        f = Flatten (g)
        y = Gemm <transB = 1> (f, v, e)
    }"""
    sizes = np.exp(np.linspace(0, -3, 8)).astype(np.float32).reshape(8, 1, 1, 1)
    weights = {
        "w1": models.normal(8, 3, 3, 3) * sizes, "b1": models.normal(8) * 0.2, "w2": models.normal(8, 1, 3, 3) / sizes,
        "b2": models.normal(8) * 0.2, "w3": models.normal(12, 8, 1, 1), "b3": models.normal(12) * 0.2,
        "v": models.normal(5, 12), "e": models.normal(5),
    }  # fmt: skip
    return models.model(graph, weights)


NET = net()
SAMPLES = [{"x": models.normal(1, 3, 8, 8, seed=seed)} for seed in range(16)]


COLUMNWISE = tuple(ROUNDERS)
#: Algorithms for MatMul and Gemm have a network of such layers of their own: ``test_linear_algorithms``.
LINEAR = (*COLUMNWISE, "awq", "quarot", "smooth_quant", "svdquant")


def loss(spec: object, algorithms: list[AlgoConfig]) -> float:
    config = QConfig(
        QLayerConfig(input_tensors=spec, weight=spec), algo_config=algorithms, extra_options={"PrintSummary": False}
    )
    proto = ModelQuantizer(config).quantize_model(NET, None, SAMPLES)
    onnx.checker.check_model(proto, full_check=True)
    run, reference = models.session(proto), models.session(NET)
    return float(np.mean([np.square(run.run(None, s)[0] - reference.run(None, s)[0]).mean() for s in SAMPLES]))


PLAIN = {name: loss(spec, []) for name, spec in SPECS.items()}


@pytest.mark.parametrize("spec", sorted(SPECS))
@pytest.mark.parametrize("name", sorted({*ALGO_NAME_TO_CLASS} - {*LINEAR}))
def test_an_algorithm_is_no_worse_than_rounding_to_nearest(name: str, spec: str) -> None:
    if name in SHORT:
        pytest.importorskip("torch")
    assert loss(SPECS[spec], [ALGO_NAME_TO_CLASS[name](**SHORT.get(name, {}))]) <= PLAIN[spec]


@pytest.mark.parametrize("name", LINEAR)
def test_an_algorithm_for_linear_layers_is_no_worse_than_rounding_to_nearest(name: str) -> None:
    wide = Int16Spec(calibration_method=CalibMethod.MinMax)
    weight = wide if name in ("quarot", "smooth_quant") else linear.INT8  # what those two help are the activations
    assert linear.loss([ALGO_NAME_TO_CLASS[name]()], weight=weight) <= linear.loss([], weight=weight)


def test_every_algorithm_has_its_stage() -> None:
    assert {*TRANSFORMS, *TUNES, AutoMixprecisionConfig, CalibrationSearchConfig} == set(ALGO_NAME_TO_CLASS.values())


@pytest.mark.parametrize("name", sorted(ALGO_NAME_TO_CLASS))
def test_a_configuration_goes_through_a_dictionary(name: str) -> None:
    made = ALGO_NAME_TO_CLASS[name](**SHORT.get(name, {}))
    assert from_dict(made.to_dict()) == made and made.to_dict() == {"name": name, **SHORT.get(name, {})}


def test_unknown_algorithms_and_fields_are_named() -> None:
    for entry, words in (
        (CalibrationSearchConfig, r"CalibrationSearchConfig is a class: write CalibrationSearchConfig\(\)"),
        ("gptq", "unknown algorithm 'gptq'"),
    ):
        with pytest.raises(ConfigError, match=f"^algo_config: {words}"):
            checked([entry])
    with pytest.raises(ConfigError, match=r"adaroundd.*adaround"):
        from_dict({"name": "adaroundd"})
    with pytest.raises(ConfigError, match=r"num_iteration'.*num_iterations"):
        from_dict({"name": "adaround", "num_iteration": 3})
