"""Weights in groups of columns while one column of each group at a time is scaled: what that changes, and no more.

    change_g = sum over rows of  e' S_g e'^T - e S_g e^T          e = Q(w s) / s - w,   S_g = x_g^T x_g

In a row whose extremes stay (where zero points are fixed: the larger one), the codes of the other columns stay: with
d = e'_j - e_j the change is d (2 (e S)_j + d S_jj). In the few rows where column j is, was or becomes an extreme the
group is rounded anew. e S is
found for a few columns ahead, and kept up to date by what each step changes.

Steps are many and their tensors small, so that they cost what asking for them costs: the groups of several weights are
worked on together, as rows [rows, size] one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import torch

from quark.dataclass import dataclass
from quark.torch.algorithms.rows import Known, RowRounding

PROBES = 8  # columns of each group
AHEAD = 16  # columns for which e S is found together


@dataclass(frozen=True)
class TouchedRows:
    """Rows that are rounded anew, each for one trial.

    Attributes:
        row, trial: which, [touched]; rows rise.
        scaled, error: the rows, [touched, size].
        lowest, highest: beyond which a value changes that, [touched].
        known: what rounds them.
        pulled: by how much e S changes, [touched, size].
    """

    row: torch.Tensor
    trial: torch.Tensor
    scaled: torch.Tensor
    error: torch.Tensor
    lowest: torch.Tensor
    highest: torch.Tensor
    known: Known
    pulled: torch.Tensor


@dataclass(frozen=True)
class ColumnStep:
    """What new scales of one column change, each tried by itself.

    Attributes:
        offset: of the column in its group.
        change: of the loss, [trials, groups].
        scaled, error: the column, [trials, rows].
        old: ``scaled`` and ``error`` as they are, [rows].
        touched: rows of which more than the column changes.
    """

    offset: int
    change: torch.Tensor
    scaled: torch.Tensor
    error: torch.Tensor
    old: tuple[torch.Tensor, torch.Tensor]
    touched: TouchedRows


@dataclass
class ScaledColumns:
    """Groups of columns of weights, their rows one after the other [rows, size], and what becomes of them.

    Attributes:
        rounding: of rows of ``size`` columns.
        weight: as it is.
        scaled: times its scales.
        error: of the rounded one, without its scales.
        squares: x^T x of the inputs, [groups, size, size].
        counts: how many rows each group has; those of one weight stand together.
        group: of each row, [rows].
        lowest, highest: beyond which a value changes what rounds its row, [rows].
        known: what rounds each row, [rows].
        ahead: columns of which e S is known; ``pulled``: that, [len(ahead), rows].
    """

    rounding: RowRounding
    weight: torch.Tensor
    scaled: torch.Tensor
    error: torch.Tensor
    squares: torch.Tensor
    counts: list[int]
    group: torch.Tensor = field(init=False)
    lowest: torch.Tensor = field(init=False)
    highest: torch.Tensor = field(init=False)
    known: Known = field(init=False)
    ahead: range = field(init=False, default=range(0))
    pulled: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        numbers = torch.arange(len(self.counts), device=self.weight.device)
        self.group = numbers.repeat_interleave(torch.tensor(self.counts, device=self.weight.device))
        self.lowest, self.highest = self.rounding.bounds(self.scaled)
        self.known = self.rounding.known(self.lowest, self.highest)

    def look_ahead(self, columns: range) -> None:
        """Find e S for these columns."""
        chosen = self.squares[:, :, columns.start : columns.stop : columns.step]
        found = [error @ square for error, square in zip(self.error.split(self.counts), chosen, strict=True)]
        self.ahead, self.pulled = columns, torch.cat(found).T.contiguous()

    def tried(self, scales: torch.Tensor, columns: range) -> ColumnStep:
        """What other scales change, which differ from those before in the first of ``columns``.

        Args:
            scales: [trials, groups, size].
            columns: those whose turn it is, in this order.
        """
        if not self.ahead or self.ahead != columns[: len(self.ahead)]:
            self.look_ahead(columns[:AHEAD])
        offset = columns.start
        s = scales[:, :, offset].index_select(1, self.group)
        own, old, before = (x[:, offset].contiguous() for x in (self.weight, self.scaled, self.error))
        new = own * s
        outside = (new < self.lowest) | (new > self.highest) | ((old <= self.lowest) | (old >= self.highest))
        error = self.rounding.column(new, self.known).div(s).sub_(own)
        moved, square = error - before, self.squares[:, offset, offset].index_select(0, self.group)
        change = (moved * (2 * self.pulled[0] + moved * square)).masked_fill_(outside, 0)
        row, trial = outside.T.nonzero(as_tuple=True)
        rows = self.scaled.index_select(0, row)
        rows[:, offset] = new[trial, row]
        touched = self.rounded_anew(rows, row, trial, scales)
        change = torch.stack([part.sum(1) for part in change.split(self.counts, 1)], 1)
        return ColumnStep(offset, change + self.changes(touched, len(scales)), new, error, (old, before), touched)

    def rounded_anew(
        self, rows: torch.Tensor, row: torch.Tensor, trial: torch.Tensor, scales: torch.Tensor
    ) -> TouchedRows:
        """Some rows with other scales."""
        (lowest, highest), group = self.rounding.bounds(rows), self.group.index_select(0, row)
        known = self.rounding.known(lowest, highest)
        error = self.rounding.whole(rows, known) / scales[trial, group] - self.weight.index_select(0, row)
        counts = torch.bincount(group, minlength=len(self.counts)).tolist()
        moved = (error - self.error.index_select(0, row)).split(counts)
        pulled = torch.cat([part @ square for part, square in zip(moved, self.squares, strict=True)])
        return TouchedRows(row, trial, rows, error, lowest, highest, known, pulled)

    def changes(self, touched: TouchedRows, trials: int) -> torch.Tensor:
        """How the loss changes with other errors of some rows, [trials, groups]."""
        both = touched.error + self.error.index_select(0, touched.row)
        place = touched.trial * len(self.counts) + self.group.index_select(0, touched.row)
        found = (touched.pulled * both).sum(1)
        return found.new_zeros(trials * len(self.counts)).index_add_(0, place, found).reshape(trials, -1)

    def take(self, tried: ColumnStep, best: torch.Tensor) -> None:
        """Keep the trial ``best`` [groups] of each group; where it is negative, none."""
        chosen, touched, offset = best.index_select(0, self.group), tried.touched, tried.offset
        none, number = chosen < 0, chosen.clamp(min=0)[None]
        old, before = tried.old
        error = torch.where(none, before, tried.error.gather(0, number)[0])
        self.scaled[:, offset] = torch.where(none, old, tried.scaled.gather(0, number)[0])
        self.error[:, offset] = error
        kept = (chosen.index_select(0, touched.row) == touched.trial).nonzero()[:, 0]
        row = touched.row.index_select(0, kept)
        self.pull(offset, (error - before).index_fill_(0, row, 0), row, touched.pulled.index_select(0, kept))
        mine = self.scaled, self.error, self.lowest, self.highest, *self.known
        theirs = touched.scaled, touched.error, touched.lowest, touched.highest, *touched.known
        for values, new in zip(mine, theirs, strict=True):
            values.index_copy_(0, row, new.index_select(0, kept))

    def pull(self, offset: int, moved: torch.Tensor, row: torch.Tensor, pulled: torch.Tensor) -> None:
        """Keep e S of the columns that come up to date.

        Args:
            offset: of the column that has changed.
            moved: by how much, [rows]; 0 in rows of which more has.
            row: these rows, [n].
            pulled: by how much their e S has changed, [n, size].
        """
        self.ahead = self.ahead[1:]
        self.pulled = self.pulled[1:]
        if not self.ahead:
            return
        later = slice(self.ahead.start, self.ahead.stop, self.ahead.step)
        parts = self.pulled.split(self.counts, 1), moved.split(self.counts), self.squares[:, offset, later]
        for part, change, square in zip(*parts, strict=True):
            part.addcmul_(square[:, None], change)
        self.pulled.index_add_(1, row, pulled[:, later].T)


def joined(parts: Sequence[ScaledColumns]) -> ScaledColumns:
    """Groups of several weights that are rounded alike, side by side."""
    first, *others = parts
    if not others:
        return first
    weight, scaled, error, squares = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("weight", "scaled", "error", "squares")
    )
    return ScaledColumns(first.rounding, weight, scaled, error, squares, [n for part in parts for n in part.counts])


def columns_alone(columns: ScaledColumns, scales: torch.Tensor) -> bool:
    """Whether rows are rounded as their extremes say and a value as in its row, which is tried out in some columns.

    Args:
        columns: the weights.
        scales: [groups, size].
    """
    size = columns.scaled.shape[1]
    for offset in range(0, size, max(1, size // PROBES)):
        s = scales[:, offset].index_select(0, columns.group)
        alone = columns.rounding.column(columns.scaled[None, :, offset], columns.known)[0] / s
        if not torch.equal(alone - columns.weight[:, offset], columns.error[:, offset]):
            return False
    return True
