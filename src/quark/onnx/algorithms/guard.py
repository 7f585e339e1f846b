"""A change of the float model is put back where the quantized model is worse with it, on calibration data.

Both models are quantized and rounded to nearest. Few samples decide, so chance takes part (``quark.measure.gain``):
the change stays where the outputs gain, on average, by more than the standard error, and none of them loses more than a
tenth of that. A gain that chance may explain is not worth a change: on other data it is a loss as often as not.

A transformation can go a part of its way; the part that gains most is taken. The scales of all come from the same
samples, at most ``JUDGED`` of them, spread over all. What is fine-tuned afterwards does not count.

Not handled: places of the model where a change would have been worth keeping (it stays or goes everywhere).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from quark.measure.gain import Gain, gain, surest
from quark.measure.outputs import Loss
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.losses import Reference, distance
from quark.onnx.algorithms.samples import feeds_of
from quark.onnx.algorithms.trial import Trials
from quark.onnx.graph.report import PassReport

#: Samples that decide.
JUDGED = 32
log = logging.getLogger(__name__)
Transform = Callable[[ir.Model, Any, JobContext], PassReport]


def guarded(runs: Mapping[float, Transform], model: ir.Model, config: Any, context: JobContext) -> PassReport:
    """Run a transformation in place, as far as it helps; where it does harm ``model`` is afterwards what it was.

    Args:
        runs: the transformation by how far it goes, 1 being all of it.

    Returns:
        The report of the transformation; one that was put back has fired nowhere, and says why.
    """
    before = model.clone()
    gains: dict[float, Gain] = {}
    told: dict[float, float] = {}
    without: Loss | None = None
    for part, run in runs.items():
        model.graph = before.clone().graph
        report = run(model, config, context)
        if not report.fired:
            if not gains:
                return report
            break  # so short a way changes nothing; those before may have helped
        if without is None:
            feeds = feeds_of(before, context, JUDGED)
            reference, judged = Reference(before, feeds, context.job.options), replace(context, reader=list(feeds))
            without = _loss(reference, before, judged)
            told[0.0] = without.total
        found = _loss(reference, model, judged)
        gains[part], told[part] = gain(found.noise, without.noise), found.total
        log.info("%s: loss %.6g without, %.6g with %g of it", config.name, without.total, found.total, part)
    best = surest(gains)
    if best is not None:
        if best != part:  # the last one run is what the model holds
            model.graph = before.graph
            report = runs[best](model, config, context)
        return report if best == 1 else replace(report, refused=(*report.refused, f"taken to the power of {best:g}"))
    model.graph = before.graph
    reason = _reason(gains, told[0.0], told)
    log.warning("%s is %s", config.name, reason)
    return replace(report, fired=0, refused=(*report.refused, reason))


def _reason(gains: Mapping[float, Gain], without: float, losses: Mapping[float, float]) -> str:
    """Why nothing of it stays."""
    part = max(gains, key=lambda one: gains[one].mean)
    found = gains[part]
    doubt = ", which may be chance" if 0 < found.mean <= found.error else ""
    traded = ", and one of the outputs is worse" if found.mean > found.error else ""
    much = "it" if part == 1 else f"it to the power of {part:g}"
    with_it = f"{losses[part]:.4g} with {much}{doubt}{traded}"
    return f"put back: on calibration data the loss was {without:.4g} without it and {with_it}"


def _loss(reference: Reference, model: ir.Model, context: JobContext) -> Loss:
    """The loss of a float model once it is quantized; one quantized model is in memory at a time."""
    return distance(reference, Trials(model, context, context.known).quantized(context.job), context.job.options)
