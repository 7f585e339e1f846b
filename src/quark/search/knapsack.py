"""One option per layer: the multiple-choice knapsack problem, by integer programming.

    minimize    Σ objective[i, j] x[i, j]        subject to   Σ_j x[i, j] = 1 for every layer i
                                                              Σ load[i, j] x[i, j] <= limit,   x binary

Solved by HiGHS through ``scipy.optimize.milp`` (branch and cut), to optimality; by sorting where all layers have the
same choice of two. Options of equal objective are told
apart by further runs under the optimum of those before (lexicographic).

H. Kellerer, U. Pferschy, D. Pisinger: Knapsack Problems, chapter 11 (2004).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from quark.errors import ConfigError

#: How far a sum may be over its limit, relative to it: the solver works in float64 with tolerances of this size.
SLACK = 1e-9


def choose(objective: np.ndarray, load: np.ndarray, limit: float, *ties: np.ndarray) -> np.ndarray | None:
    """The option of every layer.

    Args:
        objective: what is minimized [layers, options]; infinite where an option does not exist.
        load: what is limited [layers, options]; infinite where an option is forbidden.
        limit: the most that the chosen loads may add up to.
        ties: decide among equal objectives, the first one first [layers, options].

    Returns:
        The number of an option for every layer [layers]; ``None`` where no choice keeps the limit.

    Raises:
        ConfigError: a layer without any option, or scipy is missing.
    """
    goals = [np.asarray(goal, np.float64) for goal in (objective, *ties)]
    load = np.asarray(load, np.float64)
    allowed = np.isfinite(goals[0]) & np.isfinite(load)
    if not allowed.any(axis=1).all():
        row = int(np.flatnonzero(~allowed.any(axis=1))[0])
        raise ConfigError(f"layer {row} has no option that fits it")
    least = np.where(allowed, load, np.inf).min(axis=1).sum()
    if limit < least - SLACK * abs(least):
        return None
    found = _sorted(goals[0], load, limit) if all(goal is load for goal in ties) else None
    limits = [(load, max(limit, least))]
    for goal in goals if found is None else ():
        better = _solve(goal, allowed, limits)
        if better is None:  # the optimum before is met only up to the solver's tolerance
            return found
        found = better
        limits.append((goal, float(goal[np.arange(len(found)), found].sum())))
    return found


def _sorted(objective: np.ndarray, load: np.ndarray, limit: float) -> np.ndarray | None:
    """The optimum, of the least load, without a solver: where every layer has two options, and in all layers one of
    them costs the same less, as many of these as the limit allows. ``None`` where that is not so."""
    if objective.shape[1] != 2 or not np.isfinite(objective).all():
        return None
    gaps, rows, cheap = np.abs(np.diff(objective)), np.arange(len(load)), objective.argmin(axis=1)
    if not gaps.all() or np.ptp(gaps) or not np.isfinite(load[rows, 1 - cheap]).all():
        return None
    more = load[rows, cheap] - load[rows, 1 - cheap]
    order = np.argsort(more, kind="stable")
    sums = load[rows, 1 - cheap].sum() + np.cumsum(more[order])
    count = np.flatnonzero(sums <= limit + SLACK * abs(limit)).max(initial=-1) + 1
    return np.where(np.isin(rows, order[:count]), cheap, 1 - cheap)


def _solve(objective: np.ndarray, allowed: np.ndarray, limits: list[tuple[np.ndarray, float]]) -> np.ndarray | None:
    """One run of the solver over the allowed options."""
    milp, LinearConstraint, Bounds, sparse = _scipy()
    layers, columns = np.nonzero(allowed)
    ones = np.ones(len(layers))
    each = sparse.csr_array((ones, (layers, np.arange(len(layers)))), shape=(len(allowed), len(layers)))
    constraints = [LinearConstraint(each, 1, 1)]
    for load, limit in limits:
        row, unit = load[allowed], _unit(load[allowed], limit)
        constraints.append(LinearConstraint(row[None] / unit, -np.inf, limit / unit * (1 + SLACK)))
    cost = objective[allowed]
    with _silent():
        result = milp(
            cost / _unit(cost, 0.0),
            integrality=ones,
            bounds=Bounds(0, 1),
            constraints=constraints,
            options={"mip_rel_gap": 0.0},
        )
    if result.x is None:
        return None
    chosen = np.full(len(allowed), -1)
    taken = result.x > 0.5
    chosen[layers[taken]] = columns[taken]
    return chosen


def _unit(values: np.ndarray, limit: float) -> float:
    """A number that brings values and limit near 1, where the solver's absolute tolerances mean something."""
    return float(max(np.abs(values).max(initial=0.0), abs(limit))) or 1.0


@contextmanager
def _silent() -> Iterator[None]:
    """Nothing reaches standard output: HiGHS prints lines of its own there, whatever it is told (scipy 1.17), and what
    reads our JSON would meet them. They wait in C's buffer, so that is flushed before and after."""
    flush = ctypes.CDLL("ucrtbase" if os.name == "nt" else None).fflush
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output
        yield
        return
    flush(None)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)


def _scipy() -> tuple[Any, Any, Any, Any]:
    try:
        from scipy import sparse
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise ConfigError("the search needs the package scipy: pip install scipy") from error
    return milp, LinearConstraint, Bounds, sparse
