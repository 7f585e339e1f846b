"""Qronos: correct the past, shape the future (Zhang et al. 2025).

    minimize |W X - Q X~|^2,   H = X~ X~^T,  G = X X~^T

The first column is rounded to what repairs most of the mismatch of the inputs, all others are set to the least-squares
solution given that, and then the errors of rounding are diffused as in GPTQ:

    q_0 = round( (W G_:0 - W_rest H_rest,0) / H_00 )
    W_rest <- (W G_:rest - q_0 H_0,rest) H_rest^-1
"""

from __future__ import annotations

import numpy as np

from quark.algorithms.columns import Columns, contiguous
from quark.algorithms.gptaq import solve_upper, transposed_solve
from quark.algorithms.gptq import Feedback, ordering, permuted, round_columns, unit_diagonal, upper_factor
from quark.numerics.array import Array, Same, as_parameter, float32, namespace

POWER_STEPS = 30  # iterations for the largest eigenvalue


def qronos(
    weight: Array,
    sums: tuple[Array, Array],
    grid: Columns,
    block_size: int = 128,
    alpha: float = 1e-3,
    act_order: bool = True,
) -> Same:
    """The matrix on the grid; float32 [rows, columns].

    Args:
        weight: [rows, columns].
        sums: of x~ x~^T, x~ the inputs of the quantized model (the Hessian), and of x x~^T, x those of the float model.
        grid: of the weight.
        block_size, act_order: as in ``gptq``.
        alpha: part of the largest eigenvalue of the Hessian that is added to its diagonal (and that of the other sum).
    """
    order = ordering(sums[0], act_order)
    h, g = (float32(permuted(one, order)) for one in sums)
    mean = float(namespace(h).diagonal(h).mean()) or 1.0
    added = alpha * largest_eigenvalue(h)
    factor = upper_factor(h, added / mean)
    columns = contiguous(float32(weight).T[order])
    top = grid.spread(tuple(weight.shape)).take(order[:1]).transposed.take_row(0)
    wanted = namespace(columns).empty_like(columns)
    wanted[order] = corrected(columns, h, g, factor, added, top)
    return round_columns(contiguous(wanted.T), Feedback(order, unit_diagonal(factor)), grid, block_size)


def corrected(columns: Array, h: Array, g: Array, factor: Array, added: float, grid: Columns) -> Same:
    """The columns [n, rows] that are to be rounded: the first is on its ``grid`` already."""
    xp = namespace(columns)
    whole = g.T @ columns  # (W G)^T
    top = float(h[0, 0]) or 1.0
    first = grid.round(xp.where(h[0, 0] > 0, (whole[0] - h[1:, 0] @ columns[1:]) / top, columns[0]))
    out = xp.empty_like(columns)
    out[0] = first
    if len(columns) > 1:
        right = whole[1:] + added * columns[1:] - h[0, 1:][:, None] * first
        rest = factor[1:, 1:]  # H_rest + added I = rest rest^T
        dead = xp.diagonal(h)[1:] == 0
        solved = transposed_solve(rest, solve_upper(rest, right))
        out[1:] = xp.where(dead[:, None], columns[1:], solved)
    return out


def largest_eigenvalue(matrix: Array) -> float:
    """Of a positive semidefinite matrix, by power iteration.

    It starts from a fixed vector without a pattern: that of ones would miss features that are centred together.
    """
    xp = namespace(matrix)
    start = np.random.default_rng(len(matrix)).standard_normal(len(matrix)).astype(np.float32)
    scale, value = float(xp.diagonal(matrix).max()), 0.0  # no element is larger
    if not scale:
        return 0.0
    x = as_parameter(start / np.float32(np.linalg.norm(start) * scale), matrix)
    for _ in range(POWER_STEPS):
        y = matrix @ x  # of size 1, however large the matrix is
        value = float(xp.linalg.norm(y))
        x = y / (value * scale)
    return value * scale
