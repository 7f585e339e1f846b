"""What the device's functions cost by themselves: the float model with them against the float model without.

A HardSigmoid in the place of a Sigmoid is another function, whatever the precision. No calibration and no tuning brings
back what it takes, so that the report tells it apart from what quantization costs. Over the first ``LOOKED`` samples,

    SQNR   10 log10(sum x^2 / sum (x - y)^2), dB    x: an output of the model, y: the same with the device's functions

and the output with the least counts. Not handled: corrections by constant factors, which are far above ``CLEAR``.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan
from quark.measure.distance import Distance
from quark.onnx.data import Remembering, checked, inputs_of, readable_again
from quark.onnx.graph.run import Feed, Runner
from quark.onnx.graph.session import Runtime
from quark.onnx.npu.simulate import SIMULATIONS, asked, wanted_in
from quark.onnx.ranges import samples_of
from quark.report.tables import decibels

#: Samples that are looked at, and the dB above which nothing has to be told.
LOOKED, CLEAR = 4, 40.0


def remembering(job: Job, reader: Any) -> Any:
    """The reader, with its first samples kept where they are looked at again and it can be read only once."""
    replaced = any(row.another and asked(row, job) for row in SIMULATIONS)
    once = replaced and reader is not None and not readable_again(reader)
    return Remembering(reader, LOOKED) if once else reader


def substitutions(model: ir.Model, plan: Plan, job: Job, reader: Any) -> list[str]:
    """A sentence per option that has the float model compute something clearly else.

    Args:
        model: the float model, before ``simulate``; comes back unchanged.
        reader: the calibration data.
    """
    told: list[str] = []
    if reader is None and not job.options.UseRandomData:
        return told
    for row in SIMULATIONS:
        if not row.another or not asked(row, job):
            continue
        changed = model.clone()
        fired = row.run(changed, wanted_in(plan)).fired
        if not fired:
            continue
        again = reader.first() if isinstance(reader, Remembering) else reader
        samples = islice(checked(samples_of(model, job.options, again), inputs_of(model)), LOOKED)
        name, sqnr = worst(model, changed, samples, job)
        if sqnr < CLEAR:
            told.append(
                f"{row.option} computes {row.another} in {fired} places: before any quantization, that alone leaves "
                f"{name!r} at {decibels(sqnr)}; {row.option}=False keeps the function"
            )
    return told


def worst(model: ir.Model, changed: ir.Model, samples: Iterable[Feed], job: Job) -> tuple[str, float]:
    """The output that differs most, and its SQNR; outputs whose size depends on values, and differs, say nothing."""
    names = [str(value.name) for value in model.graph.outputs]
    first, second = (Runner(one, names, (), Runtime.of(job.options)) for one in (model, changed))
    found = {name: Distance() for name in names}
    for feed in samples:
        values, others = first.run(feed).values, second.run(feed).values
        for name, distance in found.items():
            if values[name].dtype.kind == "f" and values[name].shape == others[name].shape:
                distance.update(values[name], others[name])
    return min(((name, one.sqnr) for name, one in found.items()), key=lambda pair: pair[1])
