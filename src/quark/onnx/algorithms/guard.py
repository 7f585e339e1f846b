"""A change of the float model is put back where the quantized model is worse with it, on calibration data.

    loss(model)   Σ over outputs  Σ (x − y)² / Σ x²      x: float, y: quantized and rounded to nearest, with and without

Few samples decide, so chance takes part: the change stays where its loss is smaller, and where the mean of
log(loss with / loss without) over the samples is below zero by more than its standard error. A gain that chance may
explain is not worth a change, and on other data it is a loss as often as not.

The scales of both come from the same samples, at most ``JUDGED`` of them. What is fine-tuned afterwards does not count.

Not handled: a part of the change that would have been worth keeping (the whole of it stays or goes).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
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
_TINY = 1e-30
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
    log.info("%s: loss %.6g without, %.6g with it", config.name, without.total, with_it.total)
    if surely_smaller(with_it, without):
        return report
    model.graph = before.graph
    doubt = ", which may be chance" if with_it.total < without.total else ""
    told = f"the loss was {without.total:.4g} without it and {with_it.total:.4g} with it"
    reason = f"put back: on calibration data {told}{doubt}"
    log.warning("%s is %s", config.name, reason)
    return replace(report, fired=0, refused=(*report.refused, reason))


@dataclass(frozen=True)
class Loss:
    """The loss over all samples, and over each alone."""

    total: float
    each: tuple[float, ...]


def surely_smaller(loss: Loss, other: Loss) -> bool:
    """Whether a loss is below another by more than chance, compared sample by sample; one sample knows no chance."""
    mean, error = compared(loss, other)
    return loss.total < other.total and (mean < -error or not error)


def compared(loss: Loss, other: Loss) -> tuple[float, float]:
    """The mean of log(loss / other) over the samples, and its standard error (0 of one sample)."""
    ratios = np.log(np.maximum(loss.each, _TINY) / np.maximum(other.each, _TINY))
    error = 0.0 if len(ratios) < 2 else float(ratios.std(ddof=1)) / math.sqrt(len(ratios))
    return float(ratios.mean()), error


def losses(reference: ir.Model, models: list[ir.Model], context: Context) -> list[Loss]:
    """The loss of every model once it is quantized; one sample is in memory at a time."""
    job, options = context.job, context.job.options
    found = []
    for model in models:
        trial = Trials(model, context, context.known, JUDGED).quantized(job)
        samples = samples_of(reference, options, context.reader)
        found.append(distance(reference, trial, islice(checked(samples, inputs_of(reference)), JUDGED), options))
    return found


def distance(reference: ir.Model, quantized: ir.Model, feeds: Iterable[Feed], options: Options) -> Loss:
    """The loss of a quantized model; one sample is in memory at a time."""
    names = [str(value.name) for value in reference.graph.outputs]
    providers, libraries = options.ExecutionProviders, options.UserCustomOpLibPath
    floats, runner = (Runner(one, names, (), providers, libraries) for one in (reference, quantized))
    found, each = {name: Distance() for name in names}, []
    for feed in feeds:
        expected, values = floats.run(feed).values, runner.run(feed).values
        here = {name: Distance() for name in names}
        for name in names:
            if expected[name].dtype.kind == "f" and expected[name].shape == values[name].shape:
                for distances in (found[name], here[name]):
                    distances.update(expected[name], values[name])
        each.append(sum(_relative(distances) for distances in here.values()))
    return Loss(sum(_relative(distances) for distances in found.values()), tuple(each))


def _relative(distance: Distance) -> float:
    return distance.noise / distance.signal if distance.signal else float(distance.noise > 0)
