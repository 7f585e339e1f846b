"""Reports: tables for a terminal and a self-contained page for a browser, made from plain values.

This package formats what it is handed; it measures nothing and knows no model type. ``quark.report.html`` writes
the page; it is not imported here because plotly is heavy.
"""

from __future__ import annotations

from quark.report.summary import print_summary, summary_tables
from quark.report.tables import decibels, file_size, milliseconds, print_table, to_rich
from quark.report.values import Layer, Report, Table, TensorView

__all__ = [
    "Layer",
    "Report",
    "Table",
    "TensorView",
    "decibels",
    "file_size",
    "milliseconds",
    "print_summary",
    "print_table",
    "summary_tables",
    "to_rich",
]
