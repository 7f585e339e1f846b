"""GPTAQ: GPTQ that makes up for the error of its inputs as well (Li et al. 2025).

    minimize |W X - Q X~|^2,  X the inputs of the float model, X~ those of the quantized one

The part of W (X - X~) that later columns can express is added to them as columns are rounded: in the order of rounding,
with U the upper factor of the inverse Hessian (H^-1 = U^T U),

    P = alpha triu((X - X~) X~^T U^T, 1) U,        w_j <- w_j + sum_{i<j} w_i P_ij
"""

from __future__ import annotations

import numpy as np

from quark.algorithms.gptq import Feedback, loss, ordering, permuted, unit_diagonal, upper_factor
from quark.numerics.array import Array, Same, float32, is_torch, namespace


def asymmetric_feedback(
    hessian: Array, cross: Array, alpha: float = 0.25, damping: float = 0.01, act_order: bool = True
) -> tuple[Feedback, Array]:
    """The feedback and the drift with which ``round_columns`` is GPTAQ.

    Args:
        hessian: sum of x~ x~^T, [columns, columns].
        cross: sum of x x~^T.
        alpha: part of the correction that is applied.
        damping, act_order: as in ``gptq``.
    """
    order = ordering(hessian, act_order)
    h, g = permuted(hessian, order), permuted(cross, order)
    factor = upper_factor(h, damping)  # U is its inverse
    xp = namespace(factor)
    right = solve_upper(factor, float32(g - h).T).T  # (X - X~) X~^T U^T = D R^-T
    drift = alpha * transposed_solve(factor, xp.triu(right, 1).T).T  # .. U = .. R^-1
    return Feedback(order, unit_diagonal(factor)), xp.triu(drift, 1)


def excess(error: Array, weight: Array, hessian: Array, cross: Array) -> Same:
    """|W X - Q X~|^2 per row of Q = W + ``error`` [rows, columns], less |W (X - X~)|^2, which no Q changes.

    It is what GPTAQ and Qronos make small; negative where Q makes up for a part of the inputs' error. Arguments as in
    ``asymmetric_feedback``; where ``cross`` is the Hessian, this is ``gptq.loss``.
    """
    return loss(error, hessian) - 2 * ((float32(weight) @ float32(cross - hessian)) * error).sum(1)


def solve_upper(upper: Array, right: Array) -> Same:
    """X with upper X = right."""
    if is_torch(upper):
        return namespace(upper).linalg.solve_triangular(upper, right, upper=True)
    return np.linalg.solve(upper, right)


def transposed_solve(upper: Array, right: Array) -> Same:
    """X with upper^T X = right."""
    if is_torch(upper):
        return namespace(upper).linalg.solve_triangular(upper.T, right, upper=False)
    return np.linalg.solve(upper.T, right)
