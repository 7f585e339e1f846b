"""SVDQuant: the hard part of a weight in a small float branch, the rest in few bits (Li et al. 2024).

    y = x W^T = (x / s) (W s)^T = (x / s) L1^T L2^T + Q(x / s) Q(R)^T,     W s = L2 L1 + R,  L2 L1 of rank r

s hands the outliers of the activations to the weight (as in SmoothQuant), where the largest singular values take them.
The best rank-r approximation comes from a few steps of subspace iteration, not from a full decomposition.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quark.numerics.array import Array, as_parameter, float32, is_torch, namespace

EXTRA = 8  # directions beyond the rank, for speed of convergence
STEPS = 4
SMALLEST, LARGEST = 1e-5, 1e5


class LowRankSplit(NamedTuple):
    """A weight as a sum: down [r, columns], up [rows, r], residual [rows, columns]; float32."""

    down: Array
    up: Array
    residual: Array


def smoothing(activation_max: Array, weight_max: Array, alpha: float) -> Array:
    """s per channel: activation_max^alpha / weight_max^(1 - alpha), within 1e-5 .. 1e5; 1 where nothing was seen."""
    xp = namespace(activation_max)
    s = float32(activation_max) ** alpha / xp.clip(float32(weight_max), SMALLEST, None) ** (1 - alpha)
    return xp.where(activation_max > 0, xp.clip(s, SMALLEST, LARGEST), xp.ones_like(s))


def split(weight: Array, rank: int, steps: int = STEPS) -> LowRankSplit:
    """The (nearly) best approximation of rank ``rank`` and what it leaves.

    Args:
        weight: [rows, columns].
        rank: 1 or more; at most the smaller side is used.
        steps: of subspace iteration.
    """
    w = float32(weight)
    linalg = namespace(w).linalg
    rank = min(rank, *w.shape)
    count = min(rank + EXTRA, *w.shape)
    start = np.random.default_rng(0).standard_normal((w.shape[1], count)).astype(np.float32)
    basis = linalg.qr(w @ as_parameter(start, w))[0]
    for _ in range(steps):
        basis = linalg.qr(w @ linalg.qr(w.T @ basis)[0])[0]
    u, sizes, vt = svd(basis.T @ w)
    root = namespace(w).sqrt(sizes[:rank])
    up, down = (basis @ u[:, :rank]) * root, root[:, None] * vt[:rank]
    return LowRankSplit(down, up, w - up @ down)


def svd(matrix: Array) -> tuple[Array, Array, Array]:
    """Of a matrix with few rows."""
    linalg = namespace(matrix).linalg
    return linalg.svd(matrix, full_matrices=False) if is_torch(matrix) else np.linalg.svd(matrix, full_matrices=False)
