"""Which calibration a spec asks for: the search of its method, the grid it searches for, the options that tune it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quark.config.options import Options
from quark.config.tensor import TensorSpec
from quark.errors import ConfigError
from quark.observers import SEARCHES, Memory, Store
from quark.onnx.calibration import Request

#: method of a spec -> what power-of-two scales make of it, what a moving average makes of it.
_POWER_OF_TWO = {"minmax": "non_overflow"}
#: Methods that judge ranges by the values, after the histogram has named a few.
_LOOK_TWICE = ("layerwise_percentile", "mse")
_MODES = {"All": "mse", "MostCommon": "mse_most_common", "Percentile": "mse_percentile"}
_MOVING = {"minmax": "moving_minmax", "non_overflow": "moving_non_overflow"}


def request_of(spec: TensorSpec, options: Options, spill: Callable[[], Store] = Memory) -> Request:
    """The calibration request of an activation.

    Args:
        spill: makes a place outside memory for values that are looked at twice.
    """
    method = spec.method
    if spec.scale_rule == "power_of_two":
        method = _POWER_OF_TWO.get(method, method)
    if method == "mse" and spec.scale_rule == "power_of_two":
        method = _MODES[options.MinMSEModePof2Scale]
    if options.CalibMovingAverage:
        method = _MOVING.get(method, method)
    mirrored = options.CalibTensorRangeSymmetric is True and not spec.grid.centred
    if method == "mse_most_common":
        return Request(spec.grid, method, {"grid": spec.grid, **_settings(method, options)}, mirrored)
    settings = {**_settings(method, options), **_statistic(method, options, spill), **dict(spec.settings)}
    return Request(spec.grid, method, settings, mirrored)


def _statistic(method: str, options: Options, spill: Callable[[], Store]) -> dict[str, Any]:
    """What is counted: bins, and where the values themselves stay, if the method is to look at them again."""
    if not SEARCHES[method].needs_values:
        return {}
    exact = options.NumBins == 0
    if exact and not SEARCHES[method].looks_twice:
        raise ConfigError(f"NumBins=0 keeps the values, and the method {method!r} is defined on a histogram")
    settings: dict[str, Any] = {} if exact or options.NumBins is None else {"bins": options.NumBins}
    again = method in _LOOK_TWICE and not (options.CalibOptimizeMem and options.CalibOptimizeDisk)
    if exact or again:
        settings["keep"] = spill if options.CalibOptimizeMem else Memory
    return settings


def _settings(method: str, options: Options) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if options.CalibTensorRangeSymmetric is not None and "symmetric" in SEARCHES[method].settings:
        settings["symmetric"] = options.CalibTensorRangeSymmetric
    if method in _MOVING.values():
        settings["constant"] = options.CalibMovingAverageConstant
    if method in ("percentile", "mse_percentile"):
        settings["percentile"] = options.Percentile
    if method == "layerwise_percentile":
        settings |= {"metric": options.LWPMetric, "candidates": tuple(options.PercentileCandidates)}
    return settings
