"""Training is undone where it makes the whole model worse on calibration data.

Every layer may come nearer to its own target while the model as a whole gets worse, because later layers fitted the
old error. The training of all layers is kept if the model as a whole does not lose, and no output loses more than
chance and a tenth of what the outputs gain (``quark.measure.gain``). Otherwise training is undone, then re-applied to
half the layers at a time, in the order of the graph; only clear gains are kept. A half without a clear gain is divided
again, down to a sixteenth of the layers.

At most ``JUDGED`` samples decide, spread over all that there are, those included that ``data_size`` leaves out of
training; their inputs are in memory, and the float model's answers to them. Weights on trial are rounded as they will
be in the file.

Not handled: layers that help only together with others of another half.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.config.plan import Plan, TensorPlan
from quark.dataclass import dataclass
from quark.ir.surgery import constant_array, name_of, set_constant
from quark.measure.guard import kept
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.fake_quantized import fake_quantized, rounded
from quark.onnx.algorithms.losses import distance, reference
from quark.onnx.algorithms.samples import feeds_of
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.run import trim_heap

#: Samples that decide.
JUDGED = 64
log = logging.getLogger(__name__)
Tune = Callable[[ir.Model, Plan, Any, JobContext], PassReport]


@dataclass(frozen=True)
class ConstantState:
    """The contents and the plan of one constant."""

    content: ir.TensorProtocol
    plan: TensorPlan | None

    def same(self, other: ConstantState) -> bool:
        """Whether nothing has been put in its place."""
        return self.content is other.content and self.plan is other.plan


@dataclass(frozen=True)
class NodeChange:
    """What became of the constants of one node: by name, before and after."""

    node: str
    before: Mapping[str, ConstantState]
    after: Mapping[str, ConstantState]


def guarded_tune(run: Tune, model: ir.Model, plan: Plan, config: Any, context: JobContext) -> PassReport:
    """Run an algorithm that changes weights at final scales, in place; what makes the model worse is put back.

    Returns:
        The report of the algorithm, with a sentence about what was put back.
    """
    options, before = context.job.options, _states(model, plan)
    expected = reference(context.reference or model, feeds_of(model, context, JUDGED), options).fixed()
    trim_heap()
    without = distance(expected, fake_quantized(model, plan, options), options, as_given=True)
    report = run(model, plan, config, context)
    trim_heap()
    changes = _changes(model, plan, before)
    if not report.fired or not changes:
        return report
    trial = _Trial(model, plan, fake_quantized(model, plan, options))
    stay, reason = kept(
        changes,
        without,
        lambda: distance(expected, trial.fake_model, options, as_given=True),
        trial.put,
        lambda change: change.node,
    )
    if not reason:
        return report
    log.warning("%s is %s", config.name, reason)
    fired = max(report.fired - len(changes) + len(stay), 0) if stay else 0
    return replace(report, fired=fired, refused=(*report.refused, reason))


def _states(model: ir.Model, plan: Plan) -> dict[str, ConstantState]:
    """Every constant of the graph; contents are shared, not copied."""
    values = model.graph.initializers.items()
    return {
        name: ConstantState(value.const_value, plan.tensors.get(name))
        for name, value in values
        if value.const_value is not None
    }


def _changes(model: ir.Model, plan: Plan, before: Mapping[str, ConstantState]) -> list[NodeChange]:
    """What is no longer what it was, by the first node that reads it, in the order of the graph."""
    now = _states(model, plan)
    open_names = {name for name, state in now.items() if name in before and not state.same(before[name])}
    found = []
    for node in model.graph:
        names = [str(one.name) for one in node.inputs if one is not None and one.name in open_names]
        if names:
            open_names.difference_update(names)
            old, new = ({name: states[name] for name in names} for states in (before, now))
            found.append(NodeChange(name_of(node), old, new))
    return found


@dataclass
class _Trial:
    """The model, and its fake-quantized copy that is measured; both always hold the same weights."""

    model: ir.Model
    plan: Plan
    fake_model: ir.Model

    def put(self, changes: Sequence[NodeChange], after: bool) -> None:
        """Give some layers what they had after or before the algorithm."""
        for change in changes:
            for name, state in (change.after if after else change.before).items():
                value = self.model.graph.initializers[name]
                value.const_value = state.content
                array = np.asarray(constant_array(value))
                if state.plan is not None:
                    self.plan.put(state.plan)
                    array = np.asarray(rounded(array, state.plan)).astype(array.dtype)
                set_constant(self.fake_model.graph.initializers[name], array)
