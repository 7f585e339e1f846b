"""Weights in groups of columns while one column of each group at a time is scaled: what that changes, and no more.

    change_g = sum over rows of  e' S_g e'^T - e S_g e^T          e = Q(w s) / s - w,   S_g = x_g^T x_g

In a row whose extremes stay, the codes of the other columns stay: with d = e'_j - e_j the change is
d (2 (e S)_j + d S_jj), one product with a column of S. In the few rows where column j is, was or becomes an extreme the
group is rounded anew. ScaledColumns lie one after the other in memory: [groups, size, rows].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

PROBES = 8  # columns of each group


@dataclass(frozen=True)
class ColumnStep:
    """What a new scale of one column changes.

    Attributes:
        offset: of the column in its group.
        change: of the loss, [groups].
        scaled, error: the column, [groups, rows].
        touched: rows of groups that are rounded anew, as two lists of places.
        rows, errors: these, [touched, size].
    """

    offset: int
    change: torch.Tensor
    scaled: torch.Tensor
    error: torch.Tensor
    touched: tuple[torch.Tensor, torch.Tensor]
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
        """What other scales [groups, size] change, which differ from those before in the column ``offset`` alone."""
        s = scales[:, offset, None]
        old, new = self.scaled[:, offset], self.weight[:, offset] * s
        inside = (old > self.lowest) & (old < self.highest) & (new >= self.lowest) & (new <= self.highest)
        error = self.column(new) / divisor(s) - self.weight[:, offset]
        moved = error - self.error[:, offset]
        pulled = torch.bmm(self.squares[:, offset, None], self.error)[:, 0]
        change = (moved * (2 * pulled + moved * self.squares[:, offset, offset, None]) * inside).sum(1)
        group, row = (~inside).nonzero(as_tuple=True)
        touched = group, row
        rows = self.scaled[group, :, row]
        if not len(group):
            return ColumnStep(offset, change, new, error, touched, rows, rows)
        rows[:, offset] = new[touched]
        errors = self.rounded(rows) / divisor(scales[group]) - self.weight[group, :, row]
        return ColumnStep(offset, change + self.changes(errors, touched), new, error, touched, rows, errors)

    def column(self, values: torch.Tensor) -> torch.Tensor:
        """One value [groups, rows] of each row of a group as it is rounded beside the extremes of its row."""
        beside = torch.stack([self.lowest, self.highest, values], -1)
        return self.rounded(beside.reshape(-1, 3))[:, 2].reshape(values.shape)

    def changes(self, errors: torch.Tensor, touched: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """How the loss changes with other ``errors`` [n, size] of some rows of groups, [groups]; groups rise."""
        group, row = touched
        counts = torch.bincount(group, minlength=len(self.squares))
        place = torch.arange(len(group), device=group.device) - (counts.cumsum(0) - counts)[group]
        before = self.error[group, :, row]
        moved, both = errors.new_zeros(2, len(counts), int(counts.max()), errors.shape[1])
        moved[group, place], both[group, place] = errors - before, errors + before
        return (torch.bmm(moved, self.squares) * both).sum((1, 2))

    def take(self, tried: ColumnStep, better: torch.Tensor) -> None:
        """Keep a change in the groups where it is ``better`` [groups]."""
        self.scaled[better, tried.offset] = tried.scaled[better]
        self.error[better, tried.offset] = tried.error[better]
        kept = better[tried.touched[0]]
        group, row = (index[kept] for index in tried.touched)
        self.scaled[group, :, row], self.error[group, :, row] = tried.rows[kept], tried.errors[kept]
        self.lowest[group, row], self.highest[group, row] = torch.aminmax(tried.rows[kept], dim=-1)


def columns_alone(columns: ScaledColumns, scales: torch.Tensor) -> bool:
    """Whether a value beside the extremes of its row is rounded as it is in the row, tried out in some columns."""
    size = columns.scaled.shape[1]
    for offset in range(0, size, max(1, size // PROBES)):
        alone = columns.column(columns.scaled[:, offset]) / divisor(scales[:, offset, None])
        if not torch.equal(alone - columns.weight[:, offset], columns.error[:, offset]):
            return False
    return True


def divisor(scales: torch.Tensor) -> torch.Tensor:
    """Scales, and 1 for the columns that only fill a group up."""
    return torch.where(scales > 0, scales, 1)
