"""Rounding of float values to integers, exact for every value.

``half_even``    ties to the even neighbour (IEEE 754 roundTiesToEven)
``half_away``    ties away from zero               (``rounding_mode`` 0 of the block operators)
``half_up``      ties towards +infinity            (``rounding_mode`` 1 of the block operators)
``floor``        towards -infinity
``toward_zero``  the fraction is dropped
``stochastic``   up with the probability of the fraction; ``Stochastic(seed)`` chooses the seed (0 by name)

The textbook ``floor(x + 0.5)`` is wrong for 0.49999997 and for odd values above 2**23, where the sum itself rounds;
here the fraction x - floor(x), which is exact where it matters, is compared with one half instead.

The noise of stochastic rounding is SplitMix64 (Steele, Lea, Flood 2014) at position ``flat index`` of the tensor, a
counter-based generator in wrapping 64-bit integers: the same bits on NumPy and torch, on every device, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import TypeAlias

import numpy as np

from quark.dataclass import dataclass
from quark.errors import check_name
from quark.numerics.array import Array, Same, arange, cast, chunk_size, empty, namespace

Rule: TypeAlias = Callable[[Array], Same]  # float values (may be overwritten) -> integers as floats


@dataclass(frozen=True)
class Stochastic:
    """Stochastic rounding with its own seed.

    Attributes:
        seed: any integer below 2**63 in magnitude; equal seeds give equal results.
    """

    seed: int = 0


Rounding: TypeAlias = str | Stochastic


def half_even(x: Array) -> Same:
    """The nearest integers, ties to even; in place."""
    return namespace(x).round(x, out=x)


def half_away(x: Array) -> Same:
    """The nearest integers, ties away from zero."""
    xp = namespace(x)
    whole = xp.trunc(x)
    fraction = x - whole
    whole += cast(fraction >= 0.5, "float32")
    whole -= cast(fraction <= -0.5, "float32")
    return whole


def half_up(x: Array) -> Same:
    """The nearest integers, ties towards +infinity."""
    whole = namespace(x).floor(x)
    whole += cast(x - whole >= 0.5, "float32")
    return whole


def floor(x: Array) -> Same:
    """The next integers towards -infinity; in place."""
    return namespace(x).floor(x, out=x)


def toward_zero(x: Array) -> Same:
    """The next integers towards zero; in place."""
    return namespace(x).trunc(x, out=x)


def dither(x: Array, noise: Array) -> Same:
    """One of the two integers around x: the upper one where ``noise`` (0 <= noise < 1) is below the fraction."""
    whole = namespace(x).floor(x)
    whole += cast(noise < x - whole, "float32")
    return whole


RULES: dict[str, Rule] = {
    "half_even": half_even,
    "half_away": half_away,
    "half_up": half_up,
    "floor": floor,
    "toward_zero": toward_zero,
}
NEAREST = ("half_even", "half_away", "half_up")
ROUNDINGS: tuple[str, ...] = (*RULES, "stochastic")


def noise_of(rounding: Rounding, shape: tuple[int, ...], like: Array) -> Same | None:
    """The noise that ``rounding`` needs for a tensor of ``shape`` (float32, on the device of ``like``), or None.

    Raises:
        ConfigError: no such rounding.
    """
    if isinstance(rounding, Stochastic):
        return uniform(rounding.seed, shape, like)
    check_name("rounding", rounding, ROUNDINGS)
    return uniform(0, shape, like) if rounding == "stochastic" else None


def rule_of(rounding: Rounding, noise: Array | None) -> Rule:
    """The rule of ``rounding``, bound to the ``noise`` of the elements that it will round."""
    return partial(dither, noise=noise) if noise is not None else RULES[str(rounding)]


def uniform(seed: int, shape: tuple[int, ...], like: Array) -> Same:
    """Multiples of 2**-24 in [0, 1), one per element in C order, on the device of ``like``."""
    count = prod(shape)
    out = empty((count,), "float32", like)
    start = mix(arange(seed, seed + 1, like))
    size = chunk_size(like)
    for first in range(0, count, size):
        index = arange(first + 1, min(first + size, count) + 1, like)
        hashed = mix(index * signed(0x9E3779B97F4A7C15) + start)
        out[first : first + size] = cast(shift_right(hashed, 40), "float32")
    out *= 2.0**-24
    return out.reshape(shape)


def mix(z: Array) -> Same:
    """The finalizer of SplitMix64 on int64 (wrapping, shifts without sign)."""
    z = (z ^ shift_right(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ shift_right(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ shift_right(z, 31)


def shift_right(z: Array, count: int) -> Same:
    """Logical right shift of int64."""
    return (z >> count) & ((1 << 64 - count) - 1)


def signed(value: int) -> int:
    """The int64 with the bits of the 64-bit ``value``."""
    return int(np.uint64(value).astype(np.int64))
