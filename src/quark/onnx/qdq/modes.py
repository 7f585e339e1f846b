"""The ways to quantize: what is decided, how parameters come about, how the graph is written. One row per mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from quark.config.job import Job
from quark.config.options import Options
from quark.config.plan import Plan
from quark.config.rules import NodeInfo
from quark.dataclass import dataclass
from quark.ir.surgery import name_apart
from quark.onnx.qdq.dynamic import place_dynamic
from quark.onnx.qdq.emit import emit
from quark.onnx.qdq.emit_dynamic import emit_dynamic
from quark.onnx.qdq.nbits import emit_nbits, no_parameters, place_nbits
from quark.onnx.qdq.parameters import set_parameters
from quark.onnx.qdq.place import place
from quark.onnx.qdq.recurrent import store_weights
from quark.onnx.qdq.selection import bound


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


def _named_apart(written: Callable[[ir.Model, Plan, Options], ir.Model]) -> Callable[..., ir.Model]:
    """``written``, after which no two nodes share a name: runtimes refuse such a graph."""

    def emit_apart(model: ir.Model, plan: Plan, options: Options) -> ir.Model:
        made = written(model, plan, options)
        name_apart(made, {name: node.op_type for name, node in plan.nodes.items()})
        return made

    return emit_apart


def _place_dynamic(model: ir.Model, job: Job, before: Sequence[NodeInfo] = ()) -> Plan:
    """What has dynamic kernels, and the weights of recurrent layers that have none."""
    plan = place_dynamic(model, job, before)
    store_weights(model, plan, job, bound(model, job, before))
    return plan


MODES: dict[str, Mode] = {
    "static": Mode(place, set_parameters, _named_apart(emit)),
    "nbits": Mode(place_nbits, no_parameters, _named_apart(emit_nbits)),
    "dynamic": Mode(_place_dynamic, set_parameters, _named_apart(emit_dynamic)),
}
