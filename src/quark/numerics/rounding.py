"""Rounding of float32 values to integers, exact for every value.

``half_even``  ties to the even neighbour (IEEE 754 roundTiesToEven)
``half_away``  ties away from zero                    (the block operators' ``rounding_mode`` 0)
``half_up``    ties towards +infinity                 (the block operators' ``rounding_mode`` 1)
``floor``      towards -infinity

The textbook ``floor(x + 0.5)`` is wrong for 0.49999997 and for odd values above 2**23, where the sum itself rounds;
here the fraction x - floor(x), which is exact where it matters, is compared with one half instead.
"""

from __future__ import annotations

from collections.abc import Callable

from quark.errors import ConfigError, unknown
from quark.numerics.array import Array, namespace


def half_even(x: Array) -> Array:
    """``x`` rounded to the nearest integer, ties to even; in place."""
    return namespace(x).round(x, out=x)


def half_away(x: Array) -> Array:
    """``x`` rounded to the nearest integer, ties away from zero; in place."""
    xp = namespace(x)
    whole = xp.trunc(x)
    up = xp.abs(x - whole) >= 0.5
    return xp.add(whole, xp.copysign(up * xp.ones_like(x), x), out=x)


def half_up(x: Array) -> Array:
    """``x`` rounded to the nearest integer, ties towards +infinity; in place."""
    xp = namespace(x)
    whole = xp.floor(x)
    return xp.add(whole, (x - whole) >= 0.5, out=x)


def floor(x: Array) -> Array:
    """``x`` rounded towards -infinity; in place."""
    return namespace(x).floor(x, out=x)


ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "half_even": half_even,
    "half_away": half_away,
    "half_up": half_up,
    "floor": floor,
}


def round_(x: Array, rounding: str = "half_even") -> Array:
    """``x`` (float32, overwritten) rounded to integers by the rule named ``rounding``."""
    if rounding not in ROUNDINGS:
        raise ConfigError(unknown("rounding", rounding, ROUNDINGS))
    return ROUNDINGS[rounding](x)
