"""SVDQuant: the hard part of a weight in a small float branch, the rest in few bits (Li et al. 2024).

    y = x W^T = (x / s) (W s)^T = (x / s) L1^T L2^T + Q(x / s) Q(R)^T,     W s = L2 L1 + R,  L2 L1 of rank r

s hands the outliers of the activations to the weight (as in SmoothQuant), where the largest singular values take them.
The best rank-r approximation comes from a few steps of subspace iteration, not from a full decomposition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from typing import NamedTuple

import numpy as np

from quark.measure.score import WORTH
from quark.numerics.array import Array, Same, as_parameter, float32, is_torch, namespace

EXTRA = 8  # directions beyond the rank, for speed of convergence
STEPS = 4
SMALLEST, LARGEST = 1e-5, 1e5
ALPHAS = tuple(k / 20 for k in range(1, 20))  # exponents of the smoothing that are tried


class LowRankSplit(NamedTuple):
    """A weight as a sum: down [r, columns], up [rows, r], residual [rows, columns]; float32."""

    down: Same
    up: Same
    residual: Same


def smoothing(activation_max: Array, weight_max: Array, alpha: float) -> Same:
    """s per channel: activation_max^alpha / weight_max^(1 - alpha), within 1e-5 .. 1e5; 1 where nothing was seen."""
    xp = namespace(activation_max)
    s = float32(activation_max) ** alpha / xp.clip(float32(weight_max), SMALLEST, None) ** (1 - alpha)
    return xp.where(activation_max > 0, xp.clip(s, SMALLEST, LARGEST), xp.ones_like(s))


def is_excluded(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Whether a pattern is one of a layer's names, or a part of one."""
    names, patterns = tuple(names), tuple(patterns)
    return any(fnmatchcase(name, one) for pattern in patterns for one in (pattern, f"*{pattern}*") for name in names)


def best_split(
    weights: Sequence[Array],
    largest: Array,
    alphas: Iterable[float],
    rank: int,
    error: Callable[[Same, list[LowRankSplit]], float],
    without: float,
) -> tuple[Same, list[LowRankSplit]] | None:
    """The smoothing, and the splits of the layers that read one tensor, that leave the least error; None: not worth it.

    Args:
        weights: [rows, columns] each.
        largest: magnitude of every column of the tensor.
        error: of s and the splits of the weights times s.
        without: error of the weights as they are.
    """
    widest = reduce(namespace(largest).maximum, [namespace(weight).amax(abs(weight), 0) for weight in weights])
    lowest, best = WORTH * without, None
    for alpha in alphas:
        s = smoothing(largest, widest, alpha)
        parts = [split(weight * s, rank) for weight in weights]
        found = error(s, parts)
        if found < lowest:
            lowest, best = found, (s, parts)
    return best


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
