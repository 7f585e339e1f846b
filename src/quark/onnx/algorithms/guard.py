"""A change of the float model is put back where the quantized model is worse with it, on calibration data.

Both models are quantized and rounded to nearest. Few samples decide, so chance takes part (``losses.py``): the change
stays where the outputs together gain by more than the standard error, and no output loses by more than its own. A gain
that chance may explain is not worth a change, and on other data it is a loss as often as not.

The scales of both come from the same samples, at most ``JUDGED`` of them, spread over all. What is fine-tuned
afterwards does not count.

Not handled: a part of the change that would have been worth keeping (the whole of it stays or goes).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from quark.onnx.algorithms.context import Context
from quark.onnx.algorithms.losses import Loss, distance, gain
from quark.onnx.algorithms.samples import feeds_of
from quark.onnx.algorithms.trial import Trials
from quark.onnx.graph.report import PassReport

#: Samples that decide.
JUDGED = 32
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
    found = gain(with_it, without)
    if found.sure:
        return report
    model.graph = before.graph
    doubt = ", which may be chance" if found.mean > 0 and found.harmless else ""
    told = f"the loss was {without.total:.4g} without it and {with_it.total:.4g} with it"
    reason = f"put back: on calibration data {told}{doubt}"
    log.warning("%s is %s", config.name, reason)
    return replace(report, fired=0, refused=(*report.refused, reason))


def losses(reference: ir.Model, models: list[ir.Model], context: Context) -> list[Loss]:
    """The loss of every model once it is quantized; one sample is in memory at a time."""
    job, feeds = context.job, feeds_of(reference, context, JUDGED)
    trials = (Trials(model, replace(context, reader=feeds), context.known).quantized(job) for model in models)
    return [distance(reference, trial, feeds, job.options) for trial in trials]
