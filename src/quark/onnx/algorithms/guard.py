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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from quark.measure.guard import Parts
from quark.measure.outputs import Loss
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.losses import distance, reference
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
    before, reports, parts = model.clone(), dict[float, PassReport](), Parts(config.name)

    def fires(part: float) -> bool:
        model.graph = before.clone().graph
        reports[part] = runs[part](model, config, context)
        return bool(reports[part].fired)

    best = parts.tried(runs, fires, _losses(before, model, context))
    last, report = reports.popitem()
    if not parts.gains:
        return report
    if best is None:
        model.graph = before.graph
        reason = parts.reason()
        log.warning("%s is %s", config.name, reason)
        return replace(report, fired=0, refused=(*report.refused, reason))
    if best != last:  # the last one run is what the model holds
        model.graph = before.graph
        report = runs[best](model, config, context)
    return report if best == 1 else replace(report, refused=(*report.refused, f"taken to the power of {best:g}"))


def _losses(before: ir.Model, model: ir.Model, context: JobContext) -> Iterator[Loss]:
    """The loss of a float model once it is quantized, then that of what became of it, as often as it is asked for; one
    quantized model is in memory at a time."""
    feeds, options = feeds_of(before, context, JUDGED), context.job.options
    answers, judged = reference(before, feeds, options), replace(context, reader=list(feeds))
    float_model = before
    while True:
        yield distance(answers, Trials(float_model, judged).quantized(judged.job), options)
        float_model = model
