"""Tensors that a float operator makes and that are only moved or clipped are rounded to blocks once, behind that."""

from __future__ import annotations

import numpy as np
import pytest
from tests.onnx_flow import models

from quark.config.plan import TensorPlan
from quark.config.presets import get_preset
from quark.onnx import BFP16Spec, Int8Spec, Int16Spec, ModelQuantizer, MXInt8Spec, QConfig, QLayerConfig

GRAPH = """g (float[1,16,4] x) => (float[1,8,4] y) {
    e = Sin (x) t = Transpose <perm = [0, 2, 1]> (e) r = Relu (t) [mm] m = MatMul (r, w)
    s = Transpose <perm = [0, 2, 1]> (m) [end] y = Relu (s) }"""
WEIGHTS = {"w": models.normal(16, 8)}


@pytest.mark.parametrize(("spec", "once"), [(BFP16Spec, True), (Int8Spec, False)])
def test_a_float_result_is_rounded_behind_what_moves_it(spec: type, once: bool) -> None:
    proto = models.model(GRAPH, WEIGHTS)
    options = {"PrintSummary": False, "ForceQuantizeNoInputCheck": True}
    config = QConfig(QLayerConfig(input_tensors=spec(), weight=spec()), extra_options=options)
    planned = ModelQuantizer(config).run(proto, None, [models.feeds(proto)]).plan.tensors
    assert {"r", "m", "s"} <= set(planned)  # what a quantized operator makes keeps its rounding
    assert ("e" in planned, "t" in planned) == ((False, False) if once else (True, True))


CONVS = """g (float[1,16,6,6] x) => (float[1,16,8,8] y) {
    [plain] a = Conv <kernel_shape = [1, 1]> (x, w1, b1)
    [slope] p = PRelu (a, k)
    [deep] d = ConvTranspose <group = 16, kernel_shape = [3, 3]> (p, w2, b2)
    [wide] y = ConvTranspose <kernel_shape = [1, 1]> (d, w3, b3) }"""
CONV_WEIGHTS = {
    "w1": models.normal(16, 16, 1, 1), "b1": models.normal(16), "k": np.full((1, 1, 1), 0.3, np.float32),
    "w2": models.normal(16, 1, 3, 3), "b2": models.normal(16), "w3": models.normal(16, 16, 1, 1),
    "b3": models.normal(16),
}  # fmt: skip


def planned(layer: QLayerConfig, **options: bool) -> dict[str, TensorPlan]:
    proto = models.model(CONVS, CONV_WEIGHTS)
    config = QConfig(layer, extra_options={"PrintSummary": False, **options})
    return ModelQuantizer(config).run(proto, None, [models.feeds(proto)]).plan.tensors


@pytest.mark.parametrize("spec", [BFP16Spec, MXInt8Spec])
def test_blocks_run_along_what_is_summed(spec: type) -> None:
    tensors = planned(QLayerConfig(input_tensors=spec(), weight=spec()))
    axes = {name: tensors[name].spec.granularity.axis for name in ("w1", "w2", "w3")}  # type: ignore[union-attr]
    assert axes == {"w1": 1, "w2": 1, "w3": 0}  # a depthwise channel is summed alone


def test_biases_beside_blocks_and_single_numbers_stay_float() -> None:
    layer = QLayerConfig(input_tensors=BFP16Spec(), weight=BFP16Spec())
    assert {"b1", "b2", "b3", "k"}.isdisjoint(planned(layer))
    asked = planned(layer, Int32Bias=False)
    assert {"b1", "b2", "b3"} <= set(asked) and "k" not in asked
    named = QLayerConfig(input_tensors=BFP16Spec(), weight=BFP16Spec(), bias=Int8Spec())
    assert planned(named)["b1"].spec.format == "int8"
    assert "k" in planned(QLayerConfig(input_tensors=Int16Spec(), weight=Int8Spec()))


def test_presets_in_blocks_force_no_layout_operator() -> None:
    forced = {
        name: "ForceQuantizeNoInputCheck" in get_preset(name).options for name in ("BFP16", "MX9", "BF16", "XINT8")
    }
    assert forced == {"BFP16": False, "MX9": False, "BF16": True, "XINT8": True}
