"""A quantization without data: every decision, and what the file, the memory and the time will be.

    size    of ``quark.onnx.file_size``
    memory  this process and a session + the weights in memory (those that algorithms change; others stay in their
            file) + the larger of: ONNX Runtime's form of the weights, a sample's observed tensors and the statistics;
            what the result takes when it is run
    time    seconds of one float inference on generated data + what counting the observed tensors takes, per sample

Figures are predictions: memory and time within a factor of two on an idle machine; the size, of static quantization,
within 3 percent (six real models under six presets: 0.98 to 1.02 of the file).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan, TensorPlan
from quark.dataclass import dataclass
from quark.errors import QuarkError
from quark.ir.surgery import name_of, tensor_bytes
from quark.numerics.formats import Int
from quark.onnx.bodies import all_known, wants_bodies
from quark.onnx.choices import foreseen
from quark.onnx.file_size import predicted_bytes
from quark.onnx.follow import follow
from quark.onnx.graph import model as files
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.run import Runner
from quark.onnx.graph.session import Runtime
from quark.onnx.pipeline import prepare
from quark.onnx.qdq.modes import MODES
from quark.onnx.qdq.parameters import observed
from quark.onnx.qdq.selection import check_names, known_nodes, known_tensors
from quark.onnx.subgraphs import decided_bodies, record
from quark.report.process import resident

#: Bytes of a histogram of two signs, and nanoseconds that a value takes to be counted in it or compared.
HISTOGRAM, COUNTED, COMPARED = 2 * 8 * 16 * 2048, 4.0, 0.5
#: Bytes of an open session without weights; how often a weight is there at once that the result has in float, or in a
#: type that no kernel takes: read, written, computed, packed. Both as reached on ResNet-50 and on three convolutions.
RUNTIME, COMPUTED = 1 << 25, 4


@dataclass(frozen=True)
class OnnxForecast:
    """What a job would do.

    Attributes:
        plan: every decision but the ranges.
        passes: what the graph passes did.
        bytes: size of the model file with its external data.
        peak_bytes: most memory that the process will hold.
        seconds_per_sample: of calibration; ``None`` where the model does not run on generated data.
    """

    plan: Plan
    passes: list[PassReport]
    bytes: int
    peak_bytes: int
    seconds_per_sample: float | None


def forecast(job: Job, model_input: files.ModelInput) -> OnnxForecast:
    """Decide, and predict; the model is read, no data are, nothing is written.

    Raises:
        ModelError: the model cannot be read or prepared.
        ConfigError: the configuration does not fit the model.
    """
    source = files.load(model_input, in_place=True)
    known = all_known(source) if wants_bodies(source, job.options) else known_nodes(source)
    tensors = known_tensors(source)
    prepared = prepare(source, job, write=False, of=model_input)
    check_names(prepared.model, prepared.job, known, tensors)
    model, job = prepared.model, foreseen(prepared.model, prepared.job, known)
    plan = follow(model, MODES[job.mode].place(model, job, known), job)
    requests = list(observed(plan, job.options))
    sizes = _sizes(model, requests)
    size = predicted_bytes(model, plan, job, prepared.stated)
    record(plan, decided_bodies(model, job, known))
    peak = _peak(model, plan, sizes, job)  # before a session takes its share as well
    return OnnxForecast(plan, prepared.reports, size, peak, _seconds(model, job, requests, sizes))


def _sizes(model: ir.Model, tensors: Iterable[TensorPlan]) -> dict[str, int]:
    """Elements of the observed tensors of one sample, free sizes taken as 1."""
    values = {value.name: value for value in model.graph.inputs}
    values |= {value.name: value for node in model.graph for value in node.outputs}
    found = {}
    for tensor in tensors:
        shape = values[tensor.name].shape if tensor.name in values else None
        found[tensor.name] = math.prod(size if isinstance(size, int) else 1 for size in shape or ())
    return found


def _peak(model: ir.Model, plan: Plan, sizes: dict[str, int], job: Job) -> int:
    """Bytes at the stage that takes most: the calibration, or the run of what is written."""
    weights, tensors = tensor_bytes(model), [value.const_value for value in model.graph.initializers.values()]
    # algorithms that change weights take them out of their file
    mapped = 0 if job.algorithms else sum(one.nbytes for one in tensors if isinstance(one, ir.ExternalTensor))
    requests = list(observed(plan, job.options))
    histograms = sum(HISTOGRAM for tensor in requests if tensor.spec.method != "minmax")
    calibration = weights + 4 * sum(sizes.values()) + histograms if requests else 0
    integers = all(isinstance(tensor.spec.row, Int) for tensor in plan.of_role("weight"))
    return (
        resident() + RUNTIME + (weights - mapped) + max(calibration, weights // 4 if integers else COMPUTED * weights)
    )


def _seconds(model: ir.Model, job: Job, requests: list[TensorPlan], sizes: dict[str, int]) -> float | None:
    """Seconds per sample; one inference on generated data is timed."""
    if not requests:
        return 0.0
    options = job.options
    try:
        from quark.onnx.random_data import RandomDataReader

        shapes, ranges = options.RandomDataReaderInputShape, options.RandomDataReaderInputDataRange
        feed = RandomDataReader(model, shapes, ranges).get_next() or {}
        outputs = [name_of(value) for value in model.graph.outputs]
        runner = Runner(model, outputs, (), Runtime.of(options))
        runner.run(feed)
        start = time.perf_counter()
        runner.run(feed)
        inference = time.perf_counter() - start
    except QuarkError:
        return None
    counting = sum(sizes[t.name] * (COMPARED if t.spec.method == "minmax" else COUNTED) for t in requests) * 1e-9
    return inference + counting


def written_bytes(path: Path | None) -> int | None:
    """Size of a written model with the external data beside it; ``None`` where it was not written."""
    if path is None:
        return None
    data = path.with_name(path.name + ".data")
    return path.stat().st_size + (data.stat().st_size if data.exists() else 0)
