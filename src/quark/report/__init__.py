"""Reports: tables for a terminal and a self-contained page for a browser, made from plain values.

This package formats what it is handed; it measures nothing and knows no model type. ``quark.report.summary`` tells
what a Plan did, ``quark.report.html`` writes the page.
"""

from __future__ import annotations

from quark.report.tables import decibels, file_size, milliseconds, print_table, to_rich
from quark.report.values import Chart, Layer, Report, Table, TensorView

__all__ = [
    "Chart",
    "Layer",
    "Report",
    "Table",
    "TensorView",
    "decibels",
    "file_size",
    "milliseconds",
    "print_table",
    "to_rich",
]
