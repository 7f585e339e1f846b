"""Equalization by data in a graph: through activation functions that scale with their input, and through SiLU.

    Conv -> Relu, pools, Concat -> Conv      the scales go into the weights on both sides
    Conv -> u · Sigmoid(u)       -> Conv      the layer makes u / s; the Sigmoid reads it times s:

        v / s = (u / s) · Sigmoid(s · (u / s))

which takes one Mul more per layer. The Sigmoid is flat beyond ±8, so what it reads gets no wider range than that.

Not handled: results that an Add or a graph output reads, other activation functions, grouped convolutions that are not
depthwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.algorithms.equalization import Term, equalizing_scales, floored, share, weight_term
from quark.config.job import Job
from quark.dataclass import dataclass
from quark.ir.surgery import Names, add_initializer, int_attribute, sole_consumer
from quark.numerics.granularity import Channel
from quark.onnx.algorithms.channels import ChannelLayer, layer_of
from quark.onnx.algorithms.cle import is_homogeneous
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.samples import feeds_of
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.run import Runner
from quark.onnx.graph.session import Runtime
from quark.onnx.qdq.slots import KNOWN_RANGE
from quark.onnx.quantization.config.algorithm import ChannelEqualizationConfig

_POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")
#: Beyond this magnitude a Sigmoid is flat: 3e-4 and 1 - 3e-4.
_FLAT = 8.0
#: Steps of log2 s where s goes into weights alone.
_GRAIN = 0.25


@dataclass(frozen=True)
class ChannelTail:
    """A layer that reads the channels from ``start`` on of its input."""

    layer: ChannelLayer
    start: int


@dataclass(frozen=True)
class Chain:
    """A layer, the Sigmoid of its SiLU (``None``: there is none), the tensor whose channels are scaled, its readers."""

    head: ChannelLayer
    gate: ir.Node | None
    target: ir.Value
    tails: tuple[ChannelTail, ...]

    @property
    def channels(self) -> int:
        """How many channels there are."""
        return int(self.head.weight.shape[self.head.made])


def run(model: ir.Model, config: ChannelEqualizationConfig, context: JobContext) -> PassReport:
    """Equalize every chain of the main graph, in place.

    Raises:
        DataError: there is no calibration data.
    """
    chains = list(find_chains(model, config.through_silu))
    if not chains:
        return PassReport(config.name, 0, ("no layer is followed by activations that only layers read",))
    found = _observe(model, chains, context, config.data_size)
    total = [np.ones(chain.channels) for chain in chains]
    for _ in range(config.steps):
        for chain, seen, s in zip(chains, found, total, strict=True):
            terms = _terms(chain, seen, s, context.job)
            now = equalizing_scales(terms, s, config.widest, _GRAIN if chain.gate is None else 1.0)
            _scale(chain, now / s)
            s[:] = now
    names = Names(model)
    for chain, s in zip(chains, total, strict=True):
        if chain.gate is not None and (s != s[0]).any():
            _feed_gate(model, names, chain, s)
    return PassReport(config.name, len(chains))


def find_chains(model: ir.Model, through_silu: bool = True) -> Iterator[Chain]:
    """Every layer whose result only layers read, through what keeps channels apart and scales with its input."""
    for node in model.graph:
        head = layer_of(node)
        if head is None or node.op_type != "Conv":
            continue
        gate, target = _activation(node, through_silu)
        tails = _tails(target, 0)
        if tails and not node.outputs[0].is_graph_output():
            yield Chain(head, gate, target, tuple(tails))


def _activation(node: ir.Node, through_silu: bool) -> tuple[ir.Node | None, ir.Value]:
    """The Sigmoid and the result of the SiLU behind a layer; the layer's own result where there is none."""
    u = node.outputs[0]
    readers = [use.node for use in u.uses()]
    gate = next((reader for reader in readers if reader.op_type == "Sigmoid"), None)
    product = None if gate is None else sole_consumer(gate.outputs[0])
    if not through_silu or gate is None or product is None or len(readers) != 2:
        return None, u
    both = {id(value) for value in product.inputs} == {id(u), id(gate.outputs[0])}
    return (gate, product.outputs[0]) if product.op_type == "Mul" and both else (None, u)


def _tails(value: ir.Value, start: int) -> list[ChannelTail]:
    """The layers that read a tensor; empty where something else does."""
    found: list[ChannelTail] = []
    for use in value.uses():
        node = use.node
        layer = layer_of(node)
        if layer is not None and use.idx == 0 and node.op_type == "Conv":
            found.append(ChannelTail(layer, start))
            continue
        more: list[ChannelTail] = []
        if use.idx == 0 and (is_homogeneous(node) or node.op_type in _POOLS) and len(node.outputs) == 1:
            more = _tails(node.outputs[0], start)
        elif node.op_type == "Concat" and int_attribute(node, "axis", 0) == 1:
            before = _channels_before(node, use.idx)
            more = [] if before is None else _tails(node.outputs[0], start + before)
        if not more:
            return []
        found += more
    return [] if value.is_graph_output() else found


def _channels_before(node: ir.Node, position: int) -> int | None:
    total = 0
    for value in node.inputs[:position]:
        size = None if value is None or value.shape is None or len(value.shape) < 2 else value.shape[1]
        if not isinstance(size, int):
            return None
        total += size
    return total


@dataclass(frozen=True)
class _Seen:
    """Per channel: the largest magnitudes of the layer's result (below -8 it makes no difference to a SiLU) and of the
    tensor behind the activation function, and the mean square of that."""

    before: np.ndarray
    after: np.ndarray
    power: np.ndarray


def _observe(model: ir.Model, chains: Sequence[Chain], context: JobContext, limit: int) -> list[_Seen]:
    """What the channels of every chain look like; one sample is in memory at a time."""
    wanted = [(str(c.head.node.outputs[0].name), str(c.target.name)) for c in chains]
    options = context.job.options
    names = dict.fromkeys(name for row in wanted for name in row)
    runner = Runner(model, names, (), Runtime.of(options))
    feeds = feeds_of(model, context, limit)
    found: list[_Seen] = []
    for done, feed in enumerate(feeds, 1):
        values = runner.run(feed).values
        lowest = [-np.inf if chain.gate is None else -_FLAT for chain in chains]
        now = [_look(values[u], values[v], low) for (u, v), low in zip(wanted, lowest, strict=True)]
        found = now if not found else [_both(*pair) for pair in zip(found, now, strict=True)]
        context.progress("channel_equalization", done, len(feeds))
    return [replace(seen, power=seen.power / len(feeds)) for seen in found]


def _look(u: np.ndarray, v: np.ndarray, lowest: float) -> _Seen:
    axes = (0, *range(2, u.ndim))
    before = np.maximum(u.max(axes), -np.maximum(u.min(axes), lowest))
    power = np.square(v, dtype=np.float64).mean(axes)
    return _Seen(before.astype(np.float64), np.abs(v).max(axes).astype(np.float64), power)


def _both(one: _Seen, other: _Seen) -> _Seen:
    """Two together; mean squares are summed."""
    before, after = np.maximum(one.before, other.before), np.maximum(one.after, other.after)
    return _Seen(before, after, one.power + other.power)


def _terms(chain: Chain, seen: _Seen, s: np.ndarray, job: Job) -> list[Term]:
    """What rounding does to the tensors of a chain whose channels are divided by ``s`` already."""
    layer = job.rules.default
    if layer.inputs is None or layer.weight is None:
        return []
    bits, weight_bits = (spec.row.bits for spec in (layer.inputs, layer.weight))
    whole = not isinstance(layer.weight.granularity, Channel)
    power = floored(seen.power) / s**2
    shares = [_share(chain, tail, power) for tail in chain.tails]
    gain = np.sum(shares, axis=0)
    sides = (seen.after,) if chain.gate is None else (seen.after, seen.before)
    terms = [Term(side / s, gain, bits, True) for side in sides]
    bias = chain.head.bias
    if bias is not None and job.npu and not job.options.Int32Bias:
        terms.append(Term(np.abs(bias.reshape(-1)), gain, weight_bits, True))
    if whole:
        terms.append(_weight_term(chain.head.rows(chain.head.made), gain * power, weight_bits, True))
    for tail, part in zip(chain.tails, shares, strict=True):
        if whole or not tail.layer.depthwise:
            rows = tail.layer.rows(tail.layer.read)[tail.start : tail.start + chain.channels]
            terms.append(_weight_term(rows, part * power, weight_bits, False))
    return terms


def _share(chain: Chain, tail: ChannelTail, power: np.ndarray) -> np.ndarray:
    if tail.layer.depthwise:
        return share(None, power)
    rows = tail.layer.rows(tail.layer.read)[tail.start : tail.start + chain.channels]
    return share(np.square(rows, dtype=np.float64).sum(1), power)


def _weight_term(rows: np.ndarray, signal: np.ndarray, bits: float, divided: bool) -> Term:
    return weight_term(np.abs(rows).max(1), np.square(rows, dtype=np.float64).mean(1), signal, bits, divided)


def _scale(chain: Chain, s: np.ndarray) -> None:
    """Divide what makes the channels, multiply what reads them."""
    chain.head.scale_made(1 / s)
    for tail in chain.tails:
        whole = np.ones(tail.layer.weight.shape[tail.layer.read])
        whole[tail.start : tail.start + len(s)] = s
        tail.layer.scale_read(whole)


def _feed_gate(model: ir.Model, names: Names, chain: Chain, s: np.ndarray) -> None:
    """Let the Sigmoid read the layer's result times s."""
    gate, u = chain.gate, chain.head.node.outputs[0]
    if gate is None:
        return
    shape = [1, -1] + [1] * (chain.head.weight.ndim - 2)
    scale = add_initializer(model.graph, s.astype(chain.head.weight.dtype).reshape(shape), names.fresh(f"{u.name}_s"))
    product = ir.Value(name=names.fresh(f"{u.name}_whole"), shape=u.shape, type=u.type)
    product.meta[KNOWN_RANGE] = (-_FLAT, _FLAT)
    model.graph.insert_before(gate, ir.Node("", "Mul", [u, scale], outputs=[product], name=f"{gate.name}_whole"))
    gate.replace_input_with(0, product)
