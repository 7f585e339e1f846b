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

from collections.abc import Callable
from functools import partial

import torch

from quark.dataclass import dataclass
from quark.numerics.granularity import Group
from quark.torch.algorithms.column_steps import ScaledColumns, columns_alone, rounding_of_rows
from quark.torch.algorithms.context import new_quantizer
from quark.torch.algorithms.judge import ScaleJudge, row_by_row
from quark.torch.algorithms.scaling import Place
from quark.torch.algorithms.trial import quantize_new, quantized_matrix
from quark.torch.layers import own_parameter
from quark.torch.matching import Match

FACTORS = ((0.8, 1.25, 0.9, 1.1), (0.9, 1.1))  # each column takes the best, or none; then all take again
CHANNELS = 64  # of a group that are tried
ROWS = 256  # of quantized inputs
SMALLS = {"cpu": 1 << 20}  # values of a weight that is rounded together with others, by the kind of device
SMALL = 1 << 24  # on any other, where each call costs more than its arithmetic


def by_channel(place: Place, judge: ScaleJudge, s: torch.Tensor) -> torch.Tensor | None:
    """Better scales than ``s`` [channels] for the sum over groups; None where no groups have scales of their own.

    Args:
        place: whose scales; input channels that share a row of its source keep a common scale.
        judge: the layers, and inputs of them.
        s: to start from.
    """
    sizes = {columns_of(item) for item in judge.items}
    size = sizes.pop()
    if sizes or size is None or size >= len(s):
        return None
    groups = groups_of(judge.coarse, size)
    labels = alike(place, len(s), size, s.device)
    if labels is None:
        return None
    starts = torch.arange(0, len(s), size, device=s.device)
    try_steps = steps_of_columns(groups, s, labels) or steps_of_all(groups, s, labels)
    for factors in FACTORS:
        for offset in range(0, size, -(-size // CHANNELS)):
            here = (starts + offset)[starts + offset < len(s)]
            tried = s.repeat(len(factors), 1)
            tried[:, here] *= torch.tensor(factors, device=s.device)[:, None]
            best = spread(try_steps(tried, offset)[labels], size, len(s))
            s = torch.where(best < 0, s, tried.gather(0, best.clamp(min=0)[None])[0])
    return s


# scales [trials, channels], and which column of each group is new → the best trial of each label, -1: none is better
Steps = Callable[[torch.Tensor, int], torch.Tensor]


def steps_of_all(groups: Groups, s: torch.Tensor, labels: torch.Tensor) -> Steps:
    """Steps that round all weights and inputs anew."""
    lowest = groups.losses(s, labels)

    def step(tried: torch.Tensor, offset: int) -> torch.Tensor:
        nonlocal lowest
        least, best = torch.stack([groups.losses(scales, labels) for scales in tried]).min(0)
        before, lowest = lowest, torch.minimum(least, lowest)
        return torch.where(least < before, best, -1)

    return step


def steps_of_columns(groups: Groups, s: torch.Tensor, labels: torch.Tensor) -> Steps | None:
    """Steps that round what changes; None where inputs are quantized, or roundings depend on more than extremes."""
    if groups.stacks[0][0].stages["input_tensors"] or not all(row_by_row(items[0]) for items in groups.stacks):
        return None
    every = []
    for items, weight in zip(groups.stacks, groups.weights, strict=True):
        rounded = partial(quantized_matrix, items[0])
        error = rounded(weight * s) / s - weight
        own, scaled, lost = (in_groups(x, groups.size).mT for x in (weight, weight * s, error))
        columns = ScaledColumns(rounding_of_rows(items[0], rounded), own, scaled, lost, groups.squares)
        if not columns_alone(columns, in_groups(s[None], groups.size)[:, 0]):
            return None
        every.append(columns)

    def step(tried: torch.Tensor, offset: int) -> torch.Tensor:
        scales = in_groups(tried, groups.size).transpose(0, 1)
        made = [columns.tried(scales, offset) for columns in every]
        gained = torch.stack([one.change for one in made]).sum(0)
        least, best = torch.zeros_like(gained).index_add(0, labels, gained).min(1)
        best = torch.where(least < 0, best, -1)
        for columns, one in zip(every, made, strict=True):
            columns.take(one, best[labels])
        return best

    return step


def spread(groups: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """A value per group as one per channel."""
    return groups.repeat_interleave(size)[:count]


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
    stacks: list[list[Match]] = []
    for item in judge.items:
        same = [others for others in stacks if rounded_alike(item, others[0])]
        same[0].append(item) if same else stacks.append([item])
    weights = [torch.cat([judge.weight(item) for item in items]) for items in stacks]
    return Groups(stacks, weights, size, rows, inputs, torch.bmm(inputs.mT, inputs))


def rounded_alike(item: Match, other: Match) -> bool:
    """Whether rows of two small weights can be rounded together: in one stage, with scales of groups of one row."""
    one, two = item.stages["weight"], other.stages["weight"]
    values = [own_parameter(part.layer.module) for part in (item, other)]
    small = all(value.numel() <= SMALLS.get(value.device.type, SMALL) for value in values)
    return small and len(one) == 1 and one == two and item.layer.kind == other.layer.kind


def in_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, columns] as [groups, rows, size], padded with 0."""
    return Group(1, size).tile(x).reshape(len(x), -1, size).transpose(0, 1)
