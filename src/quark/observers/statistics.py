"""What is remembered of a tensor while samples stream past: running statistics of fixed size that can be merged.

``MinMax``         smallest and largest value
``MovingMinMax``   exponential average of the per-sample extremes, with constant c (weight of the newest sample)

    x̄_n = Σ_i (1-c)^(n-i) x_i  /  Σ_i (1-c)^(n-i)

The sum of the weights stands below, so the average is unbiased from the first sample on (Kingma and Ba, "Adam", 2015,
section 3); c = 0 is the plain mean, c = 1 the last sample. ``Histogram`` (in ``quark.observers.histogram``) counts
values.

Every statistic has ``update(x)``, ``merge(other)`` (the same as having seen both series, ``other`` last), ``state()``
(plain arrays, to be stored) and ``from_state``. NaN and infinity are an error: they would spoil every later value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from quark.errors import ConfigError, DataError

#: The pattern of infinity: finite values that are not below zero have smaller ones.
INFINITE = np.uint32(0x7F800000)
#: Values that are looked at first.
FIRST = 1 << 12

State = dict[str, np.ndarray]
Own = TypeVar("Own", bound="Statistic")


class Statistic(Protocol):
    """A running summary of the values of one tensor.

    Attributes:
        lo, hi: smallest and largest value (of ``MovingMinMax``: their averages).
        count: values seen (of ``MovingMinMax``: samples).
    """

    @property
    def lo(self) -> float: ...  # noqa: D102
    @property
    def hi(self) -> float: ...  # noqa: D102
    @property
    def count(self) -> int: ...  # noqa: D102

    def update(self, x: np.ndarray) -> None:
        """Add the values of one sample (any shape; may be empty)."""

    def merge(self: Own, other: Own) -> None:
        """Add what ``other`` has seen after us."""

    def state(self) -> State:
        """Everything that has to be stored, as arrays."""

    @classmethod
    def from_state(cls: type[Own], state: Mapping[str, Any]) -> Own:
        """The statistic that ``state()`` described."""


def flattened(x: np.ndarray) -> np.ndarray:
    """The values in one row, float32; those beyond it become infinite."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(x, np.float32).reshape(-1)


def patterns_from_zero(x: np.ndarray) -> np.ndarray | None:
    """The patterns of float32 values, uint32 [n], where the first look finds a zero and none below it; else None.

    Results of a Relu are so. Patterns of values that are not below zero are in their order, so that one pass over them
    gives the largest, and tells whether the smallest is the zero: of all others (below zero, -0, NaN, infinity) some
    pattern is not below ``INFINITE``.
    """
    if x.dtype != np.float32 or not x.flags.c_contiguous:
        return None
    patterns = x.reshape(-1).view(np.uint32)
    first = patterns[:FIRST]
    return patterns if first.size and not first.all() and first.max() < INFINITE else None


def extremes(x: np.ndarray) -> tuple[float, float]:
    """Smallest and largest value of a non-empty array.

    Raises:
        DataError: the array holds NaN or infinity.
    """
    patterns = patterns_from_zero(x)
    if patterns is not None and (top := patterns.max()) < INFINITE:
        return 0.0, float(top.view(np.float32))
    lo, hi = float(x.min()), float(x.max())
    if not (np.isfinite(lo) and np.isfinite(hi)):
        nans, infinities = int(np.isnan(x).sum()), int(np.isinf(x).sum())
        raise DataError(f"{nans} NaN and {infinities} infinite values among {x.size}")
    return lo, hi


class MinMax:
    """Smallest and largest value seen."""

    def __init__(self) -> None:
        self.lo, self.hi = np.inf, -np.inf
        self.count = 0

    def update(self, x: np.ndarray) -> None:
        """Add the values of one sample."""
        if x.size:
            lo, hi = extremes(x)
            self.lo, self.hi = min(self.lo, lo), max(self.hi, hi)
            self.count += x.size

    def merge(self, other: MinMax) -> None:
        """Add what ``other`` has seen."""
        self.lo, self.hi = min(self.lo, other.lo), max(self.hi, other.hi)
        self.count += other.count

    def state(self) -> State:
        """``lo``, ``hi``, ``count``."""
        return {"lo": np.array(self.lo), "hi": np.array(self.hi), "count": np.array(self.count)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MinMax:
        """The statistic that ``state()`` described."""
        new = cls()
        new.lo, new.hi, new.count = float(state["lo"]), float(state["hi"]), int(state["count"])
        return new


class MovingMinMax:
    """Exponential average of the extremes of the samples.

    Args:
        constant: weight c of the newest sample, 0..1.

    Raises:
        ConfigError: another weight.
    """

    def __init__(self, constant: float = 0.01) -> None:
        if not 0 <= constant <= 1:
            raise ConfigError(f"the constant of a moving average is {constant}; it must be between 0 and 1")
        self.constant = float(constant)
        self.count = 0
        self._sums = np.zeros(2)
        self._weight = 0.0

    @property
    def lo(self) -> float:
        """Average of the smallest values."""
        return float(self._sums[0] / self._weight) if self.count else np.inf

    @property
    def hi(self) -> float:
        """Average of the largest values."""
        return float(self._sums[1] / self._weight) if self.count else -np.inf

    def update(self, x: np.ndarray) -> None:
        """Add the values of one sample."""
        if x.size:
            keep = 1 - self.constant
            self._sums = keep * self._sums + extremes(x)
            self._weight = keep * self._weight + 1
            self.count += 1

    def merge(self, other: MovingMinMax) -> None:
        """Add the samples of ``other``, which came after ours."""
        keep = (1 - self.constant) ** other.count
        self._sums = keep * self._sums + other._sums
        self._weight = keep * self._weight + other._weight
        self.count += other.count

    def state(self) -> State:
        """The weighted sums, their weight, the number of samples and the constant."""
        return {
            "sums": self._sums.copy(),
            "weight": np.array(self._weight),
            "count": np.array(self.count),
            "constant": np.array(self.constant),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MovingMinMax:
        """The statistic that ``state()`` described."""
        new = cls(float(state["constant"]))
        new._sums, new._weight = np.array(state["sums"], np.float64), float(state["weight"])
        new.count = int(state["count"])
        return new
