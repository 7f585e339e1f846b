"""Weights in groups of columns while one column of each group at a time is scaled: what that changes, and no more.

    change_g = sum over rows of  e' S_g e'^T - e S_g e^T          e = Q(w s) / s - w,   S_g = x_g^T x_g

In a row whose extremes stay, the codes of the other columns stay: with d = e'_j - e_j the change is
d (2 (e S)_j + d S_jj), one product with a column of S. In the few rows where column j is, was or becomes an extreme the
group is rounded anew. ScaledColumns lie one after the other in memory: [groups, size, rows].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

import torch

from quark.dataclass import dataclass

PROBES = 8  # columns of each group


@dataclass(frozen=True)
class ColumnStep:
    """What new scales of one column change, each tried by itself.

    Attributes:
        offset: of the column in its group.
        change: of the loss, [groups, trials].
        scaled, error: the column, [groups, trials, rows].
        touched: rows of groups that are rounded anew, as three lists of places: group, trial, row.
        rows, errors: these, [touched, size].
    """

    offset: int
    change: torch.Tensor
    scaled: torch.Tensor
    error: torch.Tensor
    touched: tuple[torch.Tensor, ...]
    rows: torch.Tensor
    errors: torch.Tensor


@dataclass
class ScaledColumns:
    """A weight [groups, size, rows], and what becomes of it.

    Attributes:
        rounded: a matrix as it will be quantized; each row of it, in groups of ``size`` columns, by itself.
        weight: as it is.
        scaled: times its scales.
        error: of the rounded one, without its scales.
        squares: x^T x of the inputs, [groups, size, size].
        lowest, highest: of ``scaled``, [groups, rows].
    """

    rounded: Callable[[torch.Tensor], torch.Tensor]
    weight: torch.Tensor
    scaled: torch.Tensor
    error: torch.Tensor
    squares: torch.Tensor
    lowest: torch.Tensor = field(init=False)
    highest: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.weight, self.scaled, self.error = (x.contiguous() for x in (self.weight, self.scaled, self.error))
        self.lowest, self.highest = torch.aminmax(self.scaled, dim=1)

    def tried(self, scales: torch.Tensor, offset: int) -> ColumnStep:
        """What other scales [trials, groups, size] change, which differ from those before in the column ``offset``."""
        s, own = scales[:, :, offset].T[..., None], self.weight[:, offset, None]
        old, new, squares = self.scaled[:, offset, None], own * s, self.squares[:, offset, None]
        lowest, highest = self.lowest[:, None], self.highest[:, None]
        inside = (old > lowest) & (old < highest) & (new >= lowest) & (new <= highest)
        error = self.column(new) / divisor(s) - own
        moved = error - self.error[:, offset, None]
        pulled = torch.bmm(squares, self.error)
        change = (moved * (2 * pulled + moved * squares[:, :, offset, None]) * inside).sum(2)
        group, trial, row = touched = (~inside).nonzero(as_tuple=True)
        rows = self.scaled[group, :, row]
        if not len(group):
            return ColumnStep(offset, change, new, error, touched, rows, rows)
        rows[:, offset] = new[touched]
        errors = self.rounded(rows) / divisor(scales[trial, group]) - self.weight[group, :, row]
        change = change + self.changes(errors, touched, len(scales))
        return ColumnStep(offset, change, new, error, touched, rows, errors)

    def column(self, values: torch.Tensor) -> torch.Tensor:
        """Values [groups, trials, rows] as they are rounded beside the extremes of their rows, which limit them."""
        lowest, highest = self.lowest[:, None], self.highest[:, None]
        beside = torch.cat([lowest, highest, values.clamp(lowest, highest)], 1).mT
        return self.rounded(beside.reshape(-1, beside.shape[2])).reshape(beside.shape)[..., 2:].mT

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


def columns_alone(columns: ScaledColumns, scales: torch.Tensor) -> bool:
    """Whether a value beside the extremes of its row is rounded as it is in the row, tried out in some columns."""
    size = columns.scaled.shape[1]
    for offset in range(0, size, max(1, size // PROBES)):
        alone = columns.column(columns.scaled[:, offset, None])[:, 0] / divisor(scales[:, offset, None])
        if not torch.equal(alone - columns.weight[:, offset], columns.error[:, offset]):
            return False
    return True


def divisor(scales: torch.Tensor) -> torch.Tensor:
    """Scales, and 1 for the columns that only fill a group up."""
    return torch.where(scales > 0, scales, 1)
