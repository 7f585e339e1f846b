"""Write a page with the histogram of every weight."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.model import load
from quark.onnx.tools.command import Argument, Tool, boolean, run_as_program
from quark.report import ModelView, Report, TensorView
from quark.report.html import write_html

BARS = 128


def run(given: argparse.Namespace) -> str:
    """Write the page."""
    views = [
        view for value in load(given.input).graph.initializers.values() for view in views_of(value, given.perchannel)
    ]
    write_html(
        Report("Histograms of the weights", (ModelView("float model", tensors=tuple(views)),)), Path(given.output)
    )
    return f"{len(views)} histograms; written: {given.output}"


def views_of(value: ir.Value, per_channel: bool) -> list[TensorView]:
    """The histogram of a float weight, or one for each slice of its first axis."""
    array = None if value.const_value is None else value.const_value.numpy()
    if array is None or array.dtype.kind != "f" or array.size < 2:
        return []
    slices = {f"{value.name}[{k}]": row for k, row in enumerate(array)} if per_channel and array.ndim > 1 else {}
    return [view_of(name, one) for name, one in (slices or {str(value.name): array}).items()]


def view_of(name: str, array: np.ndarray) -> TensorView:
    """The histogram of one array."""
    flat = array.astype(np.float64).ravel()
    finite = flat[np.isfinite(flat)]
    counts, edges = np.histogram(finite, BARS)
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return TensorView(name, str(array.dtype), low, high, counts, edges, 0.0)


TOOL = Tool(
    __file__,
    __doc__,
    run,
    (Argument("perchannel", "One histogram per slice of the first axis.", boolean, False),),
    writes="text",
)

if __name__ == "__main__":
    run_as_program(TOOL)
