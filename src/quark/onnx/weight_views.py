"""The weights of layers as a page shows them: values, channel by channel, and what the codes can express.

The values are the float model's where the codes stand for them, and otherwise those that the codes stand for: a weight
that was folded with a batch norm, or equalized, is no longer that of the float model's file. Large weights are counted
by a part of their values. Not handled: weights that are not behind a DequantizeLinear (``MatMulNBits``) have no limits.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.surgery import constant_array
from quark.measure.distance import Distance
from quark.numerics.elements import Int
from quark.numerics.granularity import Group
from quark.onnx.diagnosis import weight_slots
from quark.onnx.qdq.channel_axes import weight_axes
from quark.onnx.qdq.op_rules import OpRule
from quark.onnx.quantized_plan import stored_row
from quark.report.values import Channels, TensorView

BINS = 64
SAMPLED = 1 << 18  # values of a weight that are counted
SAME, NEAR = 0.99, 15.0  # codes stand for values: the share within a step of them; dB, for formats without a step
FOLDED = "as stored: the float model's weight was changed before it was quantized"


@dataclass(frozen=True)
class WeightView:
    """A weight behind a DequantizeLinear.

    ``values``: what its codes stand for; ``low``, ``high``: the least and largest value that they can express, in a
    shape that broadcasts; ``step``: between the values of two codes, 0 for floats.
    """

    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    step: np.ndarray
    format: str


def weight_views(first: ir.Model, second: ir.Model) -> dict[str, TensorView]:
    """The weight of every layer of the quantized model ``second`` that has one, by the layer's name."""
    floats = {str(node.name): value for node, _, value in weight_slots(first)}
    found = {}
    for node, rule, value in weight_slots(second):
        name, ours = str(node.name), floats.get(str(node.name))
        view = _view(node, rule, stored(value), constant_array(value), constant_array(ours))
        if view is not None:
            title = str(ours.name) if ours is not None and ours.name else f"weight of {name}"
            found[name] = TensorView(title, *view)
    return found


def stored(value: ir.Value) -> WeightView | None:
    """The weight that ``value`` is, where a DequantizeLinear makes it of stored codes."""
    found = stored_row(value)
    if found is None:
        return None
    row, given, codes = found
    spread = row.spec.granularity
    wide = isinstance(spread, Group)
    step, shift = (spread.expand(one, codes.shape) if wide else one.reshape(spread.grid(codes.shape)) for one in given)
    shift, kind = shift.astype(np.float32), row.spec.row
    values = (codes.astype(np.float32) - shift) * step
    even = step if isinstance(kind, Int) else np.zeros_like(step)
    return WeightView(values, (kind.min - shift) * step, (kind.max - shift) * step, even, row.spec.format)


def _view(
    node: ir.Node, rule: OpRule, codes: WeightView | None, plain: np.ndarray | None, before: np.ndarray | None
) -> tuple[str, float, float, np.ndarray, np.ndarray, float, Channels | None, str] | None:
    """What a ``TensorView`` has behind its name."""
    held = codes.values if codes is not None else plain
    if held is None or held.dtype.kind != "f" or held.size < 2:
        return None
    same = codes is not None and before is not None and _stands_for(codes, before)
    values = before.astype(np.float32) if same and before is not None else held.astype(np.float32)
    flat = values.ravel()[:: max(1, values.size // SAMPLED)]
    flat = flat[np.isfinite(flat)]
    if not flat.size:
        return None
    counts, edges = np.histogram(flat, BINS)
    axis = weight_axes(node, rule)[0] if values.ndim > 1 else 0
    if codes is None:
        return str(values.dtype), np.nan, np.nan, counts, edges, 0.0, _channels(values, None, axis), ""
    half = codes.step / 2  # a value within half a step of the range rounds to its end
    clipped = float(np.mean((values < codes.low - half) | (values > codes.high + half))) if same else 0.0
    note = "" if same else FOLDED
    low, high = float(codes.low.min()), float(codes.high.max())
    return codes.format, low, high, counts, edges, clipped, _channels(values, codes, axis), note


def _stands_for(codes: WeightView, before: np.ndarray) -> bool:
    """Whether the codes were made from these values: by rounding, to either side, and clipping."""
    if before.shape != codes.values.shape or before.dtype.kind != "f":
        return False
    if codes.step.any():
        inside = np.clip(before, codes.low, codes.high)
        return bool(np.mean(np.abs(codes.values - inside) <= 1.001 * codes.step) >= SAME)
    distance = Distance()
    distance.update(before, codes.values)
    return distance.sqnr >= NEAR


def _channels(values: np.ndarray, codes: WeightView | None, axis: int) -> Channels:
    def ends(array: np.ndarray, join: np.ufunc) -> np.ndarray:
        whole = np.broadcast_to(array, values.shape)
        over = tuple(k for k in range(values.ndim) if k != axis % values.ndim)
        return np.asarray(join.reduce(whole, axis=over) if over else whole)

    found = Channels(ends(values, np.minimum), ends(values, np.maximum))
    if codes is None:
        return found
    return Channels(found.lowest, found.highest, ends(codes.low, np.minimum), ends(codes.high, np.maximum))
