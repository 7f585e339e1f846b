"""Reports: tables for a terminal and a self-contained page for a browser, made from plain values.

This package formats what it is handed; it measures nothing and knows no model type. ``quark.report.summary`` tells
what a Plan did, ``quark.report.html`` writes the page.
"""

from __future__ import annotations

import random

_state = random.getstate()  # rich draws a number when it is first imported, and the caller's seed stays the caller's

from quark.report.page import Measure, ModelView, Report  # noqa: E402
from quark.report.tables import decibels, duration, file_size, milliseconds, print_table, to_rich  # noqa: E402
from quark.report.values import ChartPoint, LayerView, Scatter, Table, TensorView  # noqa: E402

random.setstate(_state)

__all__ = [
    "ChartPoint",
    "LayerView",
    "Measure",
    "ModelView",
    "Report",
    "Scatter",
    "Table",
    "TensorView",
    "decibels",
    "duration",
    "file_size",
    "milliseconds",
    "print_table",
    "to_rich",
]
