"""``TuneSpeed``: this machine's own timings decide which nodes stay float, instead of the table of ``qdq/slower.py``.

Several divisions of the model into float and integers are quantized on a few samples and run side by side, as a user
runs them: all that can be in integers, what the table proposes, and the minimum cut with the kernels' times on this
machine (the profiler's, of the float model and of the one in integers). The fastest is taken; the table's where another
is faster by less than ``SAME``. What was decided goes into the option ``TunedFloat``, by which the same bytes are made
again without timing, and into the Plan with the times and the processor's name.

Not handled: the float model as a whole (the verdict compares with it), accuracy.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan
from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.files.private import private_folder
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.samples import feeds_of
from quark.onnx.algorithms.trial import Trials
from quark.onnx.data import Feed
from quark.onnx.graph import model as files
from quark.onnx.graph.report import PassReport
from quark.onnx.kernel_times import layer_seconds, owners
from quark.onnx.latency import quiet_seconds
from quark.onnx.qdq import slower
from quark.onnx.qdq.modes import MODES

#: Samples that the trials are calibrated on, seconds that they take turns, and what counts as equally fast.
SAMPLES, SECONDS, SAME = 4, 4.0, 0.02
STAGE = "tune_speed"
INTEGERS, TABLE, KERNELS = "all in integers", "by the table", "by this machine's kernels"
FLOAT = "all in float"


@dataclass(frozen=True)
class Tuned:
    """What was found.

    Attributes:
        names: nodes that stay float.
        record: for the Plan: the processor, threads, milliseconds an inference of each division, the one taken.
    """

    names: tuple[str, ...]
    record: Mapping[str, Any]

    def words(self) -> str:
        """A sentence for the summary."""
        times = ", ".join(f"{name} {value:.3g} ms" for name, value in self.record["milliseconds"].items())
        return (
            f"TuneSpeed: {len(self.names)} nodes stay float, the fastest of: {times}. Measured on, and good for, "
            f"{self.record['processor']}, {self.record['threads']} threads"
        )

    def into_plan(self, plan: Plan) -> tuple[PassReport]:
        """Write what was found into the Plan; a row of the summary."""
        plan.tuned = {**self.record, "TunedFloat": list(self.names)}
        return (PassReport(STAGE, len(self.names), (self.words(),)),)


def tune_speed(model: ir.Model, context: JobContext) -> tuple[JobContext, Tuned]:
    """What ``TuneSpeed`` finds for a prepared model, and the context with it as its job's option.

    Raises:
        ConfigError: the quantization is not static.
        DataError: there is no calibration data.
    """
    job = context.job
    if not job.runs_samples:
        raise ConfigError("TuneSpeed times static integer kernels; dynamic and weight-only quantization have one form")
    kept = context.journal.done(STAGE, str)
    if kept is not None:
        found = json.loads(kept)
        tuned = Tuned(tuple(found["names"]), found["record"])
    else:
        tuned = _measured(model, context)
        context.journal.finish(STAGE, json.dumps({"names": tuned.names, "record": tuned.record}))
    options = job.options.changed({"TunedFloat": list(tuned.names)})
    return replace(context, job=replace(job, options=options)), tuned


def _measured(model: ir.Model, context: JobContext) -> Tuned:
    feeds = feeds_of(model, context, SAMPLES)
    trials = Trials(model, replace(context, reader=list(feeds)))
    with private_folder() as folder:

        def written(name: str, left: Sequence[str]) -> Path:
            path = folder / f"{name}.onnx"
            files.save(trials.quantized(_with(context.job, left)), path, True)
            return path

        files.save(model.clone(), folder / "float.onnx", True)
        divisions: dict[str, Sequence[str]] = {INTEGERS: [], TABLE: _cut(model, context)}
        paths = {name: written(name, left) for name, left in divisions.items()}
        forms = folder / "float.onnx", paths[INTEGERS]
        divisions[KERNELS] = _cut(model, context, [_node_seconds(path, model, feeds[0], context.job) for path in forms])
        paths[KERNELS] = written(KERNELS, divisions[KERNELS])
        divisions[FLOAT] = [str(node.name) for node in model.graph]
        paths[FLOAT] = written(FLOAT, divisions[FLOAT])
        unlike = {name: path for name, path in paths.items() if _first(divisions, name) == name}
        found = quiet_seconds(unlike, feeds[0], SECONDS, 50, context.job.options.UserCustomOpLibPath)
    seconds = {name: found[_first(divisions, name)] for name in divisions}
    chosen = _chosen(seconds)
    record = {
        "processor": processor(),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "milliseconds": {name: round(value * 1e3, 4) for name, value in seconds.items()},
        "chosen": chosen,
    }
    return Tuned(tuple(divisions[chosen]), record)


def _chosen(seconds: Mapping[str, float]) -> str:
    """The fastest division; of about equal ones that of the table, and any of them before float, which is larger."""
    limit = min(seconds.values()) * (1 + SAME)
    integer = {name: value for name, value in seconds.items() if name != FLOAT}
    best = min(integer, key=integer.__getitem__)
    if integer[best] > limit:
        return FLOAT
    return TABLE if seconds[TABLE] <= limit else best


def _first(divisions: Mapping[str, Sequence[str]], name: str) -> str:
    """The first division that is the same as the one called ``name``."""
    return next(one for one, left in divisions.items() if set(left) == set(divisions[name]))


def _with(job: Job, left: Sequence[str]) -> Job:
    """The job with the nodes that stay float given."""
    return replace(job, options=job.options.changed({"TunedFloat": list(left), "TuneSpeed": False}))


def _cut(model: ir.Model, context: JobContext, seconds: Sequence[Mapping[str, float]] = ()) -> list[str]:
    """The nodes that the minimum cut leaves in float, in the order of the graph.

    Args:
        seconds: of nodes in float and in integers, as measured here; empty: the table's times.
    """

    def integers(left: Sequence[str]) -> set[str]:
        plan = MODES["static"].place(model.clone(), _with(context.job, left), context.known)
        return {name for name, node in plan.nodes.items() if node.quantized}

    names = [str(node.name) for node in model.graph]
    chosen, fixed = integers([]), integers(names)
    nodes = {str(node.name): node for node in model.graph}
    left = slower.faster_in_float(model, [nodes[n] for n in names if n in chosen], {nodes[n] for n in fixed}, seconds)
    return [name for name in names if nodes[name] in left]


def _node_seconds(path: Path, model: ir.Model, feed: Feed, job: Job) -> dict[str, float]:
    """Seconds of every node of ``model`` in the file at ``path``, the Q and DQ pairs it needs with it."""
    return layer_seconds(path, feed, job.options, 1, owners(model, [str(node.name) for node in model.graph]))


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    named = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return named.group(1) if named else platform.processor() or platform.machine()
