"""What quantized layers lose under scales per channel of what they read, which SmoothQuant and AWQ make small."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from quark.dataclass import dataclass
from quark.torch.algorithms.context import new_quantizer
from quark.torch.algorithms.rows import group_of_row
from quark.torch.algorithms.scaling import PlaceInputs
from quark.torch.algorithms.trial import error_of, quantize_new, quantized_matrix
from quark.torch.layers import own_parameter
from quark.torch.matching import Match

OUTPUTS = 256  # of a layer, by which candidates are told apart
SMALLS = {"cpu": 1 << 20}  # values of a weight that is rounded together with others, by the kind of device
SMALL = 1 << 24  # on any other, where each call costs more than its arithmetic
STEP = 128  # rows of a triangular root that are multiplied at once


@dataclass(frozen=True)
class ScaleJudge:
    """Says how far the outputs of quantized layers are from those of the float ones, under a scale per channel.

    Attributes:
        items: the layers.
        rows: inputs of all of them, [n, channels].
        power: of the differences that are averaged: 2 (mean squared), 1 (mean absolute), 0.5.
        outputs: of each layer that are looked at, evenly spread, at most; None: all.
        others: looked at are those half way between.
    """

    items: list[Match]
    rows: torch.Tensor
    power: float = 2.0
    outputs: int | None = None
    others: bool = False

    @cached_property
    def coarse(self) -> ScaleJudge:
        """A judge that looks at some outputs: what tells many candidates apart; the best one is for a full judge."""
        return self if self.full(OUTPUTS) else replace(self, outputs=OUTPUTS)

    @cached_property
    def apart(self) -> ScaleJudge:
        """A judge that looks at as many other outputs, which had no part in what was found with some; or at all."""
        return self if self.full(OUTPUTS) else replace(self, outputs=OUTPUTS, others=True)

    def full(self, outputs: int) -> bool:
        """Whether so many outputs are all, or scales depend on outputs that would be left out."""
        sizes = [own_parameter(item.layer.module).numel() // self.rows.shape[-1] for item in self.items]
        return max(sizes) <= outputs or not all(row_by_row(item) for item in self.items)

    def weight(self, item: Match) -> torch.Tensor:
        """The weight of a layer [out, in], float32, as far as it is looked at."""
        stored = own_parameter(item.layer.module).detach()
        return some_rows(stored.T if item.layer.kind.transposed else stored, self.outputs, self.others).float()

    @cached_property
    def wanted(self) -> list[torch.Tensor]:
        """What each float layer answers, [n, out]."""
        return [self.rows @ self.weight(item).T for item in self.items]

    @cached_property
    def unscaled(self) -> float:
        """The error without scales."""
        return self.errors([torch.ones_like(self.rows[0])])[0]

    def error(self, s: torch.Tensor | None = None) -> float:
        """The mean of |difference|**power, summed over the layers; with scales, [channels]."""
        return self.unscaled if s is None else self.errors([s])[0]

    def errors(self, scales: Sequence[torch.Tensor]) -> list[float]:
        """``error`` with each of some scales."""
        if not scales:
            return []
        by_inputs = defaultdict[Any, list[Match]](list)
        for item in self.items:
            by_inputs[item.stages["input_tensors"]].append(item)
        plain = stacks_of(by_inputs.pop((), []))
        parts = [self.rounded(items, scales) for items in plain]
        parts += [self.read_anew(items, scales) for items in by_inputs.values()]
        return [sum(each) for each in zip(*parts, strict=True)]

    def read_anew(self, items: list[Match], scales: Sequence[torch.Tensor]) -> Iterator[float]:
        """The error of layers whose inputs are quantized alike."""
        for s in scales:
            x, error = quantize_new(new_quantizer(items[0], "input_tensors"), self.rows / s), 0.0
            for item in items:
                tuned = quantized_matrix(item, self.weight(item) * s)
                wanted = self.wanted[self.items.index(item)]
                error += mean_power(torch.addmm(wanted, x, tuned.T, beta=-1), self.power)
            yield error

    def rounded(self, items: list[Match], scales: Sequence[torch.Tensor]) -> Iterator[float]:
        """The error of layers rounded as one, of which only the weights are quantized: x (Q(w s) / s - w)^T."""
        weights, error = [self.weight(item) for item in items], error_of(items[0])
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        powers = torch.stack([self.powers(error(weight, s)) for s in scales])
        parts = powers.split([len(own) for own in weights], 1)
        yield from sum(part.sum(1) / (part.shape[1] * len(self.rows)) for part in parts).tolist()

    def powers(self, error: torch.Tensor) -> torch.Tensor:
        """The sums of |x e|**power of each row of errors [out, channels], float64."""
        return torch.stack([row_powers(error[:, first:] @ rows.T, self.power) for first, rows in self.steps]).sum(0)

    @cached_property
    def steps(self) -> list[tuple[int, torch.Tensor]]:
        """The inputs in parts, [n, channels from the first on], without the channels that are 0 in all: of roots."""
        rows = self.rows
        if rows.shape[0] != rows.shape[1] or bool(rows.tril(-1).any()):
            return [(0, rows)]
        return [(k, rows[k : k + STEP, k:]) for k in range(0, len(rows), STEP)]


def row_powers(x: torch.Tensor, power: float) -> torch.Tensor:
    """The sums of |x|**power of each row of a matrix that is not needed any more, in float32; as float64."""
    powers = x.square_() if power == 2 else x.abs_().pow_(power)
    return powers.sum(1).double()


def mean_power(x: torch.Tensor, power: float) -> float:
    """The mean of |x|**power, of a matrix that is not needed any more."""
    return float(row_powers(x, power).sum()) / x.numel()


def stacks_of(items: Iterable[Match]) -> list[list[Match]]:
    """Layers in stacks: small ones whose rows can be rounded together are in one."""
    stacks: list[list[Match]] = []
    for item in items:
        same = [others for others in stacks if rounded_alike(item, others[0])]
        same[0].append(item) if same else stacks.append([item])
    return stacks


def rounded_alike(item: Match, other: Match) -> bool:
    """Whether rows of two small weights can be rounded together: in one stage, with scales of groups of one row."""
    one, two = item.stages, other.stages
    values = [own_parameter(part.layer.module) for part in (item, other)]
    small = all(value.numel() <= SMALLS.get(value.device.type, SMALL) for value in values)
    alike = one["weight"] == two["weight"] and item.layer.kind == other.layer.kind
    return small and alike and row_by_row(item) and row_by_row(other)


def row_by_row(item: Match) -> bool:
    """Whether the rows of a weight [out, in] are rounded independently of each other."""
    return group_of_row(item) is not None


def some_rows(weight: torch.Tensor, most: int | None, others: bool = False) -> torch.Tensor:
    """At most so many rows, evenly spread; or the ``others`` half way between."""
    if most is None:
        return weight
    step = -(-len(weight) // most)
    return weight[step // 2 if others else 0 :: step]


def judge_of(items: list[Match], inputs: PlaceInputs, power: float = 2.0) -> ScaleJudge:
    """A judge of what was read at a place: of all rows, where sums of squares tell and are fewer; of those kept."""
    telling = power == 2 and inputs.hessian is not None and not any(item.stages["input_tensors"] for item in items)
    few = telling and len(inputs.amax) < sum(len(rows) for rows in inputs.rows)
    return ScaleJudge(items, inputs.root if few else inputs.sample, power)
