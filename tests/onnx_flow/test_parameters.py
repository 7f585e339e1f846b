"""Ranges become scales: a bias always fits its 32 bits, spoilt weights and activations are refused, whoever looks.

Expected numbers are computed here from the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from tests.onnx_flow import models

from quark.config.plan import Plan
from quark.config.tensor import TensorSpec
from quark.errors import DataError, ModelError
from quark.numerics.granularity import Channel, Granularity, Tensor
from quark.onnx import (
    CalibMethod,
    Int8Spec,
    Int16Spec,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    UInt8Spec,
)
from quark.onnx import calibration as calibrating
from quark.onnx.calibration import Request, calibrate
from quark.onnx.graph.model import load
from quark.onnx.pipeline import prepare
from quark.onnx.qdq.fuse import fused_producer
from quark.onnx.qdq.parameters import observed, set_parameters, weight_range
from quark.onnx.qdq.place import place

INT32_MAX = 2**31 - 1
QUIET = {"PrintSummary": False}
MINMAX, CHANNEL = CalibMethod.MinMax, QuantGranularity.Channel
GEMM = "g (float[4, 8] x) => (float[4, 6] y) { h = Relu (x) y = Gemm (h, w, b) }"
TWO = """
g (float[1, 6, 4, 4] x) => (float[1, 6, 4, 4] y, float[1, 6, 4, 4] z) {
    h = Relu (x)
    y = Conv <kernel_shape = [1, 1]> (h, w, b)
    z = Conv <kernel_shape = [1, 1]> (h, w, c)
}"""
WEIGHTS = {
    "one scale": Int8Spec(calibration_method=MINMAX),
    "a scale per channel": Int8Spec(calibration_method=MINMAX, quant_granularity=CHANNEL),
    "16 bits": Int16Spec(calibration_method=MINMAX),
}


def plan_of(graph: str, weights: Mapping[str, np.ndarray], config: QConfig, high: float = 1.0) -> Plan:
    """The plan with scales; every observed tensor reaches from 0 to ``high``."""
    prepared = prepare(load(models.model(graph, weights, 17)), config.compile())
    plan = place(prepared.model, prepared.job)
    options = prepared.job.options
    set_parameters(prepared.model, plan, {t.name: (0.0, high) for t in observed(plan, options)}, options)
    return plan


def config(weight: object) -> QConfig:
    inputs = UInt8Spec(calibration_method=MINMAX, symmetric=False)
    return QConfig(QLayerConfig(input_tensors=inputs, weight=weight), extra_options=QUIET)


def scale(plan: Plan, name: str) -> np.ndarray:
    return np.asarray(plan.tensors[name].scale, np.float64)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("largest", [0, 3, 5])
def test_the_scale_of_a_weight_grows_until_its_bias_fits_and_no_further(kind: str, largest: int) -> None:
    weight, bias = models.normal(8, 6, scale=1e-3), np.full(6, 1e-4, np.float32)
    bias[largest] = 5e6
    plan = plan_of(GEMM, {"w": weight, "b": bias}, config(WEIGHTS[kind]))
    grown = np.broadcast_to(scale(plan, "w").reshape(-1), 6)
    codes = np.abs(bias) / (scale(plan, "h") * grown)
    assert codes.max() <= INT32_MAX
    assert codes[largest] >= 0.4 * INT32_MAX  # no further than the bias needs
    others = np.delete(grown, largest)
    steps = 127 if "16" not in kind else 32767
    alone = np.delete(np.abs(weight).max(0) / steps, largest)
    if kind == "a scale per channel":
        np.testing.assert_allclose(others, alone, rtol=1e-6)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("swapped", [False, True])
def test_the_larger_of_two_biases_decides(kind: str, swapped: bool) -> None:
    small, large = models.normal(6), models.normal(6, seed=1) * np.float32(1e7)
    biases = {"b": large, "c": small} if swapped else {"b": small, "c": large}
    plan = plan_of(TWO, {"w": models.normal(6, 6, 1, 1, scale=1e-3), **biases}, config(WEIGHTS[kind]))
    both = scale(plan, "h") * scale(plan, "w").reshape(-1)
    for name, bias in biases.items():
        assert (np.abs(bias) / both).max() <= INT32_MAX
        np.testing.assert_allclose(scale(plan, name).reshape(-1), both, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("granularity", [Tensor(), Channel(0), Channel(1)])
@pytest.mark.parametrize("place", [(0, 0), (3, 2)])
def test_a_weight_that_is_not_finite_is_refused(value: float, granularity: Granularity, place: tuple[int, int]) -> None:
    values = models.normal(4, 3)
    values[place] = value
    with pytest.raises(ModelError, match=r"'kernel' holds NaN or infinity"):
        weight_range(values, TensorSpec("int8", granularity=granularity), "kernel")


# ---- fusion ----------------------------------------------------------------------------------------------------------

ONE_READER = "g (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y) { c = Conv (x, w) r = Relu (c) y = Sigmoid (r) }"
TWO_READERS = """
g (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y) {
    c = Conv (x, w)
    r = Relu (c)
    s = Add (c, r)
    y = Sigmoid (s)
}"""


@pytest.mark.parametrize("graph", [ONE_READER, TWO_READERS])
@pytest.mark.parametrize("symmetric", [False, True])
def test_what_one_kernel_computes_is_rounded_once(graph: str, symmetric: bool) -> None:
    """On the CPU codes clip for a Relu only if they begin at zero, and only if nobody else reads what it clips."""
    layer = QLayerConfig(
        input_tensors=UInt8Spec(calibration_method=MINMAX, symmetric=False), weight=WEIGHTS["one scale"]
    )
    apart = QConfig(layer, target="cpu", extra_options={**QUIET, "RemoveQDQConvRelu": False}).compile()
    prepared = prepare(load(models.model(graph, {"w": models.normal(4, 4, 1, 1)}, 17)), apart)
    plan = place(prepared.model, prepared.job)
    relu = plan.tensors["r"]
    assert "c" in plan.tensors and not relu.spec.symmetric
    plan.put(replace(relu, spec=replace(relu.spec, symmetric=symmetric)))
    node = next(node for node in prepared.model.graph if node.op_type == "Relu")
    found = fused_producer(node, plan, QConfig(layer, target="cpu", extra_options=QUIET).compile())
    assert (found is not None) == (graph == ONE_READER and not symmetric)


# ---- activations that are not finite ---------------------------------------------------------------------------------

SPOILT = {
    "NaN": ("Sqrt", np.array([[1.0, -1.0]], np.float32)),
    "NaN alone": ("Sqrt", np.array([[-1.0, -1.0]], np.float32)),
    "infinity": ("Exp", np.array([[1.0, 500.0]], np.float32)),
    "minus infinity": ("Log", np.array([[1.0, 0.0]], np.float32)),
}


@pytest.mark.parametrize("case", SPOILT)
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("method", ["minmax", "percentile"])
def test_activations_that_are_not_finite_are_named(
    case: str, in_graph: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, sample = SPOILT[case]
    if in_graph:
        monkeypatch.setattr(calibrating, "FETCHED", 0)  # extremes of every tensor are taken by the graph
    model = load(models.model(f"g (float[1, 2] x) => (float[1, 2] y) {{ h = {operator} (x) y = Relu (h) }}", {}, 17))
    fine = np.array([[1.0, 2.0]], np.float32)
    with pytest.raises(DataError, match="activation 'h' becomes not finite on calibration sample 1"):
        calibrate(model, {"h": Request(TensorSpec("int8").grid, method)}, [{"x": fine}, {"x": sample}])
