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

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from quark.algorithms.columns import Columns, contiguous, take
from quark.errors import ConfigError, DataError
from quark.numerics.array import Array, Same, as_parameter, empty, float32, is_torch, namespace, shared
from quark.numerics.chunks import quiet
from quark.numerics.replay import replayed

WIDE = 512  # columns, at least, that the feedback of all before them reaches in one matrix product
STRIP = 8  # columns whose feedback on each other is added one at a time
ATTEMPTS = 5  # of a factorization, each with ten times the damping of the one before
Refit = Callable[[Same, int, int], Columns]


def gptq(
    weight: Array,
    hessian: Array,
    grid: Columns,
    block_size: int = 128,
    damping: float = 0.01,
    act_order: bool = True,
) -> Same:
    """The matrix on the grid with (nearly) the least output error.

    Args:
        weight: [rows, columns]; float, NumPy or torch. A column is what one input feature is multiplied by.
        hessian: [columns, columns], sum or mean of x x^T over the inputs. Inputs that were always 0 leave their columns
            rounded to nearest.
        grid: of the weight.
        block_size: columns between two matrix products; of no influence on the result.
        damping: this part of the mean of the diagonal is added to it.
        act_order: begin with the columns of the largest inputs (the grid stays that of the given order).

    Returns:
        float32 [rows, columns], values on the grid (``grid.codes`` gives their codes).

    Raises:
        ConfigError: a block size below 1, a negative damping.
        DataError: shapes that do not fit, a hessian that is not finite.
    """
    check(weight, hessian, block_size, damping)
    return round_columns(weight, feedback_of(hessian, damping, act_order), grid, block_size)


class Feedback(NamedTuple):
    """What errors do to later columns; the same for all layers that read one input."""

    order: Array  # of rounding
    matrix: Array  # [columns, columns], upper triangular in that order, diagonal 1; below it is nothing of meaning


def feedback_of(hessian: Array, damping: float = 0.01, act_order: bool = True) -> Feedback:
    """The feedback under a Hessian; arguments and errors of ``gptq``."""
    order = ordering(hessian, act_order)
    return Feedback(order, unit_diagonal(upper_factor(permuted(hessian, order), damping)))


def unit_diagonal(factor: Array) -> Same:
    """Each column divided by its diagonal element; ``factor`` is overwritten."""
    factor /= contiguous(namespace(factor).diagonal(factor))
    return factor


def round_columns(
    weight: Array,
    feedback: Feedback,
    grid: Columns,
    block_size: int = 128,
    drift: Same | None = None,
    refit: Refit | None = None,
) -> Same:
    """``gptq`` with the feedback at hand: one matrix product a block brings it the feedback of all before it.

    Args:
        weight, grid, block_size: as ``gptq``.
        feedback: its order must be that of the columns where there is ``refit``.
        drift: [columns, columns], strictly upper triangular in the order of rounding; see ``gptaq``. None: none.
        refit: (weights [rows, n] as corrected so far, start, stop) -> grid of these columns, asked before each block
            of ``block_size``.
    """
    columns, matrix = contiguous(float32(weight).T), feedback.matrix
    count, rows = columns.shape
    turned = grid.spread((rows, count)).transposed.map(contiguous)
    errors = empty((count, rows), "float32", columns)  # wanted - rounded, of finished columns
    rounded = empty((count, rows), "float32", columns)
    seen = empty((count, rows) if drift is not None else (count, 0), "float32", columns)  # what was rounded
    with quiet():
        for start, stop in spans(0, count, max(block_size, WIDE) if refit is None else block_size):
            index, here = feedback.order[start:stop], slice(start, stop)
            wanted = take(columns, index, 0)
            bent = None
            if drift is not None:
                bent = drift[here, here]
                wanted += drift[:start, here].T @ seen[:start]
            pull = matrix[:start, here].T @ errors[:start]
            part = turned.rows(index)
            if refit is not None:
                moved = wanted + solve_unit_upper(matrix[here, here], pull)
                part = refit(contiguous(moved.T), start, stop).transposed.map(contiguous)
            span = ColumnSpan(matrix[here, here], bent, wanted, pull, errors[here], seen[here], rounded[here])
            round_span(span, part, (block_size, STRIP))
    return contiguous(take(rounded, namespace(rounded).argsort(feedback.order), 0).T)


class ColumnSpan(NamedTuple):
    """Neighbouring columns on their way: [n, n] and [n, rows], in the order of rounding."""

    feedback: Same
    drift: Same | None
    wanted: Same  # overwritten, where there is a drift
    pull: Same  # feedback of all columns before; overwritten
    errors: Same  # filled: wanted - rounded
    seen: Same  # filled: wanted + pull; [n, 0] where there is no drift
    rounded: Same  # filled

    def part(self, here: slice) -> ColumnSpan:
        """Some of its columns, in the same memory."""
        drift = None if self.drift is None else self.drift[here, here]
        return ColumnSpan(self.feedback[here, here], drift, *(rows[here] for rows in self[2:]))

    @property
    def shared(self) -> ColumnSpan:
        """Its arrays as ``quark.numerics.array.shared`` has them."""
        return ColumnSpan(*(None if part is None else shared(part) for part in self))


def round_span(span: ColumnSpan, grid: Columns, sizes: tuple[int, ...]) -> None:
    """The columns of a span rounded; ``grid`` is theirs, [n, rows].

    One matrix product for every ``sizes[0]`` columns brings them the feedback of those before them in the span; then
    they are a span of their own, of the next size. NumPy costs half of torch's where columns are short.
    """
    if not sizes:
        bare, grid = span.shared, grid.map(shared)
        for j in range(len(span.wanted)):
            round_column(bare, grid, j)
        return
    for start, stop in spans(0, len(span.wanted), sizes[0]):
        here = slice(start, stop)
        if start:
            span.pull[here] += span.feedback[:start, here].T @ span.errors[:start]
        if start and span.drift is not None:
            span.wanted[here] += span.drift[:start, here].T @ span.seen[:start]
        part, columns = span.part(here), grid.map(itemgetter(here))
        if len(sizes) == 2:
            replay_span(part, columns, sizes[1:])
        else:
            round_span(part, columns, sizes[1:])


def replay_span(span: ColumnSpan, grid: Columns, sizes: tuple[int, ...]) -> None:
    """``round_span``, of whose thousand short steps a GPU is told at once."""
    arrays: list[Same] = []
    grid.map(arrays.append)
    arrays += [part for part in span if part is not None]

    def steps(places: Sequence[Same]) -> None:
        rest = iter(places)
        columns = grid.map(lambda _: next(rest))
        round_span(ColumnSpan(*(None if part is None else next(rest) for part in span)), columns, sizes)

    kind = grid.map(lambda part: tuple(part.shape)), span.drift is None, sizes
    replayed(steps, kind, arrays, filled=3)


def round_column(span: ColumnSpan, grid: Columns, j: int) -> None:
    """Round column ``j`` of a span, and add what it does to the columns behind it to theirs."""
    target = span.wanted[j]
    x = target + span.pull[j]
    step, zero = grid.step[j], grid.zero if isinstance(grid.zero, int) else grid.zero[j]
    shifted = x if grid.offset is None else x - grid.offset[j]
    value = float32(grid.element.snap(shifted / step, zero, grid.rule, grid.narrow))
    value *= step
    if grid.offset is not None:
        value += grid.offset[j]
    error = target - value
    span.rounded[j], span.errors[j] = value, error
    span.pull[j + 1 :] += span.feedback[j, j + 1 :, None] * error
    if span.drift is not None:
        span.seen[j] = x
        span.wanted[j + 1 :] += span.drift[j, j + 1 :, None] * x


def spans(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """``start..stop`` cut into pieces of ``size``."""
    return ((first, min(first + size, stop)) for first in range(start, stop, size))


def ordering(hessian: Array, act_order: bool) -> Same:
    """The order of rounding: as they come, or by falling diagonal (equal ones as they come)."""
    xp = namespace(hessian)
    diagonal = xp.diagonal(hessian)
    if not act_order:
        return as_parameter(np.arange(len(diagonal)), hessian)
    return xp.argsort(-diagonal, stable=True)


def upper_factor(hessian: Array, damping: float) -> Same:
    """R, upper triangular (what is below the diagonal is to be ignored), with R R^T = H + damping mean(diag H) I.

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
        damped = xp.empty_like(flipped)
        damped[...] = flipped
        damped.reshape(-1)[:: len(damped) + 1] = xp.where(dead, 1 + 0 * diagonal, diagonal + added)
        lower = cholesky(damped)
        if lower is not None:
            return contiguous(xp.flip(lower, (0, 1)))
    raise DataError(f"the Hessian is not positive definite, even after {ATTEMPTS} times more damping")


def permuted(matrix: Array, order: Array) -> Same:
    """Rows and columns of a square matrix in another order."""
    return take(take(matrix, order, 0), order, 1)


def cholesky(matrix: Array) -> Same | None:
    """The lower triangular factor, or None where the matrix is not positive definite; ``matrix`` is overwritten.

    torch's own function spends half of its time on copies and zeros (2048 columns on a CPU), so it only gets the
    diagonal blocks here; the rest is matrix products. What is above the diagonal is to be ignored.
    """
    if not is_torch(matrix):
        try:
            return np.linalg.cholesky(matrix)
        except np.linalg.LinAlgError:
            return None
    xp = namespace(matrix)
    for start, stop in spans(0, len(matrix), WIDE):
        lower, info = xp.linalg.cholesky_ex(matrix[start:stop, start:stop])
        if int(info):
            return None
        matrix[start:stop, start:stop] = lower
        below = xp.linalg.solve_triangular(lower, matrix[stop:, start:stop].T, upper=False)
        matrix[stop:, start:stop] = below.T
        for first, last in spans(stop, len(matrix), WIDE):
            matrix[first:, first:last].addmm_(below.T[first - stop :], below[:, first - stop : last - stop], alpha=-1)
    return matrix


def solve_unit_upper(upper: Array, right: Array) -> Same:
    """X with upper^T X = right, where ``upper`` [n, n] has the diagonal 1 and ``right`` is [n, rows]."""
    xp = namespace(upper)
    if is_torch(upper):
        return xp.linalg.solve_triangular(upper.T, right, upper=False, unitriangular=True)
    return np.linalg.solve(np.triu(upper, 1).T + np.eye(len(upper), dtype=upper.dtype), right)


def check(weight: Array, hessian: Array, block_size: int, damping: float) -> None:
    """Raise for arguments that do not fit."""
    if weight.ndim != 2 or tuple(hessian.shape) != (weight.shape[1], weight.shape[1]):
        raise DataError(f"a weight of shape {tuple(weight.shape)} does not fit a Hessian of {tuple(hessian.shape)}")
    if block_size < 1 or damping < 0:
        raise ConfigError(f"block_size={block_size} must be 1 or more, and damping={damping} 0 or more")


def loss(error: Array, hessian: Array) -> Same:
    """tr(e H e^T) per row of ``error`` [rows, columns]: what GPTQ makes small."""
    return ((error @ float32(hessian)) * error).sum(1)
