"""How rows that have scales of their own are rounded: all of a row, and columns beside what is known of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from quark.dataclass import dataclass
from quark.errors import known
from quark.numerics.affine import Coding
from quark.numerics.elements import Element
from quark.numerics.granularity import Group, Tensor
from quark.torch.fake_quantize import FakeQuantize
from quark.torch.matching import Match
from quark.torch.observer import refuses_infinity, row_extremes
from quark.torch.stage import Stage

PIECES = {"cpu": 1 << 17}  # values that are rounded together, by the kind of device: temporaries stay in the cache
PIECE = 1 << 24
Known = tuple[torch.Tensor, ...]  # what rounds a row: a value of each kind for each row


class RowRounding:
    """Rounds rows of one group by themselves, and columns of rows of which it is known what rounds them."""

    def bounds(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest and the highest value for which what rounds the rows [n, size] stays as it is, [n]."""
        return row_extremes(rows)

    def known(self, lowest: torch.Tensor, highest: torch.Tensor) -> Known:
        """What rounds rows with these bounds [n]: a few values a row, [n]."""
        raise NotImplementedError

    def whole(self, rows: torch.Tensor, known: Known) -> torch.Tensor:
        """The rows [n, size] as they are rounded."""
        raise NotImplementedError

    def column(self, values: torch.Tensor, known: Known) -> torch.Tensor:
        """Values [trials, rows] as they are rounded in their rows, whose extremes limit them."""
        raise NotImplementedError


@dataclass(frozen=True)
class RowsByExtremes(RowRounding):
    """Any function of a matrix; what is known of a row is its extremes, beside which a column is rounded.

    Attributes:
        rounded: a matrix as it will be quantized; each row of it, in groups of ``size`` columns, by itself.
    """

    rounded: Callable[[torch.Tensor], torch.Tensor]

    def known(self, lowest: torch.Tensor, highest: torch.Tensor) -> Known:
        """The extremes."""
        return lowest, highest

    def whole(self, rows: torch.Tensor, known: Known) -> torch.Tensor:
        """The rows rounded."""
        return self.rounded(rows)

    def column(self, values: torch.Tensor, known: Known) -> torch.Tensor:
        """Values rounded beside the extremes."""
        return self.rounded(torch.stack([*known, *values.clamp(*known)], 1))[:, 2:].T


@dataclass(frozen=True)
class RowsByScale(RowRounding):
    """A scale and a zero point a row, which follow from the extremes, and under which a column needs no other.

    Attributes:
        stage: of the weight.
    """

    stage: Stage

    @cached_property
    def part(self) -> FakeQuantize:
        """What knows how ranges become parameters."""
        return FakeQuantize(self.stage, "rows of a weight", constant=True)

    @cached_property
    def coding(self) -> Coding:
        """How values are rounded under them."""
        spec = self.stage.spec
        return Coding(self.stage.format, Tensor(), spec.rounding, spec.narrow_codes, self.stage.grid.scale_rule)

    def bounds(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The extremes; to both sides of 0, where the larger one says all."""
        lowest, highest = row_extremes(rows)
        if not self.stage.grid.centred:
            return lowest, highest
        widest = torch.maximum(-lowest, highest)
        return -widest, widest

    def known(self, lowest: torch.Tensor, highest: torch.Tensor) -> Known:
        """Scales, and zero points where they are not all the same."""
        found = (known(value, "a row's") for value in self.part.parameters_of(lowest, highest))
        return tuple(found)[: 1 if self.stage.grid.centred else 2]

    def whole(self, rows: torch.Tensor, known: Known) -> torch.Tensor:
        """The rows rounded."""
        return self.column(rows, tuple(x[:, None] for x in known))

    def matrix(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Rows [n, size] of one scale each, rounded; None: one of them is not finite."""
        lowest, highest = row_extremes(rows)
        if not bool(torch.isfinite(lowest).all() & torch.isfinite(highest).all()):
            return None
        parameters, made = self.known(lowest, highest), torch.empty_like(rows)
        step = max(1, PIECES.get(rows.device.type, PIECE) // rows.shape[1])
        for k in range(0, len(rows), step):
            made[k : k + step] = self.whole(rows[k : k + step], tuple(x[k : k + step] for x in parameters))
        return made

    def limited(self, rows: Any, limit: Any) -> torch.Tensor:
        """Rows [n, size] limited to at most their largest magnitude, [n, 1], rounded."""
        lowest, highest = (
            (-limit, limit)
            if self.stage.grid.centred
            else (bound[:, None].clamp(-limit, limit) for bound in row_extremes(rows))
        )
        values = torch.minimum(torch.maximum(rows, -limit), limit)
        return self.whole(values, self.known(lowest[:, 0], highest[:, 0]))

    def column(self, values: torch.Tensor, known: Known) -> torch.Tensor:
        """Values rounded under the scales of their rows."""
        scale, *zero = known
        return self.coding.beside(values, scale, zero[0] if zero else self.stage.format.middle)


def finds_infinity(stage: Stage) -> bool:
    """Whether finding the range of a stage raises for values that are not finite: it is that of the extremes."""
    return stage.needs_range and refuses_infinity(stage.observer)


def by_scale(item: Match) -> RowsByScale | None:
    """How rows of one group of a weight are rounded, where a scale of their own says all; None: it does not."""
    stage, *more = item.stages["weight"]
    if more or stage.real_zero or not isinstance(stage.format, Element) or not finds_infinity(stage):
        return None
    rounding = RowsByScale(stage)
    return rounding if rounding.coding.alone else None


def group_of_row(item: Match) -> int | None:
    """Columns of a weight [out, in] that share a scale in a row; None: rows are not rounded by themselves."""
    stages = item.stages["weight"]
    axis = 0 if item.layer.kind.transposed else 1
    written = item.written(stages[0])
    return written.size if len(stages) == 1 and isinstance(written, Group) and written.axis % 2 == axis else None
