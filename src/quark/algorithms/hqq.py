"""HQQ: half-quadratic quantization, scales and zero points without data (Badri & Shaji 2023).

    minimize  |W - s (Q - z)|_p^p,  p < 1, which lets a few weights be wrong for the good of the others

in turns: the outliers E = shrink(W - W_r, beta), then the least-squares zero point of W - E (or the scale, where zero
points are fixed or integers; or both, which is the line through the codes), then new codes; beta grows by ``growth``
each round. A scale group that did not get better keeps what it had.
"""

from __future__ import annotations

from typing import NamedTuple

from quark.numerics.array import Array, Same, as_parameter, cast, float32, namespace
from quark.numerics.elements import Element
from quark.numerics.rounding import half_even

TINY = 1e-8


class HQQParameters(NamedTuple):
    """Scale and zero point per row of tiles; float32."""

    scale: Same
    zero: Same


class Descent(NamedTuple):
    """Rounds, and the exponent, the first weight of the outliers and its growth from round to round of the paper."""

    iterations: int = 20
    p: float = 0.7
    beta: float = 10.0
    growth: float = 1.01


USUAL = Descent()


def hqq(
    tiles: Array,
    start: HQQParameters,
    format: Element,
    move_scale: bool = False,
    move_zero: bool | None = None,
    descent: Descent = USUAL,
) -> HQQParameters:
    """Better parameters for weights.

    Args:
        tiles: [groups, n], the weights that share a scale in a row (``Granularity.tile``).
        start: [groups] each, from where the search starts.
        format: an integer format.
        move_scale: move the scale.
        move_zero: move the zero point, which is then a real number; None: where the scale stays.
        descent: how it goes on.
    """
    move_zero = not move_scale if move_zero is None else move_zero
    xp = namespace(tiles)
    w = float32(tiles)
    s, z = (float32(as_parameter(value, tiles)).reshape(-1, 1) for value in start)
    best = HQQParameters(s, z)
    p, beta = descent.p, descent.beta
    lowest = error(w, best, format, p)
    for _ in range(descent.iterations):
        codes = round_codes(w, s, z, format)
        kept = w - shrink(w - s * (codes - z), beta, p)
        if move_scale:
            slope = slope_of(kept, codes, codes.mean(-1, keepdims=True) if move_zero else z)
            s = xp.where(slope > TINY, slope, best.scale)
        if move_zero:
            z = (codes - kept / s).mean(-1, keepdims=True)
        beta *= descent.growth
        now = error(w, HQQParameters(s, z), format, p)
        better = now < lowest
        lowest = xp.where(better, now, lowest)
        best = HQQParameters(xp.where(better, s, best.scale), xp.where(better, z, best.zero))
    return HQQParameters(best.scale.reshape(-1), best.zero.reshape(-1))


def slope_of(values: Same, codes: Same, middle: Same) -> Same:
    """The least-squares scale of ``values`` over codes counted from ``middle``, [groups, 1]; 0 where every code is
    ``middle``."""
    centred = codes - middle
    spread = (centred * centred).sum(-1, keepdims=True)
    return (values * centred).sum(-1, keepdims=True) / namespace(codes).where(spread > 0, spread, 1 + 0 * spread)


def round_codes(w: Array, s: Array, z: Array, format: Element) -> Same:
    """The codes nearest to ``w``, as float32."""
    return namespace(w).clip(half_even(w / s + z), format.min, format.max)


def shrink(x: Array, beta: float, p: float) -> Same:
    """The proximal step of |x|_p: sign(x) max(|x| - |x|^(p-1) / beta, 0)."""
    xp = namespace(x)
    size = xp.abs(x)
    return xp.sign(x) * xp.clip(size - xp.clip(size, TINY, None) ** (p - 1) / beta, 0, None)


def error(w: Array, parameters: HQQParameters, format: Element, p: float) -> Same:
    """sum |w - s (q - z)|^p per row, [groups, 1]."""
    s, z = parameters
    return cast(namespace(w).abs(w - s * (round_codes(w, s, z, format) - z)) ** p, "float32").sum(-1, keepdims=True)
