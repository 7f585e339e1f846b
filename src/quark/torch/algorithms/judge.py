"""What quantized layers lose under scales per channel of what they read, which SmoothQuant and AWQ make small."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from quark.dataclass import dataclass
from quark.numerics.granularity import Group
from quark.torch.algorithms.context import new_quantizer
from quark.torch.algorithms.scaling import PlaceInputs
from quark.torch.algorithms.trial import quantize_new, quantized_matrix
from quark.torch.layers import own_parameter
from quark.torch.matching import Match

OUTPUTS = 256  # of a layer, by which candidates are told apart


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
        return self.error_under(torch.ones_like(self.rows[0]))

    def error(self, s: torch.Tensor | None = None) -> float:
        """The mean of |difference|**power, summed over the layers."""
        return self.unscaled if s is None else self.error_under(s)

    def error_under(self, s: torch.Tensor) -> float:
        """The error with scales, [channels]."""
        found, stages, x = 0.0, None, self.rows
        for number, item in enumerate(self.items):
            weight = self.weight(item)
            tuned = quantized_matrix(item, weight * s)
            if not item.stages["input_tensors"]:  # x (Q(w s) / s - w)^T, without the answer of the float layer
                found += mean_power(self.rows @ tuned.div_(s).sub_(weight).T, self.power)
                continue
            if item.stages["input_tensors"] != stages:
                stages = item.stages["input_tensors"]
                x = quantize_new(new_quantizer(item, "input_tensors"), self.rows / s)
            found += mean_power(torch.addmm(self.wanted[number], x, tuned.T, beta=-1), self.power)
        return found


def mean_power(x: torch.Tensor, power: float) -> float:
    """The mean of |x|**power, of a matrix that is not needed any more: row by row in float32, the rows in float64."""
    powers = x.square_() if power == 2 else x.abs_().pow_(power)
    return float(powers.sum(1).double().sum()) / x.numel()


def row_by_row(item: Match) -> bool:
    """Whether the rows of a weight [out, in] are rounded independently of each other."""
    stages = item.stages["weight"]
    axis = 0 if item.layer.kind.transposed else 1
    return len(stages) == 1 and isinstance(written := item.written(stages[0]), Group) and written.axis % 2 == axis


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
