"""A model whose images have their channels last now is compared with its float model in the axes of that one."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, UInt8Spec
from quark.onnx.compare import Checks, compare
from quark.onnx.flow import Result

MINMAX = CalibMethod.MinMax
WEIGHTS = {"w": models.normal(4, 4, 3, 3, seed=1), "v": models.normal(4, 4, 1, 1, seed=2)}


GRAPH = """g (float[1,4,SIZE,SIZE] x) => (float[1,4,SIZE,SIZE] y) {
    [one] a = Conv<pads = [1,1,1,1]>(x, w) [relu] r = Relu(a) [two] y = Conv(r, v) }"""


def quantized(proto: onnx.ModelProto, samples: list[dict[str, np.ndarray]], **options: bool) -> Result:
    layer = QLayerConfig(input_tensors=UInt8Spec(calibration_method=MINMAX), weight=Int8Spec())
    given = {"PrintSummary": False, "EvalMetrics": True, **options}
    return ModelQuantizer(QConfig(layer, extra_options=given)).run(proto, None, samples)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("size", [4, 6])
def test_metrics_and_layers_do_not_depend_on_the_layout(size: int, force: bool) -> None:
    proto = models.model(GRAPH.replace("SIZE", str(size)), WEIGHTS)
    samples = [models.feeds(proto, seed) for seed in range(3)]
    first = quantized(proto, samples, ForceQuantizeNoInputCheck=force)
    last = quantized(proto, samples, ForceQuantizeNoInputCheck=force, ConvertNCHWToNHWC=True)
    assert first.metrics and last.metrics and first.proto and last.proto
    assert last.proto.graph.input[0].type.tensor_type.shape.dim[3].dim_value == 4
    moved = last.metrics.outputs["y"].sqnr
    assert moved > 25 and abs(moved - first.metrics.outputs["y"].sqnr) < 1
    timed = Checks(timed=0.0, moved=True)
    plain, other = (compare(proto, one.proto, samples, timed) for one in (first, last))
    assert set(other.seconds) == {"float", "quantized"} and min(other.seconds.values()) > 0
    assert abs(other.outputs["y"].sqnr - moved) < 1e-6
    layers = {layer.tensor: layer.sqnr for layer in other.layers}
    for layer in plain.layers:
        if layer.tensor in layers:
            assert abs(layers[layer.tensor] - layer.sqnr) < 1
    assert "r" in layers and "y" in layers
