"""Which calibration a spec asks for: the search of its method, the grid it searches for, and the options that tune it."""

from __future__ import annotations

from typing import Any

from quark.config.options import Options
from quark.config.tensor import TensorSpec
from quark.onnx.calibration import Request


def request_of(spec: TensorSpec, options: Options) -> Request:
    """The calibration request of an activation."""
    return Request(spec.grid, spec.method, _settings(spec, options))


def _settings(spec: TensorSpec, options: Options) -> dict[str, Any]:
    return {}
