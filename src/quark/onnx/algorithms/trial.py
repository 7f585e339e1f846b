"""A trial quantization: the model as a job would make it, rounded to nearest, to be measured and thrown away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan
from quark.config.rules import NodeInfo
from quark.dataclass import dataclass
from quark.ir.surgery import apart
from quark.onnx.algorithms.context import JobContext
from quark.onnx.calibration import find_ranges, observe
from quark.onnx.graph.session import Runtime
from quark.onnx.npu.adapt import adapt
from quark.onnx.qdq.modes import MODES
from quark.onnx.qdq.parameters import observed
from quark.onnx.qdq.second_type import REASON
from quark.onnx.qdq.settings import request_of
from quark.onnx.ranges import samples_of


@dataclass
class Trials:
    """Trial quantizations of one float model under several jobs; the data are read once for what they share.

    Attributes:
        model: comes back unchanged.
        known: the nodes that the user may name.
    """

    model: ir.Model
    context: JobContext
    known: Sequence[NodeInfo]
    ranges: dict[tuple[str, str], Any] = field(default_factory=dict)

    def quantized(self, job: Job) -> ir.Model:
        """The model under a job, before any fine-tuning."""
        model, mode = apart(self.model), MODES[job.mode]  # trials run beside each other
        plan = mode.place(model, job, self.known)
        mode.set_parameters(model, plan, self._ranges(model, plan, job), job.options)
        if job.mode == "static":
            adapt(model, plan, job)
        return mode.emit(model, plan, job.options)

    def _ranges(self, model: ir.Model, plan: Plan, job: Job) -> dict[str, Any]:
        """The ranges of a plan's activations; the data are read for those only that no earlier plan needed."""
        options = job.options
        requests = {t.name: request_of(t.spec, options, self.context.scratch.store) for t in observed(plan, options)}
        keys = {name: (_source_of(model, plan, name), repr(one)) for name, one in requests.items()}
        missing = {name: one for name, one in requests.items() if keys[name] not in self.ranges}
        if missing:
            samples = samples_of(model, options, self.context.reader)
            found = find_ranges(missing, observe(model, missing, samples, Runtime.of(options)))
            self.ranges |= {keys[name]: value for name, value in found.items()}
        return {name: self.ranges[key] for name, key in keys.items()}


def _source_of(model: ir.Model, plan: Plan, name: str) -> str:
    """The tensor whose values a tensor has: that before the Identity of a second type."""
    node = plan.nodes.get(name)
    if node is None or node.reason != REASON:
        return name
    made = next(one for one in model.graph if one.name == name)
    return "" if made.inputs[0] is None else _source_of(model, plan, str(made.inputs[0].name))
