"""A change of the float model is put back where the quantized model is worse with it, on calibration data.

Both models are quantized and rounded to nearest. Few samples decide, so chance takes part (``losses.py``): the change
stays where the outputs together gain by more than the standard error, and no output loses by more than its own. A gain
that chance may explain is not worth a change, and on other data it is a loss as often as not.

The scales of both come from the same samples, at most ``JUDGED`` of them. What is fine-tuned afterwards does not count.

Not handled: a part of the change that would have been worth keeping (the whole of it stays or goes).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import onnx_ir as ir

from quark.onnx.algorithms.context import Context
from quark.onnx.algorithms.losses import Loss, distance, gain
from quark.onnx.algorithms.trial import Trials
from quark.onnx.data import checked, inputs_of
from quark.onnx.graph.report import PassReport
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
    job, options = context.job, context.job.options
    found = []
    for model in models:
        trial = Trials(model, context, context.known, JUDGED).quantized(job)
        samples = samples_of(reference, options, context.reader)
        found.append(distance(reference, trial, islice(checked(samples, inputs_of(reference)), JUDGED), options))
    return found
