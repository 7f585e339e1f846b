"""Weights in groups of columns while one column of each group at a time is scaled: what that changes, and no more.

    change_g = sum over rows of  e' S_g e'^T - e S_g e^T          e = Q(w s) / s - w,   S_g = x_g^T x_g

In a row whose extremes stay (where zero points are fixed: the larger one), the codes of the other columns stay: with
d = e'_j - e_j the change is d (2 (e S)_j + d S_jj). In the few rows where column j is, was or becomes an extreme the
group is rounded anew. e S is
found for a few columns ahead, and kept up to date by what each step changes; these columns lie in memory one by one.

Steps are many and their tensors small, so that they cost what asking for them costs: the groups of several weights are
worked on together, as rows [rows, size] one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from itertools import groupby

import torch

from quark.dataclass import dataclass
from quark.torch.algorithms.rows import Known, RowRounding

PROBES = 8  # columns of each group
AHEAD = 16  # columns that are taken out together


@dataclass(frozen=True)
class TouchedRows:
    """Rows that are rounded anew, each for one trial.

    Attributes:
        row, trial: which, [touched]; rows rise.
        place: of trial and group of a row among [trials, groups].
        scaled, error: the rows, [touched, size].
        lowest, highest: beyond which a value changes that, [touched].
        known: what rounds them.
        pulled: by how much e S changes, [touched, size].
        change: of the loss, [touched].
    """

    row: torch.Tensor
    trial: torch.Tensor
    place: torch.Tensor
    scaled: torch.Tensor
    error: torch.Tensor
    lowest: torch.Tensor
    highest: torch.Tensor
    known: Known
    pulled: torch.Tensor
    change: torch.Tensor


@dataclass(frozen=True)
class ColumnStep:
    """What new scales of one column change, each tried by itself.

    Attributes:
        change: of the loss, [trials, groups].
        scaled, error: the column, [trials, rows].
        touched: rows of which more than the column changes.
    """

    change: torch.Tensor
    scaled: torch.Tensor
    error: torch.Tensor
    touched: TouchedRows


@dataclass
class ColumnWindow:
    """Columns that come up next, each in one piece of memory; the matrices [rows, size] are behind them.

    Attributes:
        columns: which.
        weight, scaled, error: of these, [columns, rows].
        pulled: e S of these, [columns, rows].
        turn: the place of the next one.
    """

    columns: range
    weight: torch.Tensor
    scaled: torch.Tensor
    error: torch.Tensor
    pulled: torch.Tensor
    turn: int = 0

    @property
    def where(self) -> slice:
        """The columns as an index."""
        return slice(self.columns.start, self.columns.stop, self.columns.step)

    def comes(self, offset: int) -> bool:
        """Whether a column is the next one."""
        return self.turn < len(self.columns) and self.columns[self.turn] == offset

    def rows(self, matrix: torch.Tensor, columns: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Some rows [n, size] of a matrix, with ``columns`` of all rows in it."""
        found = matrix.index_select(0, row)
        found[:, self.where] = columns.index_select(1, row).T
        return found


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
        runs: neighbouring groups with as many rows: how many groups, and how many rows each has.
        group: of each row, [rows].
        lowest, highest: beyond which a value changes what rounds its row, [rows].
        known: what rounds each row, [rows].
        window: what ``scaled`` and ``error`` are in the columns that come next.
    """

    rounding: RowRounding
    weight: torch.Tensor
    scaled: torch.Tensor
    error: torch.Tensor
    squares: torch.Tensor
    counts: list[int]
    runs: list[tuple[int, int]] = field(init=False)
    group: torch.Tensor = field(init=False)
    lowest: torch.Tensor = field(init=False)
    highest: torch.Tensor = field(init=False)
    known: Known = field(init=False)
    window: ColumnWindow = field(init=False)

    def __post_init__(self) -> None:
        numbers = torch.arange(len(self.counts), device=self.weight.device)
        self.runs = [(len(list(same)), count) for count, same in groupby(self.counts)]
        self.group = numbers.repeat_interleave(torch.tensor(self.counts, device=self.weight.device))
        self.lowest, self.highest = self.rounding.bounds(self.scaled)
        self.known = self.rounding.known(self.lowest, self.highest)
        self.window = self.at(range(0))

    def in_runs(self, x: torch.Tensor, axis: int) -> Iterator[torch.Tensor]:
        """Parts of [.., rows, ..] as [.., groups, rows of each, ..]."""
        parts = x.split([groups * count for groups, count in self.runs], axis)
        return (part.unflatten(axis, run) for part, run in zip(parts, self.runs, strict=True))

    def at(self, columns: range) -> ColumnWindow:
        """A window at these columns."""
        where = slice(columns.start, columns.stop, columns.step)
        squares = self.squares[:, where].split([groups for groups, _ in self.runs])
        found = (square @ error.mT for square, error in zip(squares, self.in_runs(self.error, 0), strict=True))
        pulled = torch.cat([part.transpose(0, 1).flatten(1) for part in found], 1)
        weight, scaled, error = (  # in two copies, which take a third of the time of one
            x[:, where].contiguous().T.contiguous() for x in (self.weight, self.scaled, self.error)
        )
        return ColumnWindow(columns, weight, scaled, error, pulled)

    def look_ahead(self, columns: range) -> None:
        """Move the window to these columns."""
        window = self.window
        self.scaled[:, window.where], self.error[:, window.where] = window.scaled.T, window.error.T
        self.window = self.at(columns)

    def tried(self, scales: torch.Tensor, columns: range) -> ColumnStep:
        """What other scales change, which differ from those before in the first of ``columns``.

        Args:
            scales: [trials, groups, size].
            columns: those whose turn it is, in this order.
        """
        offset = columns.start
        if not self.window.comes(offset):
            self.look_ahead(columns[:AHEAD])
        window, turn = self.window, self.window.turn
        own, old, before = window.weight[turn], window.scaled[turn], window.error[turn]
        s = scales[:, :, offset].index_select(1, self.group)
        new = own * s
        outside = (new < self.lowest) | (new > self.highest) | ((old <= self.lowest) | (old >= self.highest))
        error = self.rounding.column(new, self.known).div_(s).sub_(own)
        moved, square = error - before, self.squares[:, offset, offset].index_select(0, self.group)
        change = (moved * (2 * window.pulled[turn] + moved * square)).masked_fill_(outside, 0)
        row, trial = outside.T.nonzero(as_tuple=True)
        rows = window.rows(self.scaled, window.scaled, row)
        rows[:, offset] = new[trial, row]
        touched = self.rounded_anew(rows, row, trial, scales)
        change = torch.cat([part.sum(2) for part in self.in_runs(change, 1)], 1)
        change += self.changes(touched, len(scales))
        return ColumnStep(change, new, error, touched)

    def rounded_anew(
        self, rows: torch.Tensor, row: torch.Tensor, trial: torch.Tensor, scales: torch.Tensor
    ) -> TouchedRows:
        """Some rows with other scales."""
        (lowest, highest), group = self.rounding.bounds(rows), self.group.index_select(0, row)
        known, place = self.rounding.known(lowest, highest), trial * len(self.counts) + group
        s = scales.flatten(0, 1).index_select(0, place)
        error = self.rounding.whole(rows, known).div_(s).sub_(self.weight.index_select(0, row))
        before = self.window.rows(self.error, self.window.error, row)
        moved = (error - before).split(torch.bincount(group, minlength=len(self.counts)).tolist())
        pulled = torch.cat([part @ square for part, square in zip(moved, self.squares, strict=True)])
        change = (pulled * before.add_(error)).sum(1)
        return TouchedRows(row, trial, place, rows, error, lowest, highest, known, pulled, change)

    def changes(self, touched: TouchedRows, trials: int) -> torch.Tensor:
        """How the loss changes with other errors of some rows, [trials, groups]."""
        none = touched.change.new_zeros(trials * len(self.counts))
        return none.index_add_(0, touched.place, touched.change).reshape(trials, -1)

    def take(self, tried: ColumnStep, best: torch.Tensor) -> None:
        """Keep the trial ``best`` [groups] of each group; where it is negative, none."""
        chosen, touched, window, turn = best.index_select(0, self.group), tried.touched, self.window, self.window.turn
        none, number = chosen < 0, chosen.clamp(min=0)[None]
        before = window.error[turn]
        error = torch.where(none, before, tried.error.gather(0, number)[0])
        moved = error - before
        window.scaled[turn] = torch.where(none, window.scaled[turn], tried.scaled.gather(0, number)[0])
        window.error[turn] = error
        kept = (chosen.index_select(0, touched.row) == touched.trial).nonzero()[:, 0]
        row = touched.row.index_select(0, kept)
        mine = self.scaled, self.error, self.lowest, self.highest, *self.known
        theirs = touched.scaled, touched.error, touched.lowest, touched.highest, *touched.known
        theirs = tuple(values.index_select(0, kept) for values in theirs)
        for values, new in zip(mine, theirs, strict=True):
            values.index_copy_(0, row, new)
        for values, new in zip((window.scaled, window.error), theirs, strict=False):
            values.index_copy_(1, row, new[:, window.where].T)
        self.pull(moved.index_fill_(0, row, 0), row, touched.pulled.index_select(0, kept))

    def pull(self, moved: torch.Tensor, row: torch.Tensor, pulled: torch.Tensor) -> None:
        """Go on to the next column, and keep e S of those that come.

        Args:
            moved: by how much the errors of this column have changed, [rows]; 0 in rows of which more has.
            row: these rows, [n].
            pulled: by how much their e S has changed, [n, size].
        """
        window, offset = self.window, self.window.columns[self.window.turn]
        window.turn += 1
        later = window.pulled[window.turn :]
        if not len(later):
            return
        squares = self.squares[:, offset, window.where].T[window.turn :, :, None]
        runs = self.in_runs(later, 1), self.in_runs(moved, 0), squares.split([groups for groups, _ in self.runs], 1)
        for part, change, square in zip(*runs, strict=True):
            part.addcmul_(square, change)
        later.index_add_(1, row, pulled[:, window.where].T[window.turn :])


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
