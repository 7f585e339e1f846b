"""A plan from a file in the place of the decisions of the configuration: ``--plan-from``.

The configuration decides first, so that the graph has the nodes that its decisions ask for; then every tensor becomes
what the file says. Ranges and scales are results and are found anew; a scale that is to be kept stands in ``given``.
Biases follow their layers (``biases.refit``), and whatever the file says that the model cannot have is refused.

The lines of a body of If or Loop, ``node/body/name``, are carried out in the body, which is a model of its own.

Not handled: dynamic quantization and MatMulNBits.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import NodePlan, Plan, TensorPlan, refuse
from quark.errors import ConfigError, QuarkError, unknown
from quark.ir.surgery import is_constant, name_of
from quark.numerics.formats import Int, get_format
from quark.numerics.granularity import Channel, Group
from quark.numerics.rounding import ROUNDINGS
from quark.observers.registry import BUILT_IN, SEARCHES
from quark.onnx.bodies import around
from quark.onnx.qdq.biases import refit
from quark.onnx.qdq.floats import note_floats
from quark.onnx.qdq.node_kinds import opsets_of_row, roundings

_log = logging.getLogger(__name__)
REASON = "the plan that was given"
REAL = (None, ir.DataType.FLOAT, ir.DataType.FLOAT16)
#: The built-in methods by which constants are searched, on all their values.
SEARCHES_OF_CONSTANTS = ("minmax", "mse")
RESULTS: dict[str, Any] = {"range": None, "scale": None, "zero_point": None, "changes": ()}


def follow(model: ir.Model, decided: Plan, job: Job) -> Plan:
    """The plan that is carried out: ``job.plan``, or what was decided where there is none.

    Raises:
        ConfigError: the plan does not fit the model or the configuration; the tensor and the reason are named.
    """
    if job.plan is None:
        return decided
    if job.mode != "static":
        raise ConfigError(f"--plan-from: a plan is carried out by static quantization, not by {job.mode} quantization")
    given = around(model, job.plan, job.options)
    values = {str(value.name): value for value in _values(model)}
    for name in given.nodes:
        if name not in decided.nodes:
            refuse(name, unknown("node of the plan", name, decided.nodes))
    for row in given:
        _check(row, values, job)
    tensors = {row.name: _row(row, decided.tensors.get(row.name)) for row in given}
    kept = {name: tensors[name] for name in decided.tensors if name in tensors}
    left = {name: REASON for name in decided.tensors if name not in tensors}
    floats = {name: why for name, why in decided.floats.items() if name not in tensors} | left
    plan = Plan({**kept, **tensors}, _nodes(model, decided, left), list(decided.proposals), floats)
    plan.tuned = decided.tuned or given.tuned
    for name, node in given.nodes.items():
        if node.quantized not in (decided.nodes[name].quantized, plan.nodes[name].quantized):
            refuse(name, "lines of nodes only explain, and its tensors say the opposite: change these")
    _check_groups(plan)
    before = {row.name for row in plan.of_role("bias")}
    refit(model, plan)
    for name in sorted(before - set(plan.tensors)):
        refuse(name, f"{plan.floats[name]}; leave it out")
    note_floats(model, plan)
    return plan


def tell_others(plan: Plan, given: Plan | None) -> None:
    """Say where the file has other ranges or scales than were found, since those of the file change nothing.

    Those of tensors with a ``spec`` that was edited, and of biases, follow from what was edited.
    """
    rows = {row.name: row for row in given or () if row.given is None and row.role != "bias"}
    made = {name: plan.tensors[name] for name in rows if name in plan.tensors}
    texts = {name: _other(rows[name], one) for name, one in made.items() if one.reason != REASON}
    others = [f"{name!r}: {text}" for name, text in texts.items() if text]
    if others:
        _log.warning(
            "--plan-from: ranges and scales are found anew; those of %d tensors are others than the file's "
            "(%s). What is to be kept stands in 'given', as scale and zero point",
            len(others),
            others[0],
        )


def _other(row: TensorPlan, made: TensorPlan) -> str:
    """What the file has and what was found, in words; empty where they are one."""
    for name, told, found in (("range", row.range, made.range), ("scale", row.scale, made.scale)):
        if told is None or found is None:
            continue
        old, new = (np.asarray(side, np.float64) for side in (told, found))
        if old.shape != new.shape or not np.allclose(old, new, rtol=1e-5, atol=0.0):
            words = [" to ".join(f"{one:.6g}" for one in side.ravel()[:2]) for side in (old, new)]
            return f"{name} {words[0]} in the file, {words[1]} found"
    return ""


def _values(model: ir.Model) -> list[ir.Value]:
    graph = model.graph
    return [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]


def _nodes(model: ir.Model, decided: Plan, left: Collection[str]) -> dict[str, NodePlan]:
    """The lines of nodes: a node that reads a tensor that was left out computes in float."""
    found = dict(decided.nodes)
    for node in model.graph:
        line = found.get(name_of(node))
        if line is not None and line.quantized and any(value and value.name in left for value in node.inputs):
            found[line.name] = replace(line, quantized=False, reason=REASON)
    return found


def _row(row: TensorPlan, before: TensorPlan | None) -> TensorPlan:
    """A row of the file without results, and with its own reason where it is another one than was decided."""
    row = replace(row, **RESULTS)
    if before is not None and row.reason == before.reason and row.spec != before.spec:
        return replace(row, reason=REASON)
    return row


def _check(row: TensorPlan, values: dict[str, ir.Value], job: Job) -> None:
    """A tensor of the model, real, of the role and with an axis that it can have, in a form that has a carrier."""
    value = values.get(row.name)
    if value is None:
        raise ConfigError(f"--plan-from: {unknown('tensor of the plan', row.name, values)}")
    if value.dtype not in REAL:
        refuse(row.name, f"it holds {value.dtype}, and only float32 and float16 tensors are quantized")
    if is_constant(value) == (row.role == "activation"):
        refuse(row.name, f"it is {'a constant' if is_constant(value) else 'computed'}, so its role is not {row.role}")
    _check_spec(row, job)
    granularity, shape = row.spec.granularity, value.shape
    axis = granularity.axis if isinstance(granularity, Channel | Group) and row.role != "bias" else None
    if axis is not None and shape is not None and not -len(shape) <= axis < len(shape):
        refuse(row.name, f"it has {len(shape)} axes, and the granularity names axis {axis}")
    for name in row.readers or ():
        if not any(use.node.name == name for use in value.uses()):
            refuse(row.name, f"the node {name!r} does not read it")
    try:
        list(opsets_of_row(row, job.options))
    except QuarkError as error:
        refuse(row.name, str(error))
    if row.given is not None:
        _check_given(row, *row.given)


def _check_given(row: TensorPlan, scale: Any, zero_point: Any) -> None:
    if row.role == "bias":
        refuse(row.name, "the scale of a bias is that of its input and weight: given is null")
    if not all(np.isfinite(side).all() for side in (scale, zero_point)):
        refuse(row.name, "the scale or zero point that is given is not finite")
    if not (np.asarray(scale) > 0).all():
        refuse(row.name, "the scale that is given is not more than 0")
    kind, zeros = get_format(row.spec.format), np.asarray(zero_point)
    least, most = (kind.min, kind.max) if isinstance(kind, Int) else (0, 0)
    if ((zeros < least) | (zeros > most)).any():
        refuse(row.name, f"the zero point that is given is no code of {row.spec.format} ({least} to {most})")


def _check_spec(row: TensorPlan, job: Job) -> None:
    """Every field of a spec is carried out: what nothing in this flow would read is refused."""
    spec = row.spec
    if spec.real_zero or spec.second is not None:
        refuse(row.name, "real zero points and second stages are of the torch flow, and ONNX has neither")
    if spec.dynamic:
        refuse(row.name, "dynamic is for ranges at run time, and a plan is carried out by static quantization")
    activation = row.role == "activation"
    searches = [name for name in SEARCHES if activation or name in SEARCHES_OF_CONSTANTS or name not in BUILT_IN]
    rounded = roundings(spec, job.options) if activation else ROUNDINGS
    for kind, value, allowed in (
        ("calibration method", spec.method, searches),
        (f"rounding in {spec.format}", spec.rounding, rounded),
    ):
        if value not in allowed:
            refuse(row.name, unknown(f"{kind} of a tensor of the role {row.role}", value, allowed))
    own = ("mode",) if row.role == "weight" and spec.method == "mse" else ()
    try:
        SEARCHES[spec.method].check({key: value for key, value in spec.settings if key not in own})
    except ConfigError as error:
        refuse(row.name, str(error))


def _check_groups(plan: Plan) -> None:
    """Tensors that share a range are quantized alike, and one of them has a range of its own."""
    for group, members in plan.groups().items():
        first = members[0]
        for member in members:
            if (member.spec.row, member.spec.symmetric) != (first.spec.row, first.spec.symmetric):
                refuse(
                    member.name,
                    f"it shares the range of {group!r} and would be {member.spec.describe()} beside "
                    f"{first.spec.describe()} of {first.name!r}: change both, or give it a group of its own",
                )
        if not any(member.observed for member in members):
            refuse(first.name, f"nothing is left to find the range of the group {group!r} from")
