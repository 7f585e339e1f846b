"""Which layers lose most to their weights, why, and what would help.

Per channel c of a weight, with the codes q and the values w:

    SQNR   10 log10(sum w_c^2 / sum (w_c - Q(w_c))^2), the median over the channels (dB)
    bits   1 + log2(max |w_c| / scale), the bits that the channel's values use, at the weakest tenth of the channels

One scale for all channels serves the widest one; a channel a hundred times narrower keeps two of eight bits, and a
depthwise convolution has nothing else to make up for it. Large weights are judged by a part of every channel
(``SAMPLED`` values a weight). Not handled: block formats and floats, whose resolution follows the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import cast

import numpy as np
import onnx_ir as ir

from quark.config.plan import Plan, TensorPlan
from quark.dataclass import dataclass
from quark.ir.surgery import constant_array, input_at, int_attribute, let_go, name_of
from quark.numerics.affine import Coding
from quark.numerics.elements import Int
from quark.numerics.granularity import Channel, Tensor
from quark.numerics.metrics import lowest_tenth, median
from quark.onnx.bodies import alone, graphs, place_of
from quark.onnx.qdq.channel_axes import is_off_channel, weight_axes
from quark.onnx.qdq.op_rules import OP_RULES, OpRule
from quark.onnx.quantized_plan import stored_row
from quark.report.values import Weakness

SAMPLED = 1 << 16
#: A weight whose weakest channels keep no more than this share of their bits is worth a line, and one below so many dB.
SHARE, ENOUGH = 0.5, 20.0
#: Channels narrower than this part of the widest one are dead: nothing is lost with them.
DEAD = 1e-9


@dataclass(frozen=True)
class Weight:
    """One weight of one node: values float32 [channels, n], scale [channels] or [1], and how its codes are made.

    ``exact``: the values are the float ones; otherwise those that the codes stand for.
    """

    node: ir.Node
    values: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray
    format: Int
    exact: bool = True


def of_plan(model: ir.Model, plan: Plan) -> tuple[Weakness, ...]:
    """The weak weights of a Plan with all its scales, the worst first. ``model`` still holds the float weights."""
    return _ranked(_planned(model, plan))


def of_model(quantized: ir.Model) -> tuple[Weakness, ...]:
    """The same for a quantized model as it is in its file, bodies of If and Loop included; the error of a code is taken
    to be uniform."""
    inside = [
        located(of_model(alone(graph, quantized)[0]), place_of(node, name)) for node, name, graph in graphs(quantized)
    ]
    return ranked(_ranked(_stored(quantized)), *inside)


def located(weak: Iterable[Weakness], place: str) -> tuple[Weakness, ...]:
    """The weak layers of a body, called as plans call them."""
    return tuple(replace(one, node=place + one.node) for one in weak)


def ranked(*weak: Iterable[Weakness]) -> tuple[Weakness, ...]:
    """Weak layers, the worst first."""
    return tuple(sorted(chain(*weak), key=lambda weakness: weakness.sqnr))


def _ranked(weights: Iterable[Weight]) -> tuple[Weakness, ...]:
    found = (judge(weight) for weight in weights)
    return ranked(one for one in found if one is not None)


def _planned(model: ir.Model, plan: Plan) -> Iterator[Weight]:
    for node, rule, value in weight_slots(model):
        tensor = plan.tensors.get(name_of(value))
        array = constant_array(value)
        if (
            tensor is None
            or tensor.scale is None
            or array is None
            or not _has_channels(tensor)
            or is_off_channel(node, value, tensor.spec)
        ):
            continue
        row = cast(Int, tensor.spec.row)
        yield from _rows(node, rule, array, np.asarray(tensor.scale), np.asarray(tensor.zero_point), row)
        del array
        let_go(value.const_value)


def _has_channels(tensor: TensorPlan) -> bool:
    whole = isinstance(tensor.spec.granularity, (Tensor, Channel))
    return whole and isinstance(tensor.spec.row, Int)


def _stored(model: ir.Model) -> Iterator[Weight]:
    for node, rule, value in weight_slots(model):
        found = stored_row(value)
        if found is None or not _has_channels(found[0]):
            continue
        row, (scale, zero), codes = found
        granularity, channels = row.spec.granularity, weight_axes(node, rule)[0]
        if isinstance(granularity, Channel) and granularity.axis % codes.ndim != channels % codes.ndim:
            continue
        for weight in _rows(node, rule, codes.astype(np.float32), scale, zero, cast(Int, row.spec.row)):
            values = (weight.values - weight.zero_point[:, None].astype(np.float32)) * weight.scale[:, None]
            yield replace(weight, values=values, exact=False)


def weight_slots(model: ir.Model) -> Iterator[tuple[ir.Node, OpRule, ir.Value]]:
    """Every node that sums products, and what it reads as its weight."""
    for node in model.graph:
        rule = OP_RULES.get(node.op_type)
        value = None if rule is None or rule.weight is None else input_at(node, rule.weight)
        if rule is not None and value is not None:
            yield node, rule, value


def _rows(
    node: ir.Node, rule: OpRule, array: np.ndarray, scale: np.ndarray, zero: np.ndarray, row: Int
) -> Iterator[Weight]:
    """The weight as rows of channels, if it has any that its scales fit."""
    if array.ndim < 2 or not array.size:
        return
    channels = weight_axes(node, rule)[0] % array.ndim
    rows = np.moveaxis(array, channels, 0).reshape(array.shape[channels], -1)
    step = max(1, rows.size // SAMPLED)
    if scale.size in (1, len(rows)):
        yield Weight(node, rows[:, ::step].astype(np.float32), scale.reshape(-1), zero.reshape(-1), row)


def judge(weight: Weight) -> Weakness | None:
    """What is wrong with a weight, or ``None``."""
    widest = np.abs(weight.values).max(1)
    alive = widest > DEAD * widest.max()
    if not alive.any():
        return None
    one = weight.scale.size == 1
    scale = np.broadcast_to(weight.scale, widest.shape)
    signal = _squares(weight.values)
    with np.errstate(divide="ignore"):
        used = 1 + np.log2(widest[alive] / scale[alive])
    bits = int(weight.format.bits)
    kept = int(np.clip(np.rint(lowest_tenth(used)), 0, bits))
    starved = one and len(widest) > 1 and kept <= SHARE * bits
    if not starved and _sqnr(signal, _most_noise(weight, scale, widest), alive) >= ENOUGH:
        return None
    sqnr = _sqnr(signal, _noise(weight, scale), alive)
    if not starved and sqnr >= ENOUGH:
        return None
    return Weakness(name_of(weight.node), weight.node.op_type, sqnr, _advice(weight, starved, kept, bits, sqnr))


def _squares(values: np.ndarray) -> np.ndarray:
    """The sum of squares of every row, in float64."""
    return np.einsum("ij,ij->i", values, values, dtype=np.float64)


def _sqnr(signal: np.ndarray, noise: np.ndarray, alive: np.ndarray) -> float:
    """The median over the channels that count."""
    with np.errstate(divide="ignore"):
        return median(10 * np.log10(signal[alive] / noise[alive]))


def _most_noise(weight: Weight, scale: np.ndarray, widest: np.ndarray) -> np.ndarray:
    """What the squared error of a channel is below: half a step for every value, where codes reach all of them.

    It spares most weights the rounding. What is rounded is float32: beyond 16 bits half a step is no bound.
    """
    codes, zero = weight.format, np.broadcast_to(weight.zero_point, scale.shape).astype(np.int64)
    reach = scale * (np.minimum(codes.max - zero, zero - codes.min) + 0.4)  # less than half a step beyond the last code
    half = 0.26 * np.square(scale, dtype=np.float64) * weight.values.shape[1]
    return np.where((widest <= reach) & (codes.bits <= 16), half, np.inf)


def _noise(weight: Weight, scale: np.ndarray) -> np.ndarray:
    """The squared error of every channel."""
    if not weight.exact:
        return np.square(scale, dtype=np.float64) / 12 * weight.values.shape[1]
    zero_point = np.broadcast_to(weight.zero_point, scale.shape)
    rounded = Coding(weight.format, Channel(0)).fake_quantize(weight.values, scale, zero_point)
    return _squares(weight.values - rounded)


def _advice(weight: Weight, starved: bool, kept: int, bits: int, sqnr: float) -> str:
    """Cause and remedy in one sentence."""
    depthwise = int_attribute(weight.node, "group", 1) > 1
    kind = "depthwise weights" if depthwise else "weights"
    if starved:
        return f"{kind} per tensor keep {kept} of {bits} bits; per channel keeps {bits}"
    return f"{bits} bits leave {kind} {sqnr:.0f} dB; exclude the node or give it a wider type"
