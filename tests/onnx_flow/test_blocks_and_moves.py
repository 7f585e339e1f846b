"""Tensors that a float operator makes and that are only moved or clipped are rounded to blocks once, behind that."""

from __future__ import annotations

import pytest
from tests.onnx_flow import models

from quark.onnx import BFP16Spec, Int8Spec, ModelQuantizer, QConfig, QLayerConfig

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
