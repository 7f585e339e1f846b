"""Equalization by data for the torch flow: convolutions and linear layers, and the activations between them.

The places are those of cross-layer equalization (``cle.py``): layers whose channels others read through what scales
with its input. Activations are looked at once, on all samples; the scales follow from them and from the weights
(``quark.algorithms.equalization``), place by place. How far they go is what the quantized answers are best with; where
none of the ways is worth it, the model stays as it was.

Not handled: SiLU, which would need one more product in the model; models of decoder blocks, where the inputs of linear
layers are scaled by SmoothQuant and AWQ.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from quark.algorithms.equalization import Term, equalizing_scales, floored, share, weight_term
from quark.dataclass import dataclass
from quark.errors import ConfigError, DataError
from quark.measure.guard import best_change
from quark.numerics.granularity import Channel
from quark.torch.algorithms.answers import walk_of
from quark.torch.algorithms.blocks import find_blocks
from quark.torch.algorithms.cle import answers_of, array, channel_view, rescale
from quark.torch.algorithms.context import ModelContext
from quark.torch.algorithms.guard import change_all, output_distance
from quark.torch.algorithms.inputs import Watch
from quark.torch.calibration import run
from quark.torch.config.algorithms import ChannelEqualizationConfig
from quark.torch.matching import Match
from quark.torch.structure_channels import ChannelReader, Spread, axis_of, find_spreads

log = logging.getLogger(__name__)
PARTS = (1.0, 0.5, 0.25)
"""Exponents of ``widest`` that are tried."""
GRAIN = 0.25
"""Steps of the exponents of scales that go into weights alone."""


@dataclass(frozen=True)
class ChannelsSeen:
    """Largest magnitudes and mean squares of the channels that a layer writes, where others read them."""

    largest: np.ndarray
    power: np.ndarray


@torch.no_grad()
def run_equalization(context: ModelContext, config: ChannelEqualizationConfig) -> None:
    """Equalize the channels of ``context.model``.

    Raises:
        DataError: no samples.
        ConfigError: the model has decoder blocks.
    """
    if not context.samples:
        raise DataError("channel_equalization looks at what layers read, and there are no samples: give a dataloader")
    if path := find_blocks(context.model, "").path:
        raise ConfigError(
            f"algo_config: 'channel_equalization' is for convolutional networks, and this model has the decoder blocks "
            f"{path!r}; allowed there: 'smooth', 'awq', 'cle'"
        )
    items = {name: item for item in context.found.quantized for name in item.layer.names}
    spreads = [
        spread
        for spread in find_spreads(context.model, partial(answers_of, context))
        if items.keys() & {spread.source, *(reader.name for reader in spread.readers)}
    ]
    log.info("channel_equalization: %d layers whose channels can be scaled", len(spreads))
    if not spreads:
        return
    seen = observe(context, spreads)
    walk = walk_of(context, "")
    ways = [partial(equalize, seen, items, config.steps, config.widest**part) for part in PARTS]
    if (best := best_change(ways, output_distance(walk).errors)) is None:
        log.warning("channel_equalization: the model stays: its quantized answers are no better with it")
        return
    change_all(walk, best)


def observe(context: ModelContext, spreads: Sequence[Spread]) -> list[tuple[Spread, ChannelsSeen]]:
    """Every place, and what its readers read over all samples."""
    modules = dict(context.model.named_modules())
    names = {reader.name: modules[reader.name] for spread in spreads for reader in spread.readers}
    largest: dict[str, np.ndarray] = {}
    squares: dict[str, np.ndarray] = {}
    counts: dict[str, int] = dict.fromkeys(names, 0)

    def see(name: str, x: torch.Tensor) -> None:
        rows = x.detach().movedim(axis_of(names[name], x), 0).flatten(1).double()
        top, sums = array(rows.abs().amax(1)), array(rows.square().sum(1))
        largest[name] = np.maximum(largest[name], top) if name in largest else top
        squares[name] = squares[name] + sums if name in squares else sums
        counts[name] += rows.shape[1]

    watch = Watch(names, see, stop=False)
    for sample in context.samples:
        watch.run(partial(run, context.model, sample))
    return [(spread, seen_of(spread, largest, squares, counts, modules)) for spread in spreads]


def seen_of(
    spread: Spread,
    largest: dict[str, np.ndarray],
    squares: dict[str, np.ndarray],
    counts: dict[str, int],
    modules: dict[str, nn.Module],
) -> ChannelsSeen:
    """The channels of one place, by the reader that sees most of each."""
    width = channels_of(modules[spread.source])
    tops = [gathered(reader, largest[reader.name], width).max(1) for reader in spread.readers]
    powers = [
        gathered(reader, squares[reader.name] / max(counts[reader.name], 1), width).mean(1) for reader in spread.readers
    ]
    return ChannelsSeen(np.max(tops, 0), np.max(powers, 0))


def channels_of(module: nn.Module) -> int:
    """How many channels a layer writes."""
    view = channel_view(module)
    return view.shape[0] * view.shape[1]


def gathered(reader: ChannelReader, values: np.ndarray, width: int) -> np.ndarray:
    """Values of a reader's input channels by the channels that they are, [width, ...]: as many each."""
    channels = array(reader.channels).astype(int)
    order = np.argsort(channels, kind="stable")[(channels < 0).sum() :]
    return values[order].reshape(width, -1, *values.shape[1:])


def equalize(
    seen: Sequence[tuple[Spread, ChannelsSeen]],
    items: dict[str, Match],
    steps: int,
    widest: float,
    context: ModelContext,
    part: str,
) -> None:
    """Scale all places of the model, ``steps`` times in turn; there is one ``part``, the whole."""
    scales = [np.ones(len(one.power)) for _, one in seen]
    for _ in range(steps):
        for (spread, one), s in zip(seen, scales, strict=True):
            terms = terms_of(dict(context.model.named_modules()), spread, one, s, items)
            if terms:
                now = equalizing_scales(terms, s, widest, GRAIN)
                rescale(context, spread, s / now)
                s[:] = now


def terms_of(
    modules: dict[str, nn.Module], spread: Spread, seen: ChannelsSeen, s: np.ndarray, items: dict[str, Match]
) -> list[Term]:
    """What rounding does to the tensors of a place whose channels are divided by ``s`` already."""
    power, terms, gain = floored(seen.power) / s**2, [], np.zeros(len(s))
    for reader in spread.readers:
        module, item = modules[reader.name], items.get(reader.name)
        view = channel_view(module)
        groups, out, inner, positions = view.shape
        depthwise = inner == 1 and groups > 1
        rows = array(view.permute(0, 2, 1, 3).reshape(groups * inner, out * positions))
        own = gathered(reader, rows, len(s)).reshape(len(s), -1)
        part = share(None if depthwise else np.square(own).sum(1), power)
        gain += part
        bits = bits_of(item, "input_tensors", whole=True)
        if bits:
            terms.append(Term(seen.largest / s, part, bits, True))
        bits = bits_of(item, "weight", whole=depthwise)
        if bits:
            terms.append(weight_term(np.abs(own).max(1), np.square(own).mean(1), part * power, bits, False))
    bits = bits_of(items.get(spread.source), "weight", whole=True)
    if bits:
        rows = array(channel_view(modules[spread.source]).flatten(0, 1).flatten(1))
        terms.append(weight_term(np.abs(rows).max(1), np.square(rows).mean(1), gain * power, bits, True))
    return terms


def bits_of(item: Match | None, slot: str, whole: bool) -> float:
    """Bits of a quantized tensor whose channels share scales; 0 where it is float or no choice of scales changes it.

    Args:
        whole: scales that differ from channel to channel take what the scales of this algorithm do; False: they are of
            the other axis.
    """
    stages = item.stages[slot] if item is not None else ()
    if not stages:
        return 0.0
    spec = stages[0].spec
    alone = whole and isinstance(spec.granularity, Channel)
    return 0.0 if alone else float(spec.row.bits)
