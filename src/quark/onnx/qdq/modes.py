"""The ways to quantize: what is decided, how parameters come about, how the graph is written. One row per mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from quark.config.job import Job
from quark.config.options import Options
from quark.config.plan import Plan
from quark.config.rules import NodeInfo
from quark.onnx.qdq.dynamic import place_dynamic
from quark.onnx.qdq.emit import emit
from quark.onnx.qdq.emit_dynamic import emit_dynamic
from quark.onnx.qdq.nbits import emit_nbits, no_parameters, place_nbits
from quark.onnx.qdq.parameters import set_parameters
from quark.onnx.qdq.place import place


@dataclass(frozen=True)
class Mode:
    """One way to quantize.

    Attributes:
        place: the Plan of a prepared model, without numbers.
        set_parameters: the numbers, from the ranges.
        emit: the graph.
    """

    place: Callable[[ir.Model, Job, Sequence[NodeInfo]], Plan]
    set_parameters: Callable[[ir.Model, Plan, Mapping[str, tuple[Any, Any]], Options], None]
    emit: Callable[[ir.Model, Plan, Options], ir.Model]


MODES: dict[str, Mode] = {
    "static": Mode(place, set_parameters, emit),
    "nbits": Mode(place_nbits, no_parameters, emit_nbits),
    "dynamic": Mode(place_dynamic, set_parameters, emit_dynamic),
}
