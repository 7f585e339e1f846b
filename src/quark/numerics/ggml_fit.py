"""The codes of a block: the scale, or the scale and the minimum, under which they come nearest to its values.

    signed    x = s q        q from -middle to middle - 1
    affine    x = s q + m    q from 0 to the largest

Rounding under the range of a block does not give the least error, for few values lie at its ends. Some steps around
that range are tried, each moved to the least squares of its codes, and the best is taken. Errors are weighted by ``w``.
"""

from __future__ import annotations

import numpy as np

TRIED = tuple(np.linspace(-1.0, 1.0, 5, dtype=np.float32))  # codes more or fewer than the range of a block gets
Pair = tuple[np.ndarray, np.ndarray]


def divided(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    """``x / by``, 0 where ``by`` is."""
    return np.divide(x, by, out=np.zeros(np.broadcast_shapes(x.shape, by.shape), np.float32), where=by != 0)


def stored(scale: np.ndarray) -> np.ndarray:
    """A scale as float16 holds it."""
    return scale.astype(np.float16).astype(np.float32)


def not_below(scale: np.ndarray) -> np.ndarray:
    """The float16 of least magnitude that is not below ``scale``: its multiples reach what they have to."""
    near = scale.astype(np.float16)
    small = np.abs(near.astype(np.float32)) < np.abs(scale)
    outer = np.nextafter(near, np.copysign(np.inf, near, dtype=np.float16))
    return np.where(small, outer, near).astype(np.float32)


def extreme(x: np.ndarray) -> np.ndarray:
    """The value of largest magnitude on the last axis, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]


def codes_of(x: np.ndarray, step: np.ndarray, first: int, last: int) -> np.ndarray:
    """The nearest codes from ``first`` to ``last`` under steps that broadcast to ``x``; float32."""
    codes = divided(x, step)
    np.rint(codes, out=codes)
    return np.clip(codes, first, last, out=codes)


def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums of products along the last axis."""
    return np.einsum("...i,...i->...", a, b)


def squares(left: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Weighted sums of squares along the last axis."""
    return dot(left * left, w)


def fit_signed(x: np.ndarray, w: np.ndarray, middle: int) -> np.ndarray:
    """Steps [..] of blocks [.., n]: what the codes explain is most."""
    top, wx = extreme(x), w * x
    best, most = np.zeros_like(top), np.full(top.shape, -1, np.float32)  # whatever is tried explains more than that
    for more in TRIED:
        codes = codes_of(x, (-top / (middle + more))[..., None], -middle, middle - 1)
        product = dot(wx, codes)
        step = divided(product, dot(w * codes, codes))
        explained = product * step
        best, most = np.where(explained > most, step, best), np.maximum(explained, most)
    return best


def fit_affine(x: np.ndarray, w: np.ndarray, largest: int, below: bool) -> Pair:
    """Steps and minima [..] of blocks [.., n].

    Args:
        x: values.
        w: weights.
        largest: code.
        below: minima may not be above 0, as those of K-quants.
    """
    low, high = x.min(-1), x.max(-1)
    if below:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    span, least = high - low, np.full(low.shape, np.inf, np.float32)
    best, start = (span / largest, low), low
    for more in TRIED:
        step = span / np.float32(largest + more)
        for _ in range(2):  # the second time under what the first has found
            codes = codes_of(x - low[..., None], step[..., None], 0, largest)
            step, low = line(x, codes, w, below)
            error = squares(x - codes * step[..., None] - low[..., None], w)
            better = error < least
            best = np.where(better, step, best[0]), np.where(better, low, best[1])
            least = np.minimum(error, least)
        low = start
    return best


def line(x: np.ndarray, codes: np.ndarray, w: np.ndarray, below: bool) -> Pair:
    """Slopes and intercepts of least squares; where one has the wrong sign it is 0."""
    wc = w * codes
    total, sx, sc, sxc, scc = w.sum(-1), dot(w, x), wc.sum(-1), dot(wc, x), dot(wc, codes)
    slope = divided(total * sxc - sx * sc, total * scc - sc * sc)
    slope = np.maximum(slope, 0)
    low = divided(sx - slope * sc, total)
    if below:
        above = low > 0
        low, slope = np.where(above, 0, low), np.where(above, np.maximum(divided(sxc, scc), 0), slope)
    return slope, low
