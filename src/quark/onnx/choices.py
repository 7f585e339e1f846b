"""What is chosen on the data before tensors are placed: calibration method, mixed precision, nodes that stay float.

What chooses is imported where a job asks for it: most jobs ask for none, and their users wait for the imports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan
from quark.config.rules import NodeInfo
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.mixed import Mixed
from quark.onnx.graph.report import PassReport
from quark.onnx.quantization.config.algorithm import AutoMixprecisionConfig, CalibrationSearchConfig

if TYPE_CHECKING:
    from quark.onnx.tuned_speed import Tuned


def search_calibration(model: ir.Model, context: JobContext) -> tuple[JobContext, list[PassReport]]:
    """The context with the calibration method that ``CalibrationSearchConfig`` finds best."""
    config = next((one for one in context.job.algorithms if isinstance(one, CalibrationSearchConfig)), None)
    if config is None:
        return context, []
    from quark.onnx.algorithms import calibration_search

    return calibration_search.search(model, context, config)


def mix(model: ir.Model, context: JobContext) -> Mixed:
    """The job with the precisions that ``AutoMixprecisionConfig`` gives its layers."""
    config = next((one for one in context.job.algorithms if isinstance(one, AutoMixprecisionConfig)), None)
    if config is None:
        return Mixed(context.job)
    from quark.onnx.algorithms import mixprecision

    return mixprecision.mix(model, context, config)


def foreseen(model: ir.Model, job: Job, known: Sequence[NodeInfo]) -> Job:
    """The job as ``mix`` will make it, where that can be told without data; otherwise as it is."""
    config = next((one for one in job.algorithms if isinstance(one, AutoMixprecisionConfig)), None)
    if config is None:
        return job
    from quark.onnx.algorithms import mixprecision

    return mixprecision.foreseen(model, job, known, config)


def tune_speed(model: ir.Model, context: JobContext) -> tuple[JobContext, Tuned | None]:
    """The context with the nodes that ``TuneSpeed`` finds faster in float; None where it is not to find any."""
    if not context.job.options.TuneSpeed or context.job.options.TunedFloat is not None:
        return context, None
    from quark.onnx import tuned_speed

    return tuned_speed.tune_speed(model, context)


def choose_inside(body: ir.Model, context: JobContext) -> tuple[JobContext, Callable[[Plan], list[PassReport]]]:
    """What is chosen for a body by itself, calibration method and nodes that stay float; what writes it into a plan."""
    context, decided = search_calibration(body, context)
    context, tuned = tune_speed(body, context)
    return context, lambda plan: [*decided, *(tuned.into_plan(plan) if tuned else ())]
