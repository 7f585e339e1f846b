"""A trial quantization: the model as a job would make it, rounded to nearest, to be measured and thrown away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from functools import partial
from typing import Any

import onnx_ir as ir

from quark.config.job import Job
from quark.config.options import Options
from quark.config.plan import Plan
from quark.dataclass import dataclass
from quark.ir.surgery import apart
from quark.onnx.algorithms.context import JobContext
from quark.onnx.calibration import Request, find_ranges, observe
from quark.onnx.graph.session import Runtime
from quark.onnx.npu.adapt import adapt
from quark.onnx.qdq.modes import MODES
from quark.onnx.qdq.parameters import observed
from quark.onnx.qdq.second_type import REASON
from quark.onnx.qdq.settings import request_of
from quark.onnx.ranges import samples_of
from quark.onnx.scratch import Scratch

#: The tensor whose values are observed, and how.
Key = tuple[str, str]
Ranges = dict[Key, Any]
Read = Callable[[], Any]


@dataclass
class Trials:
    """Trial quantizations of one float model under several jobs; the data are read once for what they share.

    Attributes:
        model: comes back unchanged.
    """

    model: ir.Model
    context: JobContext
    ranges: Ranges = field(default_factory=dict)

    def quantized(self, job: Job) -> ir.Model:
        """The model under a job, before any fine-tuning."""
        model = apart(self.model)  # trials run beside each other
        samples = partial(samples_of, model, job.options, self.context.reader)
        (plan,) = planned(model, [job], self.context, samples, self.ranges)
        if job.mode == "static":
            adapt(model, plan, job)
        return MODES[job.mode].emit(model, plan, job.options)


def planned(model: ir.Model, jobs: Sequence[Job], context: JobContext, samples: Read, ranges: Ranges) -> list[Plan]:
    """The whole graph under every job, with scales; ``ranges`` that are known are not looked for, and are more then."""
    plans = [MODES[job.mode].place(model, job, context.known) for job in jobs]
    found = ranges_of(model, plans, jobs[0].options, samples, context.scratch, ranges) if jobs else []
    for job, plan, own in zip(jobs, plans, found, strict=True):
        MODES[job.mode].set_parameters(model, plan, own, job.options)
    return plans


def ranges_of(
    model: ir.Model, plans: Iterable[Plan], options: Options, samples: Read, scratch: Scratch, known: Ranges
) -> list[dict[str, Any]]:
    """The ranges of the activations of every plan. What is observed in one way is observed once, and the data are read
    for those only that are not ``known``, which afterwards are."""
    keys: list[dict[str, Key]] = []
    rounds: list[dict[str, Request]] = []
    homes: list[dict[Key, tuple[str, Request]]] = []
    for plan in plans:
        wanted = {one.name: request_of(one.spec, options, scratch.store) for one in observed(plan, options)}
        keys.append({name: (_source_of(model, plan, name), repr(one)) for name, one in wanted.items()})
        for name, key in keys[-1].items():
            if key in known or any(key in home for home in homes):
                continue
            alike = (k for k, one in enumerate(rounds) if name not in one or one[name].serves(wanted[name]))
            place = next(alike, len(rounds))
            if place == len(rounds):
                rounds, homes = [*rounds, {}], [*homes, {}]
            rounds[place].setdefault(name, wanted[name])
            homes[place][key] = name, wanted[name]
    for requests, home in zip(rounds, homes, strict=True):
        statistics = observe(model, requests, samples(), Runtime.of(options))
        for key, (name, request) in home.items():
            known |= {key: find_ranges({name: request}, statistics)[name]}
    return [{name: known[key] for name, key in one.items()} for one in keys]


def _source_of(model: ir.Model, plan: Plan, name: str) -> str:
    """The tensor whose values a tensor has: that before the Identity of a second type."""
    node = plan.nodes.get(name)
    if node is None or node.reason != REASON:
        return name
    made = next(one for one in model.graph if one.name == name)
    return "" if made.inputs[0] is None else _source_of(model, plan, str(made.inputs[0].name))
