"""Ranges of many small weights in one search: the biases and the small kernels of a graph of thousands of layers.

The search of power-of-two scales judges every row by itself, so rows of several tensors go through it together, and the
result is that of one search each. What is larger than ``SMALL`` values is searched alone, when it is its turn.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import TensorSpec
from quark.ir.surgery import constant_array
from quark.numerics.granularity import Tensor
from quark.observers.mse import search_rows
from quark.onnx.qdq.node_kinds import block_size

SMALL = 1 << 12
#: Values that are searched at once.
TOGETHER = 1 << 18
Range = tuple[np.ndarray, np.ndarray]


def ranges_of_small(model: ir.Model, plan: Plan) -> dict[str, Range]:
    """(lo, hi) of the small weights that are searched in this way, shaped by their granularity."""
    waiting: dict[tuple[TensorSpec, int], list[tuple[str, np.ndarray]]] = {}
    found: dict[str, Range] = {}
    for tensor, values in _small(model, plan):
        whole = isinstance(tensor.spec.granularity, Tensor)
        rows = values.reshape(1, -1) if whole else tensor.spec.granularity.tile(values)
        key = (tensor.spec, rows.shape[-1])
        waiting.setdefault(key, []).append((tensor.name, rows.astype(np.float32, copy=False)))
        if len(waiting[key]) * rows.size > TOGETHER:
            found |= _searched(waiting.pop(key), tensor.spec)
    for (spec, _), tensors in waiting.items():
        found |= _searched(tensors, spec)
    return found


def _small(model: ir.Model, plan: Plan) -> Iterator[tuple[TensorPlan, np.ndarray]]:
    """The weights that are searched together, and their values."""
    for tensor in plan.of_role("weight"):
        spec = tensor.spec
        known = tensor.fixed_range is not None or tensor.given is not None
        if known or spec.method != "mse" or spec.scale_rule != "power_of_two" or block_size(spec) is not None:
            continue
        constant = model.graph.initializers[tensor.name].const_value
        if constant is None or not 0 < constant.size <= SMALL or dict(spec.settings).get("mode", "All") != "All":
            continue
        values = constant_array(model.graph.initializers[tensor.name])
        if values is not None and np.isfinite(values).all():
            yield tensor, values


def _searched(tensors: list[tuple[str, np.ndarray]], spec: TensorSpec) -> dict[str, Range]:
    """One search for rows of one length."""
    whole = isinstance(spec.granularity, Tensor)
    shapes = [rows.shape[:-1] for _, rows in tensors]
    joined = np.concatenate([rows.reshape(-1, rows.shape[-1]) for _, rows in tensors])
    ends = np.cumsum([np.prod(shape, dtype=np.int64) for shape in shapes])[:-1]
    low, high = (np.split(side, ends) for side in search_rows(joined, spec.grid))
    shaped = [() if whole else shape for shape in shapes]
    return {
        name: (lo.reshape(shape), hi.reshape(shape))
        for (name, _), lo, hi, shape in zip(tensors, low, high, shaped, strict=True)
    }
