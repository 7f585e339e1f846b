"""Ranges become scales and zero points, in the Plan.

Activations take the union of the ranges of their group. Weights are searched here, on their own values. A bias has
scale input x weight; where its value would not fit 32 bits the weight's scale grows until it does, because a bias that
saturates is a wrong number that nobody notices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.config.options import Options
from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import TensorSpec
from quark.errors import ConfigError, ModelError
from quark.ir.surgery import constant_array, let_go
from quark.numerics.affine import LARGEST_BIAS
from quark.numerics.granularity import Tensor
from quark.observers.mse_modes import ROW_SEARCHES
from quark.observers.non_overflow import fitted
from quark.observers.registry import BUILT_IN, count, rows_of
from quark.onnx.qdq.float_biases import check_half, float_biases
from quark.onnx.qdq.node_kinds import REDUCED_RANGE, block_size
from quark.onnx.qdq.small_weights import ranges_of_small

_ONE, _ZERO = np.asarray(1, np.float32), np.asarray(0, np.int64)
_INT16_MAX = float(np.iinfo(np.int16).max)
#: A scale that is further off than this has nothing to do with the range any more.
_INT16_TOLERANCE = 0.1
#: Headroom for the float32 rounding of the scales' product.
_FIT = 1 + 2.0**-20


def set_parameters(model: ir.Model, plan: Plan, ranges: Mapping[str, tuple[Any, Any]], options: Options) -> None:
    """Fill ``range``, ``scale`` and ``zero_point`` of every tensor of the plan.

    Args:
        ranges: (lo, hi) of every observed activation.
        options: whether float types are scaled.
    """
    for members in plan.groups().values():
        if not members[0].spec.dynamic:
            _set_group(plan, members, ranges, options.ActivationScaled)
    initializers = model.graph.initializers
    small = ranges_of_small(model, plan)
    for tensor in plan.of_role("weight"):
        values = constant(initializers[tensor.name])
        _set_weight(plan, tensor, values, options.WeightScaled, small.get(tensor.name))
        let_go(initializers[tensor.name].const_value)
    set_biases(model, plan)


def set_biases(model: ir.Model, plan: Plan) -> None:
    """Fill the scales of the biases from those of inputs and weights; called again when those have changed."""
    initializers = model.graph.initializers
    biases = {tensor.name: constant(initializers[tensor.name]) for tensor in plan.of_role("bias")}
    for name, values in biases.items():  # first all: a weight may have several biases, and its scale must fit each
        _make_room(plan, plan.tensors[name], values)
    for bias in float_biases(model, plan):
        _make_room(plan, bias, constant(initializers[bias.name]))
        check_half(plan, bias)
    for name, values in biases.items():
        _set_bias(plan, plan.tensors[name], values)


def constant(value: ir.Value) -> np.ndarray:
    """The values of an initializer."""
    array = constant_array(value)
    if array is None:
        raise ModelError(f"the initializer {value.name!r} has no values")
    return array


def _set_group(plan: Plan, members: list[TensorPlan], ranges: Mapping[str, tuple[Any, Any]], scaled: bool) -> None:
    if members[0].spec.row.unit_scale and not scaled:
        for member in members:
            plan.put(replace(member, scale=_ONE, zero_point=_ZERO))
        return
    if members[0].given is not None:
        for member in members:
            plan.put(_as_given(member, members[0].given))
        return
    found = [_with_fixed(m, partial(ranges.__getitem__, m.name)) for m in members if m.observed]
    lo, hi = min(side[0] for side in found), max(side[1] for side in found)
    scale, zero_point = from_range(members[0].spec, lo, hi, scaled)
    for member in members:
        found_range = (float(lo), float(hi))
        plan.put(replace(member, range=found_range, scale=np.asarray(scale), zero_point=np.asarray(zero_point)))


def _with_fixed(tensor: TensorPlan, found: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """The range of a tensor: its fixed sides, and what is found for the others.

    Raises:
        ConfigError: a side that was given lies beyond the other one.
    """
    if is_fixed(tensor):
        return tensor.fixed_range or (0.0, 0.0)
    low, high = tensor.fixed_range or (None, None)
    lo, hi = (given if given is not None else side for given, side in zip((low, high), found(), strict=True))
    if tensor.fixed_range is not None and np.any(np.asarray(lo) > np.asarray(hi)):
        key, given, least = ("rmin", low, np.min(hi)) if low is not None else ("rmax", high, np.max(lo))
        side = "largest" if low is not None else "smallest"
        raise ConfigError(
            f"TensorQuantOverrides[{tensor.name!r}]: {key} {given} lies beyond the {side} value {least:.6g}"
        )
    return lo, hi


def is_fixed(tensor: TensorPlan) -> bool:
    """Whether the whole range of a tensor is known before anything is observed."""
    return tensor.fixed_range is not None and all(side is not None for side in tensor.fixed_range)


def _as_given(tensor: TensorPlan, given: tuple[Any, Any]) -> TensorPlan:
    scale, zero_point = (np.asarray(side) for side in given)
    row = tensor.spec.row
    wide = scale.astype(np.float64)
    low, high = (row.min - zero_point) * wide, (row.max - zero_point) * wide
    span = (low, high) if low.ndim else (float(low), float(high))
    return replace(tensor, range=span, scale=scale.astype(np.float32), zero_point=zero_point.astype(np.int32))


def _halved(spec: TensorSpec, lo: Any, hi: Any) -> tuple[Any, Any]:
    """A wider range, whose scale and zero point put [lo, hi] onto half of the codes (``reduce_range``).

    Signed b bits: -2**(b-2)..2**(b-2); unsigned: 0..2**(b-1)-1.
    """
    row = spec.row
    if not row.has_zero_point or (spec.symmetric and row.min == 0):
        raise ConfigError(f"reduce_range is for integers, symmetric ones signed, not for {spec.describe()}")
    lo, hi = np.minimum(np.asarray(lo, np.float64), 0), np.maximum(np.asarray(hi, np.float64), 0)
    top = (row.max + 1) // 2 if row.min else row.max // 2
    bottom = -top if row.min else 0
    if spec.symmetric:
        widest = np.maximum(-lo, hi) * row.divisor(True, spec.narrow) / top
        return -widest, widest
    scale = (hi - lo) / (top - bottom)
    start = lo + (row.min - bottom) * scale
    return start, start + (row.max - row.min) * scale


def from_range(spec: TensorSpec, lo: Any, hi: Any, scaled: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero point; a scaled float type maps the larger side to its reduced range."""
    if spec.reduced:
        lo, hi = _halved(spec, lo, hi)
    if not scaled:
        scale, zero_point = spec.grid.parameters(lo, hi)
        if spec.scale_rule == "int16":
            _check_int16(scale, replace(spec, scale_rule="float32").grid.parameters(lo, hi)[0])
        return scale, zero_point
    widest = np.maximum(-np.minimum(lo, 0), np.maximum(hi, 0)) / REDUCED_RANGE[spec.row.onnx_type or ""]
    return np.where(widest == 0, 1, widest).astype(np.float32), np.zeros(np.shape(widest), np.int64)


def _check_int16(scale: Any, exact: Any) -> None:
    """Raise for scales that M / 2**N with 16-bit M and N up to 16 cannot come near: they would clip or waste codes."""
    off = np.abs(np.asarray(scale, np.float64) / exact - 1)
    if (off > _INT16_TOLERANCE).any():
        worst = np.asarray(exact).reshape(-1)[off.reshape(-1).argmax()]
        raise ConfigError(
            f"Int16Scale cannot represent the scale {worst:.3g}: the least that 16 bits hold is 2**-16 = 1.53e-05. Use "
            "a data type with fewer codes, or float32 scales"
        )


def _set_weight(
    plan: Plan, tensor: TensorPlan, values: np.ndarray, scaled: bool, known: tuple[np.ndarray, np.ndarray] | None
) -> None:
    if tensor.spec.row.unit_scale and not scaled:
        plan.put(replace(tensor, scale=_ONE, zero_point=_ZERO))
        return
    if tensor.given is not None:
        plan.put(_as_given(tensor, tensor.given))
        return
    found = _with_fixed(tensor, lambda: known or weight_range(values, tensor.spec, tensor.name))
    lo, hi = np.asarray(found[0]), np.asarray(found[1])
    scale, zero_point = from_range(tensor.spec, lo, hi, scaled)
    lo, hi = (lo, hi) if values.any() else (0 * lo, 0 * hi)  # of zeros a scale of powers of two says nothing
    plan.put(replace(tensor, range=(lo, hi), scale=np.asarray(scale), zero_point=np.asarray(zero_point)))


def weight_range(values: np.ndarray, spec: TensorSpec, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(lo, hi) of a constant, one per parameter of its granularity.

    Raises:
        ModelError: the constant holds NaN or infinity.
    """
    whole = isinstance(spec.granularity, Tensor) or block_size(spec) is not None
    tiled = values.reshape(1, -1) if whole else spec.granularity.tile(values)
    if tiled.shape[-1] == 0:
        return np.zeros(tiled.shape[:-1]), np.zeros(tiled.shape[:-1])
    lo, hi = tiled.min(-1), tiled.max(-1)
    if not (np.isfinite(lo).all() and np.isfinite(hi).all()):
        raise ModelError(f"the constant {name!r} holds NaN or infinity; such a weight cannot be quantized")
    if spec.method == "mse":
        lo, hi = ROW_SEARCHES[dict(spec.settings).get("mode", "All")](tiled, spec.grid)
    elif spec.method not in BUILT_IN:
        return _searched(values, replace(spec, granularity=Tensor()) if whole else spec)
    elif spec.scale_rule == "power_of_two":
        lo, hi = fitted(lo, hi, spec.grid)
    shape = () if whole else lo.shape
    return np.asarray(lo).reshape(shape), np.asarray(hi).reshape(shape)


def _searched(values: np.ndarray, spec: TensorSpec) -> tuple[np.ndarray, np.ndarray]:
    """The ranges of a constant by a method that was registered."""
    shape = spec.granularity.parameter_shape(values.shape)
    row, settings, statistics = rows_of(spec.method, math.prod(shape), spec.grid, dict(spec.settings))
    for statistic, part in zip(statistics, spec.granularity.elements(values) if shape else [values], strict=True):
        count(statistic, part)
    lo, hi = np.array([row.find(one, spec.grid, settings) for one in statistics]).T
    return lo.reshape(shape), hi.reshape(shape)


def _make_room(plan: Plan, tensor: TensorPlan, values: np.ndarray) -> None:
    """Let the weight's scale grow until the bias fits; that of a computed weight grows with its group.

    (A bias left in float is no way out: ONNX Runtime quantizes it itself, and saturates.)
    """
    if not np.isfinite(values).all():
        raise ModelError(f"the constant {tensor.name!r} holds NaN or infinity; such a bias cannot be quantized")
    data, weight = (plan.tensors[name] for name in tensor.bias_of or ("", ""))
    if data.scale is None or weight.scale is None:
        raise ModelError(f"the bias {tensor.name!r} has an input or a weight without a scale")
    needed = np.abs(values.astype(np.float64)) * _FIT / (float(data.scale) * LARGEST_BIAS)
    if not (needed > _per_channel(weight.scale, values)).any():
        return
    for member in [weight] if weight.role == "weight" else plan.groups()[weight.group]:
        plan.put(replace(member, scale=_grown(weight, needed)))


def _set_bias(plan: Plan, tensor: TensorPlan, values: np.ndarray) -> None:
    data, weight = (plan.tensors[name] for name in tensor.bias_of or ("", ""))
    scale = np.asarray(data.scale * _per_channel(weight.scale, values))
    if tensor.spec.row.onnx_type == "INT16":
        scale = _shifted(scale, values)
    plan.put(replace(tensor, scale=scale.astype(np.float32), zero_point=np.zeros(scale.shape, np.int32)))


def _shifted(scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The least 2**k times the product of scales, k >= 0, at which the bias fits 16 bits (``Int16Bias``)."""
    wide = scale.astype(np.float64)
    needed = np.abs(bias.astype(np.float64)) / (wide * _INT16_MAX)
    if not scale.ndim:
        needed = needed.max(initial=0.0)
    return wide * np.exp2(np.ceil(np.log2(np.maximum(needed, 1.0))))


def _per_channel(scale: Any, bias: np.ndarray) -> np.ndarray:
    """The weight's scale for every element of the bias (grouped ConvTranspose: the same channels in every group)."""
    flat = np.asarray(scale, np.float32).reshape(-1)
    return flat[0] if flat.size == 1 else np.tile(flat, bias.size // flat.size)


def _grown(weight: TensorPlan, needed: np.ndarray) -> np.ndarray:
    """The weight's scale, no smaller than what its channels' biases need; doubled where only some scales exist."""
    scale = np.asarray(weight.scale, np.float32)
    floor = needed.max() if scale.size == 1 else needed.reshape(-1, scale.size).max(0).reshape(scale.shape)
    if weight.spec.scale_rule == "float32":
        return np.maximum(scale, floor).astype(np.float32)
    while (scale < floor).any():
        scale = np.where(scale < floor, scale * 2, scale)
    return scale


def observed(plan: Plan, options: Options) -> Iterable[TensorPlan]:
    """The activations whose range must come from data."""
    return [
        tensor
        for tensor in plan.of_role("activation")
        if tensor.observed
        and not tensor.spec.dynamic
        and not is_fixed(tensor)
        and (options.ActivationScaled or not tensor.spec.row.unit_scale)
    ]
