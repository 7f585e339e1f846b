"""A change of the float model is put back where the quantized model is worse with it, on calibration data.

    loss(model)   Σ over outputs  Σ (x − y)² / Σ x²      x: float, y: quantized and rounded to nearest, with and without

The scales of both come from the same samples, at most ``JUDGED`` of them. What is fine-tuned afterwards does not count.

Not handled: a part of the change that would have been worth keeping (the whole of it stays or goes).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import onnx_ir as ir

from quark.config.options import Options
from quark.onnx.algorithms.context import Context
from quark.onnx.algorithms.trial import Trials
from quark.onnx.compare import Distance
from quark.onnx.data import checked, inputs_of
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.run import Feed, Runner
from quark.onnx.ranges import samples_of

#: Samples that decide.
JUDGED = 16
log = logging.getLogger(__name__)
Transform = Callable[[ir.Model, Any, Context], PassReport]


def guarded(run: Transform, model: ir.Model, config: Any, context: Context) -> PassReport:
    """Run a transformation in place; where it does harm ``model`` is afterwards what it was.

    Returns:
        The report of the transformation; one that was put back has fired nowhere, and says why.
    """
    before = model.clone()
    report = run(model, config, context)
    if not report.fired:
        return report
    without, with_it = losses(before, [before, model], context)
    log.info("%s: loss %.6g without, %.6g with it", config.name, without, with_it)
    if with_it <= without:
        return report
    model.graph = before.graph
    reason = f"put back: on calibration data the loss was {without:.4g} without it and {with_it:.4g} with it"
    log.warning("%s is %s", config.name, reason)
    return replace(report, fired=0, refused=(*report.refused, reason))


def losses(reference: ir.Model, models: list[ir.Model], context: Context) -> list[float]:
    """The loss of every model once it is quantized; one sample is in memory at a time."""
    job, options = context.job, context.job.options
    found = []
    for model in models:
        trial = Trials(model, context, context.known, JUDGED).quantized(job)
        samples = samples_of(reference, options, context.reader)
        found.append(distance(reference, trial, islice(checked(samples, inputs_of(reference)), JUDGED), options))
    return found


def distance(reference: ir.Model, quantized: ir.Model, feeds: Iterable[Feed], options: Options) -> float:
    """The loss of a quantized model; one sample is in memory at a time."""
    names = [str(value.name) for value in reference.graph.outputs]
    providers, libraries = options.ExecutionProviders, options.UserCustomOpLibPath
    floats, runner = (Runner(one, names, (), providers, libraries) for one in (reference, quantized))
    found = {name: Distance() for name in names}
    for feed in feeds:
        expected, values = floats.run(feed).values, runner.run(feed).values
        for name, distances in found.items():
            if expected[name].dtype.kind == "f" and expected[name].shape == values[name].shape:
                distances.update(expected[name], values[name])
    return sum(_relative(distances) for distances in found.values())


def _relative(distance: Distance) -> float:
    return distance.noise / distance.signal if distance.signal else float(distance.noise > 0)
