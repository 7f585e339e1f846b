"""The stage ``adapt``: the Plan of a power-of-two flow is made to fit the NPU, the graph to compute what the NPU will.

Rules run in rounds until a round moves nothing, ``MaxLoopNum`` at most. All of it happens in the Plan, before a code is
computed: a weight whose position moves is rounded again from its float values.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan
from quark.onnx.graph.report import PassReport
from quark.onnx.npu.limits import limit
from quark.onnx.npu.rules import RULES
from quark.onnx.npu.simulate import simulate
from quark.onnx.npu.substitution import substitutions
from quark.onnx.qdq.parameters import set_biases


def adapt_and_tell(model: ir.Model, plan: Plan, job: Job, reader: Any) -> list[PassReport]:
    """``adapt``; what the device's functions cost by themselves, on calibration data, goes to the Plan's proposals."""
    plan.proposals += substitutions(model, plan, job, reader)
    return adapt(model, plan, job)


def adapt(model: ir.Model, plan: Plan, job: Job) -> list[PassReport]:
    """Edit ``model`` and the scales of ``plan`` in place."""
    reports = simulate(model, plan, job)
    if job.npu and job.options.NPULimitationCheck:
        rules = [rule for rule in RULES if getattr(job.options, rule.option) is not False]
        reports.append(limit(model, plan, rules, job.options.MaxLoopNum))
        set_biases(model, plan)
    return reports
