"""GPTQ: round a matrix column by column, and let every later column make up for the errors of the earlier ones.

    minimize  |(W - Q) X|^2 = tr (W - Q) H (W - Q)^T,   H = X X^T   over Q on the grid

With H = R R^T (R upper triangular) the loss is |(W - Q) R|^2, whose column j is (w_j - q_j) R_jj + sum_{i<j} e_i R_ij
with e_i = w_i - q_i. Each column in turn makes its own term least:

    q_j = round( w_j + sum_{i<j} e_i R_ij / R_jj )

These are the values of GPTQ (Frantar et al. 2022), which writes the same feedback with the Cholesky factor of H^-1; the
form with the factor of H itself is LDLQ (Chee et al., "QuIP", 2023). It needs one factorization and no inverse, and the
feedback of all finished columns on the next block is one matrix product.

``drift`` adds the asymmetric term of GPTAQ (see ``gptaq.py``). Not handled: scales that change while columns are
rounded, but for groups that are refitted when their turn comes (``refit``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from quark.algorithms.columns import Columns, contiguous
from quark.errors import ConfigError, DataError
from quark.numerics.array import Array, as_parameter, float32, is_torch, namespace
from quark.numerics.chunks import quiet

STRIP = 8  # columns whose feedback on each other is added one at a time
ATTEMPTS = 5  # of a factorization, each with ten times the damping of the one before
Refit = Callable[[Array, int, int], Columns]


def gptq(
    weight: Array,
    hessian: Array,
    grid: Columns,
    block_size: int = 128,
    damping: float = 0.01,
    act_order: bool = True,
    drift: Array | None = None,
    refit: Refit | None = None,
) -> Array:
    """The matrix on the grid with (nearly) the least output error.

    Args:
        weight: [rows, columns]; float, NumPy or torch. A column is what one input feature is multiplied by.
        hessian: [columns, columns], sum or mean of x x^T over the inputs. Inputs that were always 0 leave their columns
            rounded to nearest.
        grid: of the weight.
        block_size: columns between two matrix products; of no influence on the result but for ``refit``.
        damping: this part of the mean of the diagonal is added to it.
        act_order: begin with the columns of the largest inputs (the grid stays that of the given order).
        drift: [columns, columns], strictly upper triangular in the order of rounding; see ``gptaq``. None: none.
        refit: (weights [rows, n] as corrected so far, start, stop) -> grid of these columns, asked before each block
            of ``block_size``; not with ``act_order``.

    Returns:
        float32 [rows, columns], values on the grid (``grid.codes`` gives their codes).

    Raises:
        ConfigError: ``refit`` with ``act_order``, a block size below 1, a negative damping.
        DataError: shapes that do not fit, a hessian that is not finite.
    """
    check(weight, hessian, block_size, damping, act_order, refit)
    return round_columns(weight, feedback_of(hessian, damping, act_order), grid, block_size, drift, refit)


class Feedback(NamedTuple):
    """What errors do to later columns; the same for all layers that read one input."""

    order: Array  # of rounding
    matrix: Array  # [columns, columns], upper triangular in that order, diagonal 1


def feedback_of(hessian: Array, damping: float = 0.01, act_order: bool = True) -> Feedback:
    """The feedback under a Hessian; arguments and errors of ``gptq``."""
    order = ordering(hessian, act_order)
    factor = upper_factor(hessian[order][:, order], damping)
    return Feedback(order, factor / namespace(factor).diagonal(factor))


def round_columns(
    weight: Array,
    feedback: Feedback,
    grid: Columns,
    block_size: int = 128,
    drift: Array | None = None,
    refit: Refit | None = None,
) -> Array:
    """``gptq`` with the feedback at hand."""
    columns = contiguous(float32(weight).T[feedback.order])
    rounded = diffuse(columns, feedback.matrix, grid.transposed.rows(feedback.order), block_size, drift, refit)
    out = namespace(rounded).empty_like(rounded)
    out[feedback.order] = rounded
    return contiguous(out.T)


def diffuse(
    columns: Array,
    feedback: Array,
    grid: Columns,
    block_size: int,
    drift: Array | None = None,
    refit: Refit | None = None,
) -> Array:
    """``columns`` [n, rows] rounded in order, errors fed back by the upper triangular ``feedback`` (diagonal 1).

    Args:
        columns, feedback: in the order of rounding.
        grid: of ``columns``.
        block_size, drift, refit: as in ``gptq``.
    """
    xp = namespace(columns)
    work = Work(feedback, drift, xp.zeros_like(columns), xp.zeros_like(columns), xp.empty_like(columns))
    with quiet():
        for start, stop in spans(0, columns.shape[0], block_size):
            wanted = columns[start:stop]
            if drift is not None:
                wanted = wanted + drift[:start, start:stop].T @ work.seen[:start]
            pull = feedback[:start, start:stop].T @ work.errors[:start]
            if refit is not None:
                moved = wanted + solve_unit_upper(feedback[start:stop, start:stop], pull)
                grid = place(grid, refit(contiguous(moved.T), start, stop).transposed, start, stop)
            round_block(work, grid, start, wanted, pull)
    return work.rounded


class Work(NamedTuple):
    """What rounding reads and fills, each [n, ..] in the order of rounding."""

    feedback: Array
    drift: Array | None
    errors: Array  # wanted - rounded, of finished columns
    seen: Array  # what was rounded: wanted + feedback
    rounded: Array


def round_block(work: Work, grid: Columns, begin: int, wanted: Array, pull: Array) -> None:
    """Round the columns from ``begin`` on that ``wanted`` holds; ``pull`` is the feedback of all before them."""
    feedback, drift, errors, seen, _ = work
    for start, stop in spans(begin, begin + wanted.shape[0], STRIP):
        here = slice(start - begin, stop - begin)
        goal, push = wanted[here], pull[here]
        if start > begin:
            push = push + feedback[begin:start, start:stop].T @ errors[begin:start]
            if drift is not None:
                goal = goal + drift[begin:start, start:stop].T @ seen[begin:start]
        for j in range(start, stop):
            target, x = goal[j - start], push[j - start]
            if j > start:
                x = x + feedback[start:j, j] @ errors[start:j]
                if drift is not None:
                    target = target + drift[start:j, j] @ seen[start:j]
            round_column(work, grid, j, target, target + x)


def round_column(work: Work, grid: Columns, j: int, target: Array, x: Array) -> None:
    """Round ``x``, and book the error against ``target``."""
    step, zero = grid.step[j], grid.zero if isinstance(grid.zero, int) else grid.zero[j]
    shifted = x if grid.offset is None else x - grid.offset[j]
    value = float32(grid.element.snap(shifted / step, zero, grid.rule, grid.narrow)) * step
    if grid.offset is not None:
        value = value + grid.offset[j]
    work.rounded[j] = value
    work.errors[j] = target - value
    if work.drift is not None:
        work.seen[j] = x


def spans(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """``start..stop`` cut into pieces of ``size``."""
    return ((first, min(first + size, stop)) for first in range(start, stop, size))


def ordering(hessian: Array, act_order: bool) -> Array:
    """The order of rounding: as they come, or by falling diagonal (equal ones as they come)."""
    xp = namespace(hessian)
    diagonal = xp.diagonal(hessian)
    if not act_order:
        return as_parameter(np.arange(len(diagonal)), hessian)
    return xp.argsort(-diagonal, stable=True)


def upper_factor(hessian: Array, damping: float) -> Array:
    """R, upper triangular, with R R^T = H + damping mean(diag H) I, float32.

    Raises:
        DataError: values that are not finite, or a matrix that is far from positive definite.
    """
    xp = namespace(hessian)
    flipped = xp.flip(float32(hessian), (0, 1))
    diagonal = xp.diagonal(flipped)
    dead = diagonal == 0
    mean = float(diagonal.mean()) or 1.0
    if not np.isfinite(mean):
        raise DataError("the inputs of a layer have values that are not finite, so their Hessian has none either")
    for attempt in range(ATTEMPTS):
        added = damping * 10.0**attempt * mean if damping or not attempt else 10.0 ** (attempt - 8) * mean
        extra = xp.where(dead, 1 + 0 * diagonal, added + 0 * diagonal)
        lower = cholesky(flipped + xp.diag(extra))
        if lower is not None:
            return contiguous(xp.flip(lower, (0, 1)))
    raise DataError(f"the Hessian is not positive definite, even after {ATTEMPTS} times more damping")


def cholesky(matrix: Array) -> Array | None:
    """The lower triangular factor, or None where the matrix is not positive definite."""
    if is_torch(matrix):
        lower, info = namespace(matrix).linalg.cholesky_ex(matrix)
        return None if int(info) else lower
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return None


def solve_unit_upper(upper: Array, right: Array) -> Array:
    """X with upper^T X = right, where ``upper`` [n, n] has the diagonal 1 and ``right`` is [n, rows]."""
    xp = namespace(upper)
    if is_torch(upper):
        return xp.linalg.solve_triangular(upper.T, right, upper=False, unitriangular=True)
    return np.linalg.solve(np.triu(upper, 1).T + np.eye(len(upper), dtype=upper.dtype), right)


def place(grid: Columns, part: Columns, start: int, stop: int) -> Columns:
    """``grid`` (transposed) with the rows ``start..stop`` of another."""
    xp, rows = namespace(grid.step), slice(start, stop)

    def put(whole: Array | int | None, piece: Array | int | None) -> Array | int | None:
        if isinstance(whole, int) and isinstance(piece, int) and whole == piece:
            return whole
        full = xp.zeros_like(grid.step)
        full[...] = 0 if whole is None else whole
        full[rows] = 0 if piece is None else piece
        return full

    offset = None if grid.offset is None and part.offset is None else put(grid.offset, part.offset)
    return replace(grid, step=put(grid.step, part.step), zero=put(grid.zero, part.zero), offset=offset)


def check(weight: Array, hessian: Array, block_size: int, damping: float, act_order: bool, refit: Refit | None) -> None:
    """Raise for arguments that do not fit."""
    if weight.ndim != 2 or tuple(hessian.shape) != (weight.shape[1], weight.shape[1]):
        raise DataError(f"a weight of shape {tuple(weight.shape)} does not fit a Hessian of {tuple(hessian.shape)}")
    if block_size < 1 or damping < 0:
        raise ConfigError(f"block_size={block_size} must be 1 or more, and damping={damping} 0 or more")
    if refit is not None and act_order:
        raise ConfigError("groups that are refitted (static_groups=False) need the columns in order: act_order=False")


def loss(error: Array, hessian: Array) -> Array:
    """tr(e H e^T) per row of ``error`` [rows, columns]: what GPTQ makes small."""
    return ((error @ float32(hessian)) * error).sum(1)
