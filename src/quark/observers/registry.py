"""The table of range searches: one row is one calibration method.

A row names the statistic that must be collected and the function ``search(statistic, grid, **settings) -> (lo, hi)``.
The settings a method takes are the keyword arguments of the two; ``Search.check`` refuses others by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from math import inf
from typing import Any, SupportsFloat, cast

import numpy as np

from quark.dataclass import dataclass
from quark.errors import ConfigError, check_name, check_names, is_of, users_code, words_of
from quark.numerics.affine import Grid
from quark.observers import (
    distribution,
    entropy,
    layerwise_percentile,
    minmax,
    mse,
    mse_modes,
    non_overflow,
    percentile,
)
from quark.observers.histogram import Histogram
from quark.observers.mse_modes import Votes
from quark.observers.outlined import outlined
from quark.observers.sampled import sampled
from quark.observers.statistics import MinMax, MovingMinMax, Statistic
from quark.observers.tails import quantiles
from quark.observers.values import counted

Range = tuple[float, float]


@dataclass(frozen=True)
class RangeMethod:
    """A calibration method.

    Attributes:
        name: its name in ``SEARCHES``.
        statistic: what has to be collected; called with the settings it takes.
        search: turns the statistic into a range.
        rows: ranges of many rows of values at once, (rows [..., n], grid, settings) → lo, hi [...]; None: row by row.
    """

    name: str
    statistic: Callable[..., Statistic]
    search: Callable[..., Range]
    rows: Callable[..., tuple[np.ndarray, np.ndarray]] | None = None

    @property
    def needs_values(self) -> bool:
        """Whether the extremes of each sample are not enough."""
        return self.statistic not in (MinMax, MovingMinMax)

    @property
    def looks_twice(self) -> bool:
        """Whether it can use the values themselves after the histogram."""
        return self.statistic in (counted, outlined, sampled, quantiles)

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings."""
        return (*_keywords(self.statistic, 0), *_keywords(self.search, 2))

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` for a setting that the method does not have, or of another type."""
        check_names(f"setting of the calibration method {self.name!r}", settings, self.settings)
        kinds = _kinds(self.statistic) | _kinds(self.search)
        for name, kind in kinds.items():
            if name in settings and not is_of(settings[name], kind):
                said = f"{name}={settings[name]!r:.80} must be {words_of(kind)}"
                raise ConfigError(f"the calibration method {self.name!r}: {said}")

    def observe(self, settings: Mapping[str, Any]) -> Statistic:
        """A fresh statistic."""
        with self.guarded():
            return self.statistic(**_taken(settings, _keywords(self.statistic, 0)))

    def guarded(self) -> AbstractContextManager[None]:
        """What a registered method raises, as one sentence."""
        return nullcontext() if self.name in BUILT_IN else users_code(f"the calibration method {self.name!r}")

    def find(self, statistic: Statistic, grid: Grid, settings: Mapping[str, Any]) -> Range:
        """The range; (0, 0) for a tensor that was empty in every sample.

        Raises:
            ConfigError: an unknown setting, a value that it cannot have, a search that returns no range, or raises.
        """
        self.check(settings)
        if not statistic.count:
            return 0.0, 0.0
        with self.guarded():
            found = self.search(statistic, grid, **_taken(settings, _keywords(self.search, 2)))
        if not _is_range(found):
            raise ConfigError(
                f"the calibration method {self.name!r} must return two finite numbers (lo, hi), the smaller first, not "
                f"{found!r:.80}"
            )
        return float(found[0]), float(found[1])

    def of_rows(self, values: np.ndarray, grid: Grid, settings: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """The ranges of a tensor that is seen once, a weight, of which every row [..., n] has its own scale.

        Raises:
            ConfigError: a method that looks at one row at a time, an unknown setting.
        """
        self.check(settings)
        if self.rows is None:
            raise ConfigError(f"the calibration method {self.name!r} finds the ranges of one row at a time")
        return self.rows(values, grid, **_taken(settings, _keywords(self.rows, 2)))


def count(statistic: Statistic, values: np.ndarray) -> None:
    """Add values to a statistic.

    Raises:
        ConfigError: it is of a user's class, and raised something.
    """
    kind = type(statistic)
    with nullcontext() if kind.__module__.startswith("quark.") else users_code(f"the statistic {kind.__name__!r}"):
        statistic.update(values)


def _is_range(found: object) -> bool:
    """Whether a search returned two finite numbers, the smaller first."""
    if not (isinstance(found, tuple | list | np.ndarray) and len(found) == 2):
        return False
    numbers = all(isinstance(side, SupportsFloat) and np.shape(cast(Any, side)) == () for side in found)
    return numbers and -inf < float(found[0]) <= float(found[1]) < inf


@cache
def _keywords(function: Callable[..., Any], skip: int) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[skip:]


@cache
def _kinds(function: Callable[..., Any]) -> dict[str, Any]:
    """Types of arguments, as annotated, or those of plain defaults: 3 may be any number."""
    try:
        every = inspect.signature(function, eval_str=True).parameters.values()
    except NameError:  # an annotation that only a type checker knows
        every = inspect.signature(function).parameters.values()
    plain = {bool: bool, int: float, float: float, str: str}
    shown = {one.name: plain.get(type(one.default), object) for one in every}
    return shown | {one.name: one.annotation for one in every if one.annotation is not one.empty}


def _taken(settings: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in names}


ROWS = (
    RangeMethod("minmax", MinMax, minmax.search),
    RangeMethod("moving_minmax", MovingMinMax, minmax.search),
    RangeMethod("non_overflow", MinMax, non_overflow.search),
    RangeMethod("moving_non_overflow", MovingMinMax, non_overflow.search),
    RangeMethod("percentile", quantiles, percentile.search),
    RangeMethod("layerwise_percentile", outlined, layerwise_percentile.search),
    RangeMethod("mse", sampled, mse.search, mse.search_rows),
    RangeMethod("mse_most_common", Votes, mse_modes.most_common),
    RangeMethod("mse_percentile", Histogram, mse_modes.within_percentile),
    RangeMethod("entropy", Histogram, entropy.search),
    RangeMethod("distribution", Histogram, distribution.search),
)

SEARCHES: dict[str, RangeMethod] = {row.name: row for row in ROWS}
BUILT_IN = frozenset(SEARCHES)

#: What a registered method may ask for by name.
STATISTICS: dict[str, Callable[..., Statistic]] = {
    "extremes": MinMax,
    "moving_extremes": MovingMinMax,
    "histogram": Histogram,
}
#: Scales that may each have a statistic of their own.
MOST_ROWS = 1 << 16


def register_calibration(
    name: str, search: Callable[..., Range], statistic: str | Callable[..., Statistic] = "histogram"
) -> None:
    """Add a calibration method to both flows, under ``name``.

    Args:
        name: what configurations call it (``calibration_method``).
        search: ``search(statistic, grid, **settings) -> (lo, hi)``: the range of one scale. Its keyword arguments, and
            those of ``statistic``, are the settings of the method.
        statistic: what is collected: "extremes", "moving_extremes", "histogram" (``points()`` are values and weights),
            or a callable that makes a ``quark.observers.Statistic``.

    Raises:
        ConfigError: a name that is taken or no identifier, a statistic that does not exist, or no function.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise ConfigError(f"the name of a calibration method must be an identifier, not {name!r}")
    if name in SEARCHES or name in OWN_METHODS:
        raise ConfigError(f"the calibration method {name!r} exists already: choose another name")
    if isinstance(statistic, str):
        check_name("statistic", statistic, STATISTICS)
        statistic = STATISTICS[statistic]
    if not (callable(search) and callable(statistic)):
        raise ConfigError(f"the calibration method {name!r}: search and statistic must be callable")
    SEARCHES[name] = RangeMethod(name, statistic, search)


def unregister_calibration(name: str) -> None:
    """Remove what ``register_calibration`` added.

    Args:
        name: under which it was added.

    Raises:
        ConfigError: a method that is built in, or no such one.
    """
    registered = [one for one in SEARCHES if one not in BUILT_IN]
    if name not in registered:
        kind = "built in and stays" if name in BUILT_IN else "not registered"
        told = ", ".join(registered) or "none"
        raise ConfigError(f"the calibration method {name!r} is {kind}; registered: {told}")
    del SEARCHES[name]


def rows_of(
    method: str, count: int, grid: Grid, settings: Mapping[str, Any]
) -> tuple[RangeMethod, dict[str, Any], list[Statistic]]:
    """The row of a method, its complete settings, and fresh statistics for so many scales.

    Raises:
        ConfigError: more scales than statistics are kept for, or a setting that the method does not have.
    """
    row = SEARCHES[method]
    if count > MOST_ROWS:
        raise ConfigError(
            f"the calibration method {method!r} keeps a statistic per scale, at most {MOST_ROWS}, and this tensor has "
            f"{count} scales: use fewer and larger groups, or min/max"
        )
    row.check(settings)
    whole = {**settings, "grid": grid} if "grid" in row.settings else dict(settings)
    return row, whole, [row.observe(whole) for _ in range(count)]


#: Names of methods that an observer class of a flow brings along: no other flow, and no other class, can find them.
OWN_METHODS: set[str] = set()
