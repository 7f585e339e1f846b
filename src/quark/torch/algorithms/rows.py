"""How rows that have scales of their own are rounded: all of a row, and columns beside what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch

from quark.dataclass import dataclass
from quark.errors import DataError, known
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
        lowest, highest = rows.amin(-1), rows.amax(-1)
        if not self.stage.grid.centred:
            return lowest, highest
        widest = torch.maximum(-lowest, highest)
        return -widest, widest

    def known(self, lowest: torch.Tensor, highest: torch.Tensor) -> Known:
        """Scales, and zero points where they are not all the same.

        Raises:
            DataError: a bound is NaN or infinite.
        """
        if self.stage.grid.centred and highest.numel():
            return (torch.as_tensor(self.stage.grid.scales(in_double(highest))).to(highest.device),)
        found = (known(value, "a row's") for value in self.part.parameters_of(lowest, highest))
        return tuple(found)[: 1 if self.stage.grid.centred else 2]

    def whole(self, rows: torch.Tensor, known: Known) -> torch.Tensor:
        """The rows rounded."""
        return self.column(rows, tuple(x[:, None] for x in known))

    def matrix(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Rows [n, size] of one scale each, rounded; None: one of them is not finite."""
        made = torch.empty_like(rows)
        with suppress(DataError):
            for part, own in zip(pieces(rows), pieces(made), strict=True):
                self.put(part, self.known(*self.bounds(part)), own)
            return made
        return None

    def error(self, weight: torch.Tensor, s: torch.Tensor, size: int) -> torch.Tensor | None:
        """Q(w s) / s - w of rows of groups [n, channels] under scales [channels]; None: a value is not finite."""
        made = weight.new_empty(weight.shape)  # row by row, as a transposed weight is not
        with suppress(DataError):
            for part, own in zip(pieces(weight), pieces(made), strict=True):
                torch.mul(part, s, out=own)
                groups = own.view(-1, size)
                self.put(groups, self.known(*self.bounds(groups)), groups)
                own.div_(s).sub_(part)
            return made
        return None

    def put(self, rows: torch.Tensor, known: Known, out: torch.Tensor) -> None:
        """Rows [n, size] rounded into ``out``, which may be themselves."""
        scale, *zero = (x[:, None] for x in known)
        self.coding.beside(rows, scale, zero[0] if zero else self.stage.format.middle, out)

    def limited(self, rows: Any, limits: Any) -> Iterator[torch.Tensor]:
        """Rows [n, size] limited to at most their largest magnitudes, each of [limits, n, 1], rounded."""
        lowest, highest = (
            (-limits, limits)
            if self.stage.grid.centred
            else (bound[:, None].clamp(-limits, limits) for bound in row_extremes(rows))
        )
        known = self.known(lowest[..., 0], highest[..., 0])
        for k, limit in enumerate(limits):
            values = torch.maximum(rows, -limit)
            torch.minimum(values, limit, out=values)
            self.put(values, tuple(x[k] for x in known), values)
            yield values

    def column(self, values: torch.Tensor, known: Known) -> torch.Tensor:
        """Values rounded under the scales of their rows."""
        scale, *zero = known
        return self.coding.beside(values, scale, zero[0] if zero else self.stage.format.middle)


def in_double(bound: torch.Tensor) -> torch.Tensor:
    """A bound for arithmetic in float64: where it is, or on the CPU where its device lacks the type."""
    return bound.double() if bound.device.type in ("cpu", "cuda") else bound.cpu().double()


def pieces(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Some rows after others, as many as the cache holds with what becomes of them."""
    return rows.split(max(1, PIECES.get(rows.device.type, PIECE) // rows.shape[1]))


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
