"""Write a page with the histogram of every activation on given samples."""

from __future__ import annotations

import argparse
from pathlib import Path

import onnx_ir as ir

from quark.numerics.affine import Grid
from quark.numerics.formats import get_format
from quark.observers import Histogram
from quark.onnx.calibration import Request, observe
from quark.onnx.data_files import PathDataReader
from quark.onnx.graph.model import load
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.random_data import RandomDataReader
from quark.onnx.tools.command import Argument, Tool, run_as_program
from quark.report import ModelView, Report, TensorView
from quark.report.html import write_html

BARS = 128


def run(given: argparse.Namespace) -> str:
    """Count, and write the page."""
    model = load(given.input)
    infer_shapes(model)
    names = [str(value.name) for node in model.graph for value in node.outputs if value.dtype == ir.DataType.FLOAT]
    requests = {name: Request(Grid(get_format("int8")), "percentile") for name in names}
    data = RandomDataReader(model) if given.data_path is None else PathDataReader(given.input, given.data_path)
    statistics = observe(model, requests, data)
    views = [view for name, one in statistics.items() if (view := view_of(name, one)) is not None]
    write_html(
        Report("Histograms of the activations", (ModelView("float model", tensors=tuple(views)),)), Path(given.output)
    )
    return f"{len(views)} histograms; written: {given.output}"


def view_of(name: str, statistic: object) -> TensorView | None:
    """The histogram that was counted."""
    if not isinstance(statistic, Histogram) or not statistic.count:
        return None
    counts, edges = statistic.linear(BARS)
    return TensorView(name, "float32", float(edges[0]), float(edges[-1]), counts, edges, 0.0)


TOOL = Tool(
    __file__,
    __doc__,
    run,
    (Argument("data_path", "Samples: a folder of .npy files; generated ones by default.", str, None),),
    output_flags=("output_path",),
    writes="text",
)

if __name__ == "__main__":
    run_as_program(TOOL)
