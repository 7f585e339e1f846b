"""Weights in groups of columns while one column of each group at a time is scaled: what that changes, and no more.

    change_g = sum over rows of  e' S_g e'^T - e S_g e^T          e = Q(w s) / s - w,   S_g = x_g^T x_g

In a row whose extremes stay, the codes of the other columns stay: with d = e'_j - e_j the change is
d (2 (e S)_j + d S_jj), one product with a column of S. In the few rows where column j is, was or becomes an extreme the
group is rounded anew. ScaledColumns lie one after the other in memory: [groups, size, rows].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, replace

import torch

from quark.dataclass import dataclass
from quark.errors import known
from quark.numerics.granularity import WHOLE, Group
from quark.torch.fake_quantize import FakeQuantize
from quark.torch.matching import Match
from quark.torch.stage import Stage

PROBES = 8  # columns of each group
Known = tuple[torch.Tensor, ...]  # what rounds a row: a value of each kind for each row


class RowRounding:
    """Rounds rows of one group by themselves, and columns of rows of which it is known what rounds them."""

    def known(self, rows: torch.Tensor) -> Known:
        """What rounds each of the rows [n, size]: a few values a row, [n]."""
        raise NotImplementedError

    def whole(self, rows: torch.Tensor, known: Known) -> torch.Tensor:
        """The rows [n, size] as they are rounded."""
        raise NotImplementedError

    def column(self, values: torch.Tensor, known: Known) -> torch.Tensor:
        """Values [groups, trials, rows] as they are rounded in their rows, whose extremes limit them."""
        raise NotImplementedError


@dataclass(frozen=True)
class RowsByExtremes(RowRounding):
    """Any function of a matrix; what is known of a row is its extremes, beside which a column is rounded.

    Attributes:
        rounded: a matrix as it will be quantized; each row of it, in groups of ``size`` columns, by itself.
    """

    rounded: Callable[[torch.Tensor], torch.Tensor]

    def known(self, rows: torch.Tensor) -> Known:
        """The extremes."""
        lowest, highest = torch.aminmax(rows, dim=1)
        return lowest, highest

    def whole(self, rows: torch.Tensor, known: Known) -> torch.Tensor:
        """The rows rounded."""
        return self.rounded(rows)

    def column(self, values: torch.Tensor, known: Known) -> torch.Tensor:
        """Values rounded beside the extremes."""
        lowest, highest = (bound[:, None] for bound in known)
        beside = torch.cat([lowest, highest, values.clamp(lowest, highest)], 1).mT
        return self.rounded(beside.reshape(-1, beside.shape[2])).reshape(beside.shape)[..., 2:].mT


@dataclass(frozen=True)
class RowsByScale(RowRounding):
    """A scale and a zero point a row, under which a column needs no other.

    Attributes:
        part: a quantizer with a scale for all that lies along axis 1: of rows [n, size], of columns [groups, 1, rows].
    """

    part: FakeQuantize

    def known(self, rows: torch.Tensor) -> Known:
        """Scales and zero points."""
        scale, zero = self.part.parameters_from(rows)
        return known(scale, "the scale of a row").flatten(), known(zero, "its zero point").flatten()

    def whole(self, rows: torch.Tensor, known: Known) -> torch.Tensor:
        """The rows rounded."""
        return self.column(rows, known)

    def column(self, values: torch.Tensor, known: Known) -> torch.Tensor:
        """Values rounded under the scales of their rows."""
        scale, zero = known
        return self.part.quantized_under(values, (scale, zero))


def rounding_of_rows(item: Match, rounded: Callable[[torch.Tensor], torch.Tensor]) -> RowRounding:
    """How rows of one group of a weight are rounded, which ``rounded`` does for any matrix."""
    (stage,) = item.stages["weight"]
    if stage.is_block or not stage.needs_range:
        return RowsByExtremes(rounded)
    stage = Stage(replace(stage.spec, granularity=Group(1, WHOLE)), stage.observer)
    return RowsByScale(FakeQuantize(stage, f"weight of {item.layer.name!r}", constant=True))


@dataclass(frozen=True)
class ColumnStep:
    """What new scales of one column change, each tried by itself.

    Attributes:
        offset: of the column in its group.
        change: of the loss, [groups, trials].
        scaled, error: the column, [groups, trials, rows].
        touched: rows of groups that are rounded anew, as three lists of places: group, trial, row.
        rows, errors: these, [touched, size].
        known: what rounds them.
    """

    offset: int
    change: torch.Tensor
    scaled: torch.Tensor
    error: torch.Tensor
    touched: tuple[torch.Tensor, ...]
    rows: torch.Tensor
    errors: torch.Tensor
    known: Known


@dataclass
class ScaledColumns:
    """A weight [groups, size, rows], and what becomes of it.

    Attributes:
        rounding: of rows of ``size`` columns.
        weight: as it is.
        scaled: times its scales.
        error: of the rounded one, without its scales.
        squares: x^T x of the inputs, [groups, size, size].
        lowest, highest: of ``scaled``, [groups, rows].
        known: what rounds each row of a group, [groups, rows].
    """

    rounding: RowRounding
    weight: torch.Tensor
    scaled: torch.Tensor
    error: torch.Tensor
    squares: torch.Tensor
    lowest: torch.Tensor = field(init=False)
    highest: torch.Tensor = field(init=False)
    known: Known = field(init=False)

    def __post_init__(self) -> None:
        self.weight, self.scaled, self.error = (x.contiguous() for x in (self.weight, self.scaled, self.error))
        self.lowest, self.highest = torch.aminmax(self.scaled, dim=1)
        self.known = self.of_rows(self.rounding.known(rows_in(self.scaled)))

    def of_rows(self, known: Known) -> Known:
        """What is known of rows that lie one after the other, [groups, rows]."""
        return tuple(value.reshape(self.lowest.shape) for value in known)

    def tried(self, scales: torch.Tensor, offset: int) -> ColumnStep:
        """What other scales [trials, groups, size] change, which differ from those before in the column ``offset``."""
        s, own = scales[:, :, offset].T[..., None], self.weight[:, offset, None]
        old, new, squares = self.scaled[:, offset, None], own * s, self.squares[:, offset, None]
        lowest, highest = self.lowest[:, None], self.highest[:, None]
        inside = (old > lowest) & (old < highest) & (new >= lowest) & (new <= highest)
        error = self.rounding.column(new, self.known) / divisor(s) - own
        moved = error - self.error[:, offset, None]
        pulled = torch.bmm(squares, self.error)
        change = (moved * (2 * pulled + moved * squares[:, :, offset, None]) * inside).sum(2)
        group, trial, row = touched = (~inside).nonzero(as_tuple=True)
        rows = self.scaled[group, :, row]
        if not len(group):
            return ColumnStep(offset, change, new, error, touched, rows, rows, ())
        rows[:, offset] = new[touched]
        known = self.rounding.known(rows)
        errors = self.rounding.whole(rows, known) / divisor(scales[trial, group]) - self.weight[group, :, row]
        change = change + self.changes(errors, touched, len(scales))
        return ColumnStep(offset, change, new, error, touched, rows, errors, known)

    def changes(self, errors: torch.Tensor, touched: tuple[torch.Tensor, ...], trials: int) -> torch.Tensor:
        """How the loss changes with other ``errors`` [n, size] of some rows of groups, [groups, trials]."""
        group, trial, row = touched  # groups rise
        counts = torch.bincount(group, minlength=len(self.squares))
        place = torch.arange(len(group), device=group.device) - (counts.cumsum(0) - counts)[group]
        before = self.error[group, :, row]
        moved, both = errors.new_zeros(2, len(counts), int(counts.max()), errors.shape[1])
        moved[group, place], both[group, place] = errors - before, errors + before
        found = (torch.bmm(moved, self.squares) * both).sum(2)[group, place]
        total = found.new_zeros(len(counts) * trials).index_add(0, group * trials + trial, found)
        return total.reshape(len(counts), trials)

    def take(self, tried: ColumnStep, best: torch.Tensor) -> None:
        """Keep the trial ``best`` [groups] of each group; where it is negative, none."""
        better = (best >= 0).nonzero()[:, 0]
        self.scaled[better, tried.offset] = tried.scaled[better, best[better]]
        self.error[better, tried.offset] = tried.error[better, best[better]]
        group, trial, row = tried.touched
        kept = best[group] == trial
        group, row = group[kept], row[kept]
        self.scaled[group, :, row], self.error[group, :, row] = tried.rows[kept], tried.errors[kept]
        self.lowest[group, row], self.highest[group, row] = torch.aminmax(tried.rows[kept], dim=-1)
        for values, found in zip(self.known, tried.known, strict=bool(tried.known)):
            values[group, row] = found[kept]


def rows_in(columns: torch.Tensor) -> torch.Tensor:
    """Columns [groups, size, rows] as rows [groups * rows, size]."""
    return columns.mT.reshape(-1, columns.shape[1])


def columns_alone(columns: ScaledColumns, scales: torch.Tensor) -> bool:
    """Whether rows are rounded as their extremes say and a value as in its row, which is tried out in some columns."""
    size = columns.scaled.shape[1]
    extremes = torch.stack([columns.lowest.flatten(), columns.highest.flatten()], 1)
    if not all(map(torch.equal, columns.of_rows(columns.rounding.known(extremes)), columns.known)):
        return False
    for offset in range(0, size, max(1, size // PROBES)):
        alone = columns.rounding.column(columns.scaled[:, offset, None], columns.known)[:, 0] / divisor(
            scales[:, offset, None]
        )
        if not torch.equal(alone - columns.weight[:, offset], columns.error[:, offset]):
            return False
    return True


def divisor(scales: torch.Tensor) -> torch.Tensor:
    """Scales, and 1 for the columns that only fill a group up."""
    return torch.where(scales > 0, scales, 1)
