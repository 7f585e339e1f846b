"""``TensorQuantOverrides`` in the Plan: what the configuration tells single tensors wins over every rule.

A tensor that is told something shares its scale with no other any more. ``convert`` gives some readers a second type.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.config.options import Options
from quark.config.overrides import Override, parse_overrides
from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import TensorSpec
from quark.errors import ConfigError
from quark.numerics.formats import get_format
from quark.numerics.granularity import Channel, Tensor
from quark.onnx.qdq.block_axes import in_blocks
from quark.onnx.qdq.second_type import insert

_log = logging.getLogger(__name__)
REASON = "TensorQuantOverrides"


def override(model: ir.Model, plan: Plan, options: Options) -> None:
    """Write the overrides into the plan. (An int32 bias keeps its product of scales under ``AdjustBiasScale``.)

    Names that this graph does not have are those of a body or of the graph around it; ``selection.check_names`` has
    refused those that no graph has.

    Raises:
        ConfigError: values that do not fit the tensor.
    """
    overrides = parse_overrides(options.TensorQuantOverrides)
    if not overrides:
        return
    values = _values(model)
    for name, wanted in overrides.items():
        if name not in values:
            continue
        if name not in plan.tensors:
            _log.warning("%s: %r is not quantized, so there is nothing to override", REASON, name)
            continue
        if wanted.convert is not None and values[name].is_initializer():
            raise ConfigError(
                f"{REASON}[{name!r}]: convert is for activations, and this is a constant; give its type as quant_type"
            )
        whole = wanted.format is None or get_format(wanted.format).onnx_type == "INT32"
        if plan.tensors[name].role == "bias" and options.AdjustBiasScale and whole:
            if replace(wanted, format=None) != Override():
                _log.warning(
                    "%s[%r]: an int32 bias has the scale input x weight, so only its quant_type can be told; "
                    "AdjustBiasScale=False uses the rest",
                    REASON,
                    name,
                )
            continue
        plan.put(_overridden(plan.tensors[name], wanted, values[name]))
        if wanted.convert is not None:
            _convert(model, plan, values[name], wanted.convert, wanted.readers)


def _values(model: ir.Model) -> dict[str, ir.Value]:
    graph = model.graph
    made = (output for node in graph for output in node.outputs)
    return {str(value.name): value for value in (*graph.inputs, *graph.initializers.values(), *made)}


def _overridden(tensor: TensorPlan, wanted: Override, value: ir.Value) -> TensorPlan:
    _check_channels(tensor, wanted, value)
    spec = _spec(tensor.spec, wanted, value)
    parameters = None if wanted.parameters is None else _parameters(tensor, spec, wanted, value)
    return replace(
        tensor,
        role="weight" if tensor.role == "bias" else tensor.role,
        bias_of=None,
        spec=spec,
        reason=f"{REASON}[{tensor.name!r}]",
        group=tensor.name,
        observed=True,
        fixed_range=tensor.fixed_range if wanted.range is None else _sides(wanted, value),
        given=parameters,
    )


def _spec(spec: TensorSpec, wanted: Override, value: ir.Value) -> TensorSpec:
    format = wanted.format or spec.format
    symmetric = spec.symmetric if wanted.symmetric is None else wanted.symmetric
    granularity = spec.granularity if wanted.format is None else Tensor()
    if wanted.axis is not None:
        granularity = Channel(wanted.axis % max(len(value.shape or ()), 1))
    elif wanted.range is not None or wanted.parameters is not None:
        granularity = Tensor()
    reduced = spec.reduced if wanted.reduce_range is None else wanted.reduce_range
    found = replace(spec, format=format, symmetric=symmetric, granularity=granularity, reduced=reduced)
    return in_blocks(found, value)


def _check_channels(tensor: TensorPlan, wanted: Override, value: ir.Value) -> None:
    """Raise ``ConfigError`` for an axis that the tensor does not have, or not as many entries as channels."""
    where, rank = f"{REASON}[{tensor.name!r}]", len(value.shape or ())
    if wanted.axis is None:
        return
    format = wanted.format or tensor.spec.format
    if not get_format(format).has_zero_point:
        raise ConfigError(
            f"{where}: the data type {format!r} has no scale per channel; leave out axis, or give an integer"
        )
    if not value.is_initializer():
        raise ConfigError(f"{where}: axis is for constants; an activation has one scale, so leave it out")
    if rank == 0:
        raise ConfigError(f"{where}: axis is for tensors with channels, and this is a single number; leave it out")
    if not -rank <= wanted.axis < rank:
        raise ConfigError(f"{where}: axis must lie in {-rank}..{rank - 1}, not {wanted.axis}")
    channels = (value.shape or ())[wanted.axis]
    for column in (*(wanted.range or ()), *(wanted.parameters or ())):
        if column is not None and len(column) not in (1, channels):
            raise ConfigError(f"{where}: {len(column)} entries for {channels} channels")


def _sides(wanted: Override, value: ir.Value) -> tuple[Any, Any]:
    """The range as it was given; one entry with an axis is every channel's."""
    low, high = wanted.range or (None, None)
    return _shaped(low, wanted, value), _shaped(high, wanted, value)


def _shaped(column: tuple[float, ...] | None, wanted: Override, value: ir.Value) -> Any:
    if column is None or len(column) > 1:
        return column and list(column)
    return column[0] if wanted.axis is None else list(column) * _channels(wanted, value)


def _channels(wanted: Override, value: ir.Value) -> int:
    return int((value.shape or ())[wanted.axis or 0])  # type: ignore[arg-type]


def _parameters(tensor: TensorPlan, spec: TensorSpec, wanted: Override, value: ir.Value) -> tuple[Any, Any]:
    """Scale and zero point as they were given, checked; one entry with an axis is every channel's."""
    scales, zeros = wanted.parameters or ((), ())
    row = spec.row
    if row.has_zero_point and not all(row.min <= zero <= row.max for zero in zeros):
        raise ConfigError(f"{REASON}[{tensor.name!r}]: zero_point must lie in {row.min}..{row.max} for {spec.format}")
    scale, zero = np.asarray(scales, np.float32), np.asarray(zeros, np.int64)
    if wanted.axis is not None:
        channels = _channels(wanted, value)
        return np.broadcast_to(scale, channels).copy(), np.broadcast_to(zero, channels).copy()
    return (scale.reshape(()), zero.reshape(())) if len(scales) == 1 else (scale, zero)


def _convert(model: ir.Model, plan: Plan, value: ir.Value, wanted: Override, readers: frozenset[str] | None) -> None:
    """Let some readers read the tensor in a second type."""
    uses = [use for use in value.uses() if readers is None or use.node.name in readers]
    missing = (readers or frozenset()) - {use.node.name for use in uses}
    if missing:
        raise ConfigError(f"{REASON}[{value.name!r}] convert: {sorted(missing)[0]!r} does not read this tensor")
    if not uses:
        raise ConfigError(f"{REASON}[{value.name!r}] convert: no node reads this tensor; give its type as quant_type")
    known, name = plan.tensors[str(value.name)], f"{value.name}_convert"
    copy = insert(model, plan, value, name, [use.node for use in uses])
    if known.readers is not None:
        taken = {use.node.name for use in uses}
        plan.put(replace(known, readers=(known.readers - taken) | {name}))
    plain = replace(known, name=name, group=name, readers=None, given=None, fixed_range=None)
    plan.put(_overridden(plain, wanted, copy))
