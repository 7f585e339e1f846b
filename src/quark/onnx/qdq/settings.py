"""Which calibration a spec asks for: the search of its method, the grid it searches for, the options that tune it."""

from __future__ import annotations

from typing import Any

from quark.config.options import Options
from quark.config.tensor import TensorSpec
from quark.onnx.calibration import Request

#: method of a spec -> what power-of-two scales make of it, what a moving average makes of it.
_POWER_OF_TWO = {"minmax": "non_overflow"}
_MOVING = {"minmax": "moving_minmax", "non_overflow": "moving_non_overflow"}


def request_of(spec: TensorSpec, options: Options) -> Request:
    """The calibration request of an activation."""
    method = spec.method
    if spec.scale_rule == "power_of_two":
        method = _POWER_OF_TWO.get(method, method)
    if options.CalibMovingAverage:
        method = _MOVING.get(method, method)
    return Request(spec.grid, method, {**_settings(method, options), **dict(spec.settings)})


def _settings(method: str, options: Options) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if options.CalibTensorRangeSymmetric is not None:
        settings["symmetric"] = options.CalibTensorRangeSymmetric
    if method in _MOVING.values():
        settings["constant"] = options.CalibMovingAverageConstant
    if method == "percentile":
        settings["percentile"] = options.Percentile
    if method == "layerwise_percentile":
        settings |= {"metric": options.LWPMetric, "candidates": tuple(options.PercentileCandidates)}
    return settings
