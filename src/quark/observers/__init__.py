"""Calibration: statistics that stream (``MinMax``, ``MovingMinMax``, ``Histogram``), and the searches that turn them
into ranges (``SEARCHES``). Needs NumPy only."""

from __future__ import annotations

from quark.observers.histogram import Histogram
from quark.observers.registry import SEARCHES, Search
from quark.observers.statistics import MinMax, MovingMinMax, Statistic

__all__ = ["SEARCHES", "Histogram", "MinMax", "MovingMinMax", "Search", "Statistic"]
