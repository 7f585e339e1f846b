"""Which calibration method the activations get, decided on unlabelled data, on samples that the ranges have not seen.

    loss(method, sample) = Σ over outputs  Σ (x − y)² / Σ x²      x: float, y: quantized and rounded to nearest

Every second sample of the calibration data gives ranges and the others the loss, then the other way round. No sample
matters more than another, and the configured method stays where none surely gains (``quark.measure.gain``). Afterwards
all samples calibrate with the method that was found. Weights keep their own method.

Not handled: a method per tensor, beyond what the configuration gives single layers already (they follow as well).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.config.job import Job
from quark.errors import ConfigError
from quark.measure.gain import surest, typical_gain
from quark.measure.outputs import Loss, joined
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.losses import distance, reference
from quark.onnx.algorithms.samples import feeds_of
from quark.onnx.algorithms.trial import Trials
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.run import Feed
from quark.onnx.quantization.config.algorithm import CalibrationSearchConfig
from quark.onnx.quantization.config.spec import METHODS, CalibMethod

log = logging.getLogger(__name__)


def search(
    model: ir.Model, context: JobContext, config: CalibrationSearchConfig
) -> tuple[JobContext, list[PassReport]]:
    """The context with the job whose calibration method was found best.

    Args:
        model: the prepared and transformed float model; comes back unchanged.

    Raises:
        ConfigError: the job is not static, or no activation has a range.
        DataError: there is no calibration data.
    """
    if context.job.mode != "static":
        raise ConfigError("CalibrationSearchConfig: only static quantization has ranges from calibration data")
    activations = context.job.rules.default.inputs
    if activations is None or not activations.ranged:
        raise ConfigError("CalibrationSearchConfig: the activations have no range that data could give")
    found = _measured(model, context, config, feeds_of(model, context, config.data_size))
    gains = {name: typical_gain(loss.each, found[_GIVEN][1].each) for name, (_, loss) in found.items()}
    best = surest(gains) or _GIVEN
    told = "; ".join(f"{name} {np.exp(-one.mean):.3f}" for name, one in gains.items())
    log.info("calibration_search: %s, by loss: %s", best, told)
    report = PassReport(config.name, int(best != _GIVEN), (f"loss on samples not calibrated on, relative: {told}",))
    return replace(context, job=found[best][0]), [report]


_GIVEN = "as configured"


def _measured(
    model: ir.Model, context: JobContext, config: CalibrationSearchConfig, feeds: Sequence[Feed]
) -> dict[str, tuple[Job, Loss]]:
    """Name of a method -> the job with it, and its loss. One quantized model is in memory at a time."""
    halves = (feeds[0::2], feeds[1::2]) if len(feeds) > 1 else (feeds,)
    trials = [Trials(model, replace(context, reader=list(half))) for half in halves]
    unseen = [reference(model, half, context.job.options) for half in reversed(halves)]
    found = {}
    for done, (name, job) in enumerate(_jobs(context.job, config), 1):
        losses = (
            distance(other, trial.quantized(job), job.options) for trial, other in zip(trials, unseen, strict=True)
        )
        found[name] = job, joined(losses)
        context.progress(config.name, done, len(config.methods) + 1)
    return found


def _jobs(job: Job, config: CalibrationSearchConfig) -> Iterator[tuple[str, Job]]:
    yield _GIVEN, job
    for method in config.methods:
        if isinstance(method, str):
            yield method, job.with_ranges(METHODS[CalibMethod[method]])
        else:
            yield f"Percentile {method:g}", job.with_ranges("percentile", (("percentile", float(method)),))
