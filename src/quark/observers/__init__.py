"""Calibration: statistics that stream (``MinMax``, ``MovingMinMax``, ``Histogram``), and the searches that turn them
into ranges (``SEARCHES``). Needs NumPy only."""

from __future__ import annotations

from quark.observers.histogram import Histogram
from quark.observers.registry import SEARCHES, RangeMethod
from quark.observers.statistics import MinMax, MovingMinMax, Statistic
from quark.observers.values import Memory, Store, Values

__all__ = [
    "SEARCHES",
    "Histogram",
    "Memory",
    "MinMax",
    "MovingMinMax",
    "RangeMethod",
    "Statistic",
    "Store",
    "Values",
]
