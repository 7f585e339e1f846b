"""The stage ``adapt``: the Plan of a power-of-two flow is made to fit the NPU, the graph to compute what the NPU will.

Rules run in rounds until a round moves nothing, ``MaxLoopNum`` at most. All of it happens in the Plan, before a code is
computed: a weight whose position moves is rounded again from its float values.
"""

from __future__ import annotations

import logging

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan
from quark.onnx.graph.report import PassReport
from quark.onnx.npu.positions import Positions
from quark.onnx.npu.rules import RULES, Rule
from quark.onnx.npu.simulate import simulate
from quark.onnx.qdq.parameters import set_biases

_log = logging.getLogger(__name__)


def adapt(model: ir.Model, plan: Plan, job: Job) -> list[PassReport]:
    """Edit ``model`` and the scales of ``plan`` in place."""
    reports = simulate(model, plan, job)
    if job.npu and job.options.NPULimitationCheck:
        reports.append(_limit(model, plan, job))
        set_biases(model, plan)
    return reports


def _limit(model: ir.Model, plan: Plan, job: Job) -> PassReport:
    """Apply the rules in rounds; every move is written into the Plan."""
    rules = [rule for rule in RULES if getattr(job.options, rule.option) is not False]
    nodes = {rule: [node for node in model.graph if node.op_type in rule.op_types] for rule in rules}
    positions, moved, unfinished = Positions(plan), 0, True
    for _ in range(job.options.MaxLoopNum):
        counts = {rule: _apply(rule, nodes[rule], positions) for rule in rules}
        moved += sum(counts.values())
        unfinished = any(count for rule, count in counts.items() if rule.repeats)
        if not unfinished:
            break
    note = f"positions still moved after MaxLoopNum = {job.options.MaxLoopNum} rounds of the NPU's rules"
    if unfinished:
        _log.warning(note)
    return PassReport("npu_limits", moved, (note,) if unfinished else ())


def _apply(rule: Rule, nodes: list[ir.Node], positions: Positions) -> int:
    """How many positions one rule moved."""
    return sum(
        positions.move(name, position, f"{rule.name} of {node.name}")
        for node in nodes
        for name, position in rule.moves(node, positions)
    )
