"""Scales improved channel by channel, where groups of columns of the weights have scales of their own.

    loss_g(s) = |Q(x_g / s_g) Q(w_g s_g)^T - x_g w_g^T|^2      g: the columns of one group, over all layers that read it

The scale of a channel changes what its own group loses, and (nearly) nothing else. So one channel of every group is
tried at a time, a quarter or a tenth larger or smaller, and each group keeps what is best for it: a few dozen
roundings of the weight find scales for all of its channels. With d = Q(x / s) s - x and e = Q(w s) / s - w a loss is

    tr(w' d^T d w'^T) + 2 tr(w' d^T x e^T) + tr(e x^T x e^T)      w' = w + e

of which only products as large as a group are needed, and which cancels nothing.

Where only weights are quantized, and a scale of theirs depends on the extremes of its group alone (which is tried out),
a step rounds one column of each group anew, and all of it only in rows whose extremes change (``column_steps``): a
hundred times less work than all of the weight.

What the groups of one output lose together, and scales of activations that all groups share, are not seen here: the
scales that come out must stand the error of the whole layers (``scaling.Judge``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from quark.dataclass import dataclass
from quark.numerics.granularity import Group
from quark.torch.algorithms.column_steps import ScaledColumns, columns_alone, joined
from quark.torch.algorithms.context import new_quantizer
from quark.torch.algorithms.judge import ScaleJudge, row_by_row, stacks_of
from quark.torch.algorithms.rows import RowsByExtremes, by_scale
from quark.torch.algorithms.scaling import Place
from quark.torch.algorithms.trial import quantize_new, quantized_matrix
from quark.torch.matching import Match

FACTORS = ((0.8, 1.25, 0.9, 1.1), (0.9, 1.1))  # each column takes the best, or none; then all take again
CHANNELS = 64  # of a group that are tried
ROWS = 256  # of quantized inputs


def by_channels(asked: Sequence[tuple[Place, ScaleJudge, torch.Tensor]]) -> list[torch.Tensor | None]:
    """Better scales for the sum over groups, at several places at once; None where no groups have scales of their own.

    Args:
        asked: of each place: which (input channels that share a row of its source keep a common scale), its layers and
            inputs of them, and the scales to start from, [channels].
    """
    found: list[torch.Tensor | None] = [None] * len(asked)
    by_size = defaultdict[int, list[tuple[int, ChannelSearch, list[ScaledColumns]]]](list)
    for number, one in enumerate(asked):
        search = search_of(*one)
        columns = None if search is None else search.columns()
        if search is not None and columns is None:
            found[number] = search.groups.scales(improved(search.own, steps_of_all(search)))
        elif search is not None and columns is not None:
            by_size[search.groups.size].append((number, search, columns))
    for some in by_size.values():
        numbers, searches, every = zip(*some, strict=True)
        own = improved(torch.cat([search.own for search in searches]), steps_of_columns(searches, every))
        for number, search, best in zip(
            numbers, searches, own.split([len(search.own) for search in searches]), strict=True
        ):
            found[number] = search.groups.scales(best)
    return found


# scales [trials, groups, size], and in which columns they are tried, the first of which now → the best trial of each
# group [groups], -1: none is better
Steps = Callable[[torch.Tensor, range], torch.Tensor]


def improved(own: torch.Tensor, step: Steps) -> torch.Tensor:
    """Scales [groups, size], column by column."""
    size = own.shape[1]
    columns, groups = range(0, size, -(-size // CHANNELS)), torch.arange(len(own), device=own.device)
    for factors in FACTORS:
        times = torch.tensor(factors, device=own.device)[:, None]
        for number, offset in enumerate(columns):
            tried = own.repeat(len(factors), 1, 1)
            tried[:, :, offset] *= times
            best = step(tried, columns[number:])
            own = torch.where(best[:, None] < 0, own, tried[best.clamp(min=0), groups])
    return own


@dataclass(frozen=True)
class ChannelSearch:
    """The search at one place.

    Attributes:
        groups: layers and inputs.
        labels: of each group, the number of the first one with the same scales, [groups].
        own: scales to start from, [groups, size]; 1 in columns that only fill a group up.
    """

    groups: Groups
    labels: torch.Tensor
    own: torch.Tensor

    def columns(self) -> list[ScaledColumns] | None:
        """What a step that rounds what changes works on; None: inputs are quantized, or more than extremes counts."""
        groups, every = self.groups, []
        if groups.stacks[0][0].stages["input_tensors"] or not all(row_by_row(items[0]) for items in groups.stacks):
            return None
        s = groups.scales(self.own)
        for items, weight in zip(groups.stacks, groups.weights, strict=True):
            rounded = partial(quantized_matrix, items[0])
            own, scaled, error = (
                in_groups(x, groups.size).reshape(-1, groups.size)
                for x in (weight, weight * s, rounded(weight * s) / s - weight)
            )
            rounding, counts = by_scale(items[0]) or RowsByExtremes(rounded), [len(weight)] * len(self.own)
            columns = ScaledColumns(rounding, own, scaled, error, groups.squares, counts)
            if not columns_alone(columns, self.own):
                return None
            every.append(columns)
        return every


def search_of(place: Place, judge: ScaleJudge, s: torch.Tensor) -> ChannelSearch | None:
    """The search at a place, from the scales ``s`` [channels]; None where no groups have scales of their own."""
    sizes = {columns_of(item) for item in judge.items}
    size = sizes.pop()
    if sizes or size is None or size >= len(s):
        return None
    labels = alike(place, len(s), size, s.device)
    own = in_groups(s[None], size)[:, 0]
    return None if labels is None else ChannelSearch(groups_of(judge.coarse, size), labels, own.where(own > 0, 1))


def steps_of_all(search: ChannelSearch) -> Steps:
    """Steps that round all weights and inputs anew."""
    groups, labels = search.groups, search.labels
    lowest = groups.losses(groups.scales(search.own), labels)

    def step(tried: torch.Tensor, columns: range) -> torch.Tensor:
        nonlocal lowest
        least, best = torch.stack([groups.losses(groups.scales(own), labels) for own in tried]).min(0)
        before, lowest = lowest, torch.minimum(least, lowest)
        return torch.where(least < before, best, -1).index_select(0, labels)

    return step


def steps_of_columns(searches: Sequence[ChannelSearch], every: Sequence[list[ScaledColumns]]) -> Steps:
    """Steps that round what changes, at all places together: those that are rounded alike as one."""
    alike = defaultdict[Any, list[tuple[ScaledColumns, torch.Tensor]]](list)
    labels, first = list[torch.Tensor](), 0
    for search, some in zip(searches, every, strict=True):
        numbers = first + torch.arange(len(search.own), device=search.own.device)
        for columns in some:
            alike[columns.rounding].append((columns, numbers))
        labels.append(first + search.labels)
        first += len(search.own)
    label = torch.cat(labels)
    parts = [
        (joined([columns for columns, _ in some]), torch.cat([numbers for _, numbers in some]))
        for some in alike.values()
    ]

    def step(tried: torch.Tensor, columns: range) -> torch.Tensor:
        made = [part.tried(tried.index_select(1, numbers), columns) for part, numbers in parts]
        gained = tried.new_zeros(len(tried), len(label))
        for one, (_, numbers) in zip(made, parts, strict=True):
            gained.index_add_(1, label.index_select(0, numbers), one.change)
        least, best = gained.min(0)
        best = torch.where(least < 0, best, -1).index_select(0, label)
        for one, (part, numbers) in zip(made, parts, strict=True):
            part.take(one, best.index_select(0, numbers))
        return best

    return step


def columns_of(item: Match) -> int | None:
    """ScaledColumns of a layer's weight [out, in] that share a scale in a row; None where no such groups are."""
    written = item.written(item.stages["weight"][0])
    return written.size if isinstance(written, Group) and written.axis % 2 == 1 else None


def alike(place: Place, count: int, size: int, device: torch.device) -> torch.Tensor | None:
    """For each group the first one that reads the same channels of the source, [groups]; None: groups overlap."""
    number = -(-count // size)
    own = torch.arange(number, device=device)
    if place.channels is None:
        return own
    channels = place.channels.to(device)
    different = len(set(channels.tolist()))
    if different == count:
        return own
    if count % size:
        return None
    rows = channels.reshape(number, size)
    labels = torch.stack([(rows == row).all(1).int().argmax() for row in rows])
    return labels if different == len(set(labels.tolist())) * size else None


@dataclass(frozen=True)
class Groups:
    """Layers and their inputs in groups of columns.

    Attributes:
        stacks: the layers; small ones whose rows can be rounded together are.
        weights: of each of these, [rows of all, channels], float32.
        size: columns of a group.
        rows, inputs: [rows, channels], and as [groups, rows, size].
        squares: x^T x, [groups, size, size].
    """

    stacks: list[list[Match]]
    weights: list[torch.Tensor]
    size: int
    rows: torch.Tensor
    inputs: torch.Tensor
    squares: torch.Tensor

    def scales(self, own: torch.Tensor) -> torch.Tensor:
        """Scales [groups, size] as those of the channels, [channels]."""
        return own.reshape(-1)[: self.rows.shape[1]]

    def losses(self, s: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of each group, summed over layers, under the label of the group, [groups]."""
        noise = self.input_products(s)
        total = torch.zeros(len(labels), device=s.device)
        for items, weight in zip(self.stacks, self.weights, strict=True):
            tuned = quantized_matrix(items[0], weight * s) / s
            error = in_groups(tuned - weight, self.size)
            total += (torch.bmm(error.mT, error) * self.squares).sum((1, 2))
            if noise is not None:
                tuned, (own, mixed) = in_groups(tuned, self.size), noise
                total += (torch.bmm(tuned.mT, tuned) * own).sum((1, 2))
                total += 2 * (torch.bmm(tuned.mT, error) * mixed).sum((1, 2))
        return torch.zeros_like(total).index_add(0, labels, total)

    def input_products(self, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """d^T d and d^T x of the inputs' errors d; None where inputs are not quantized."""
        quantizer = new_quantizer(self.stacks[0][0], "input_tensors")
        if quantizer is None:
            return None
        error = in_groups(quantize_new(quantizer, self.rows / s) * s, self.size) - self.inputs
        return torch.bmm(error.mT, error), torch.bmm(error.mT, self.inputs)


def groups_of(judge: ScaleJudge, size: int) -> Groups:
    """The layers and inputs of a judge in groups."""
    quantized = bool(judge.items[0].stages["input_tensors"])
    rows = judge.rows[:: max(1, len(judge.rows) // ROWS)] if quantized else judge.rows
    inputs = in_groups(rows, size)
    stacks = stacks_of(judge.items)
    weights = [torch.cat([judge.weight(item) for item in items]) for items in stacks]
    return Groups(stacks, weights, size, rows, inputs, torch.bmm(inputs.mT, inputs))


def in_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, columns] as [groups, rows, size], padded with 0."""
    return Group(1, size).tile(x).reshape(len(x), -1, size).transpose(0, 1)
