"""The ranges of a job's activations: what has to be observed, on which data, by how many, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir

from quark.config.options import Options
from quark.config.plan import Plan
from quark.errors import ConfigError, NoSamplesError
from quark.observers import Histogram
from quark.onnx import data
from quark.onnx.algorithms.context import JobContext
from quark.onnx.calibration import Progress, Request, Statistics, find_ranges, observe
from quark.onnx.graph.session import Runtime
from quark.onnx.qdq.parameters import observed
from quark.onnx.qdq.settings import request_of
from quark.report import ModelView, Report, TensorView

#: Bars of a figure of ``SaveTensorHistFig``, and the folder it is written to.
BARS = 128
FIGURES = Path("tensor_hist") / "index.html"


def calibrated(model: ir.Model, plan: Plan, context: JobContext, progress: Progress) -> dict[str, Any]:
    """Ranges of the observed activations; no data is read when none is needed.

    Args:
        progress: called after every sample with the number done and, if it is known, the number there will be.
    """
    options = context.job.options
    requests = {t.name: request_of(t.spec, options, context.scratch.store) for t in observed(plan, options)}
    if not requests:
        return {}
    if options.SaveTensorHistFig and not any(request.search.needs_values for request in requests.values()):
        raise ConfigError(
            "SaveTensorHistFig: no tensor is calibrated with a histogram; choose Percentile, LayerwisePercentile, "
            "MinMSE, Entropy or Distribution"
        )
    samples = samples_of(model, options, context.reader)
    if not options.SaveTensorHistFig:
        if not context.journal and any("samples" in request.search.settings for request in requests.values()):
            samples = data.told_ahead(samples)
        total = samples.total  # asked once: a reader may have to count
        requests = {name: request.foreseeing(total) for name, request in requests.items()}
    statistics = _statistics(model, requests, samples, context, progress)
    ranges = find_ranges(requests, statistics)
    if options.SaveTensorHistFig:
        _save_figures(plan, statistics, ranges)
    return ranges


def _statistics(
    model: ir.Model, requests: dict[str, Request], samples: Any, context: JobContext, progress: Progress
) -> Statistics:
    if context.job.options.CalibWorkerNum == 1:
        return observe(model, requests, samples, Runtime.of(context.job.options), progress, context.journal)
    from quark.onnx.workers import observe_with_workers

    return observe_with_workers(model, requests, samples, context, progress)


def samples_of(model: ir.Model, options: Options, reader: Any) -> data.Samples:
    """The calibration data of a job: the reader's, or generated ones where that is asked for.

    Raises:
        NoSamplesError: there is no reader.
    """
    if reader is not None:
        return data.samples_of(reader, options.CalibDataSize)
    if not options.UseRandomData:
        raise NoSamplesError(
            "calibration data is needed: give calibration_data_reader, or set the option UseRandomData for a trial run"
        )
    from quark.onnx.random_data import RandomDataReader

    shapes, ranges = options.RandomDataReaderInputShape, options.RandomDataReaderInputDataRange
    return data.samples_of(RandomDataReader(model, shapes, ranges, options.CalibDataSize or 1))


def _save_figures(plan: Plan, statistics: Statistics, ranges: dict[str, Any]) -> None:
    """One page with the histogram of every tensor that has one and the range that was found in it."""
    views = []
    for name, statistic in statistics.items():
        if isinstance(statistic, Histogram):
            counts, edges = statistic.linear(BARS)
            low, high = ranges[name]
            middle = (edges[:-1] + edges[1:]) / 2
            clipped = float(counts[(middle < low) | (middle > high)].sum() / max(statistic.count, 1))
            views.append(TensorView(name, plan.tensors[name].spec.format, low, high, counts, edges, clipped))
    from quark.report.html import write_html

    write_html(Report("Histograms of the activations", (ModelView("float model", tensors=tuple(views)),)), FIGURES)
