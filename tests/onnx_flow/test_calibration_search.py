"""The calibration method that the outputs are best with, on samples that gave no range."""

from __future__ import annotations

import numpy as np
import pytest
from tests.onnx_flow import models

from quark.errors import ConfigError
from quark.onnx import (
    BFP16Spec,
    CalibMethod,
    CalibrationSearchConfig,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
)
from quark.onnx.flow import Result

GRAPH = "net (float[1, 64] x) => (float[1, 8] y) { y = MatMul (x, a) }"
NET = models.model(GRAPH, {"a": models.normal(64, 8)}, opset=17)
WIDE = Int16Spec(calibration_method=CalibMethod.MinMax)


def samples(spike: float, count: int = 8) -> list[dict[str, np.ndarray]]:
    """Normal values, and in the first sample one that is far larger."""
    feeds = [{"x": models.normal(1, 64, seed=seed)} for seed in range(count)]
    feeds[0]["x"] = feeds[0]["x"].copy()
    feeds[0]["x"][0, 5] = spike
    return feeds


def run(feeds: list[dict[str, np.ndarray]], method: CalibMethod, **fields: object) -> Result:
    spec = Int8Spec(calibration_method=method)
    search = CalibrationSearchConfig(**fields)  # type: ignore[arg-type]
    config = QConfig(QLayerConfig(spec, WIDE), algo_config=[search], extra_options={"PrintSummary": False})
    return ModelQuantizer(config).run(NET, None, feeds)


def test_a_spike_in_one_sample_is_cut_off() -> None:
    result = run(samples(1000.0), CalibMethod.MinMax, methods=[99.0, "MinMSE"])
    spec = result.plan.tensors["x"].spec
    assert (spec.method, spec.settings) == ("percentile", (("percentile", 99.0),))
    assert result.plan.tensors["x"].range[1] < 10  # all samples calibrate in the end, the spike among them
    (report,) = [one for one in result.passes if one.name == "calibration_search"]
    assert report.fired == 1 and "Percentile 99 " in report.refused[0]


def test_what_is_configured_stays_where_nothing_is_better() -> None:
    result = run(samples(1.0), CalibMethod.MinMax, methods=[60.0, "MinMax"])
    assert result.plan.tensors["x"].spec.method == "minmax"
    (report,) = [one for one in result.passes if one.name == "calibration_search"]
    assert report.fired == 0


def test_weights_keep_their_method_and_layers_of_their_own_follow() -> None:
    own = QLayerConfig(Int8Spec(calibration_method=CalibMethod.MinMax), WIDE)
    layer = QLayerConfig(Int8Spec(calibration_method=CalibMethod.MinMax), WIDE)
    search = CalibrationSearchConfig(methods=[99.0])
    config = QConfig(layer, layer_type_config={own: ["MatMul"]}, algo_config=[search])
    config.extra_options["PrintSummary"] = False
    plan = ModelQuantizer(config).run(NET, None, samples(1000.0)).plan
    assert plan.tensors["x"].spec.method == "percentile" and plan.tensors["a"].spec.method == "minmax"


@pytest.mark.parametrize(
    "make",
    [
        lambda: CalibrationSearchConfig(methods=[]),
        lambda: CalibrationSearchConfig(methods=["Median"]),
        lambda: CalibrationSearchConfig(methods=[101.0]),
        lambda: CalibrationSearchConfig(data_size=0),
    ],
)
def test_bad_settings_are_refused_by_name(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"CalibrationSearchConfig: (methods|data_size)="):
        make()


def test_activations_without_a_range_are_refused() -> None:
    layer = QLayerConfig(BFP16Spec(), BFP16Spec())
    with pytest.raises(ConfigError, match="CalibrationSearchConfig: the activations have no range"):
        ModelQuantizer(QConfig(layer, algo_config=[CalibrationSearchConfig()])).run(NET, None, samples(1.0))
