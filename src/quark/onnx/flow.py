"""A quantization, read aloud: load, prepare, transform, place, calibrate, parameters, adapt, tune, emit, save."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir

from quark.config.job import Job
from quark.config.options import Options
from quark.config.plan import Plan
from quark.config.rules import NodeInfo
from quark.errors import ModelError
from quark.files.journal import Journal
from quark.garbage import forget, rare_collections
from quark.ir.runtime_faults import loses_zeros
from quark.ir.walk import all_nodes
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.mixed import Mixed
from quark.onnx.algorithms.samples import rereadable
from quark.onnx.algorithms.stages import reader_for, transform, tune
from quark.onnx.bodies import all_known, wants_bodies
from quark.onnx.choices import choose_inside, mix, search_calibration, tune_speed
from quark.onnx.compare import Comparison
from quark.onnx.coverage import Coverage, as_stated
from quark.onnx.data import Samples
from quark.onnx.data_layout import as_reader, in_layout
from quark.onnx.describe import file_bytes
from quark.onnx.diagnosis import of_plan, ranked
from quark.onnx.discretion import check_secret, discreet, tell_decisions, tell_idle
from quark.onnx.evaluation import check_evaluation, evaluate, kept_for_evaluation, metric_tables
from quark.onnx.explain import attach
from quark.onnx.fingerprint import journal_of
from quark.onnx.first_run import Feed, first_kept, first_run, first_sample, told, tried_on
from quark.onnx.follow import follow, tell_others
from quark.onnx.forecast import written_bytes
from quark.onnx.graph import model as files
from quark.onnx.graph.libraries import Libraries
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.run import keep_heap
from quark.onnx.integer_lstms import keep_exact
from quark.onnx.job_files import check_files, named_files
from quark.onnx.npu.adapt import adapt_and_tell
from quark.onnx.npu.substitution import remembering
from quark.onnx.pipeline import Prepared, finish, prepare, state
from quark.onnx.preprocessing import Preprocessing, doubts_of
from quark.onnx.qdq.modes import MODES
from quark.onnx.qdq.selection import check_names, known_nodes, known_tensors
from quark.onnx.qdq.slower import all_in_float
from quark.onnx.ranges import calibrated, samples_of
from quark.onnx.result import Result
from quark.onnx.scratch import Scratch
from quark.onnx.subgraphs import Made, install, quantize_bodies, record, weak_inside
from quark.report.process import resident
from quark.report.progress import bars
from quark.report.summary import cost_table, pass_table, print_summary
from quark.report.tables import print_table
from quark.report.values import Table

Progress = Callable[[str, int, int | None], None]
Given = str | Path | onnx.ModelProto
Written = str | Path | None
_log = logging.getLogger(__name__)


def quantize(
    job: Job, model_input: Given, model_output: Written, reader: Any, progress: Progress | None = None
) -> Result:
    """Run one job on one model; see ``ModelQuantizer.quantize_model``."""
    check_secret(job.options, model_input, model_output)
    check_evaluation(job.options, reader)
    check_files(job, model_input, model_output, reader)
    with discreet(job.options), rare_collections(), Journal.held(job.options.SaveAndRestore, "SaveAndRestore"):
        result = _quantize(job, model_input, model_output, reader, progress)
        read = getattr(reader, "preprocessing", None)
        result.plan.preprocessing = read.to_dict() if isinstance(read, Preprocessing) else None
    forget(result.bytes_before)
    return result


class Opened(NamedTuple):
    """The model as it was given.

    Attributes:
        source: what is never changed.
        bytes: of its files, None where it came in memory.
        journal: what an earlier run of the same job has finished.
        inside: bodies of If and Loop are quantized too.
        nodes, tensors: the names that a configuration may use.
    """

    source: ir.Model
    bytes: int | None
    journal: Journal
    inside: bool
    nodes: list[NodeInfo]
    tensors: frozenset[str]


def _open(model_input: Given, job: Job) -> Opened:
    tell_idle(job)
    keep_heap()  # weights are read one by one, each into the memory of another
    source = files.load(model_input, in_place=True)
    if pool := loses_zeros(source):
        _log.warning(
            "ONNX Runtime leaves out the zeros that a Pad puts before the MaxPool %r, in sessions of the float model; "
            "the quantized model keeps them, and the figures compare it with a float model that keeps them",
            pool.name,
        )
    size = file_bytes(model_input) if isinstance(model_input, (str, Path)) else None
    journal, inside = journal_of(source, job, named_files(job)), wants_bodies(source, job.options)
    nodes = all_known(source) if inside else known_nodes(source)
    return Opened(source, size, journal, inside, nodes, known_tensors(source))


def _samples(reader: Any, job: Job, prepared: Prepared, opened: Opened) -> Any:
    """The samples as the prepared model takes them; read again for bodies and for LSTMs.

    What looks wrong about the first one is told; of ``Samples``, who made them has.
    """
    if job.mode == "static" and not isinstance(reader, Samples) and not getattr(reader, "generated", False):
        reader = first_kept(reader)
        for doubt in doubts_of(opened.source, first_sample(reader), getattr(reader, "preprocessing", None)):
            _log.warning("%s", doubt)
    reader = in_layout(reader_for(job, reader), prepared.moved)
    again = opened.inside or any(node.op_type == "LSTM" for node in all_nodes(prepared.model))
    reader = rereadable(reader) if again and job.mode == "static" else reader
    return first_kept(remembering(job, reader))


def _settled(model: ir.Model, plan: Plan, job: Job, bodies: Made) -> Plan:
    """The plan, with the decisions that were given in the place of its own; told, and not empty."""
    plan = follow(model, plan, job)
    _refuse_nothing(plan, bodies)
    tell_decisions(plan, job.options)
    return plan


def _quantize(job: Job, model_input: Given, model_output: Written, reader: Any, progress: Progress | None) -> Result:
    """The stages, in order."""
    seconds: dict[str, float] = {}
    with bars() if progress is None else _given(progress) as update, Scratch(job.options) as scratch:
        with _timed(seconds, "load"):
            opened = _open(model_input, job)
        with _timed(seconds, "prepare"):
            prepared = prepare(opened.source, job, of=model_input)
            model, job, mode = prepared.model, prepared.job, MODES[prepared.job.mode]
            check_names(model, job, opened.nodes, opened.tensors)
        given = reader = kept_for_evaluation(job.options, as_reader(opened.source, reader))
        reader = _samples(reader, job, prepared, opened)
        context = JobContext(job, reader, scratch, opened.journal, update, opened.nodes)
        with _timed(seconds, "transform"):
            prepared.reports.extend(transform(model, context))
            context, decided = search_calibration(model, context)
            mixed = mix(model, context)
            context, tuned = tune_speed(model, replace(context, job=mixed.job))
        with _timed(seconds, "place"):
            job, bodies = context.job, _bodies(model, replace(context, job=prepared.job))
            plan = mode.place(model, job, opened.nodes)
            prepared.reports.extend([*decided, *(tuned.into_plan(plan) if tuned else ())])
            plan = _settled(model, plan, job, bodies)
        with _timed(seconds, "calibrate"):
            counted = Counted(partial(update, "calibrate"))
            ranges = calibrated(model, plan, context, counted)
        with _timed(seconds, "parameters"):
            mode.set_parameters(model, plan, ranges, job.options)
            prepared.reports.extend(_exact_lstms(model, plan, job, reader))
        with _timed(seconds, "adapt"):
            prepared.reports.extend(_adapted(model, plan, job, reader))
            weak = ranked(of_plan(model, plan), weak_inside(bodies))
        with _timed(seconds, "tune"):
            prepared.reports.extend(tune(model, plan, context))
        with _timed(seconds, "write"):
            model, shares = _written_out(model, plan, bodies, replace(prepared, job=job))
        with _timed(seconds, "run"):
            tried = partial(first_run, model, source=model_input, reader=reader, job=job)
            proto, idle = _publish(model, model_output, job, tried)
            prepared.reports.append(told(idle, model))
            opened.journal.settle()
    made = proto if model_output is None else Path(model_output)
    learnt = (weak, _metrics(model_input, made, job, given), mixed, counted.samples, opened.bytes, made, shares)
    result = Result(plan, prepared.reports, seconds, proto, *learnt, *_sizes(model, reader, job, idle))
    _tell(result, job.options, mixed, measured(result, opened.bytes, model_output))
    return result


def _tell(result: Result, options: Options, mixed: Mixed, cost: Table) -> None:
    """The summary on the terminal, where it is wanted."""
    if not options.PrintSummary or options.CryptoMode:
        return
    print_summary(result.plan, weak=result.weak)
    passes = pass_table((one.name, one.fired, one.refused) for one in result.passes)
    for table in (passes, cost, *mixed.tables(), *metric_tables(result.metrics)):
        print_table(table)


def _metrics(before: Any, after: onnx.ModelProto | str | Path | None, job: Job, reader: Any) -> Comparison | None:
    """What ``EvalMetrics`` asks for: both models on data."""
    return evaluate(before, after, job.options, reader) if job.options.EvalMetrics and after is not None else None


def measured(result: Result, before: int | None, model_output: str | Path | None) -> Table:
    """The table of ``quark onnx plan`` with what was measured; ``before``: bytes of the float model."""
    after = None if model_output is None else written_bytes(Path(model_output))
    each = result.seconds["calibrate"] / result.samples if result.samples else None
    return cost_table("Measured", before, after, resident(), each, sum(result.seconds.values()))


class Counted:
    """A listener of calibration that remembers how many samples there were."""

    def __init__(self, listener: Callable[[int, int | None], None]) -> None:
        self._listener, self.samples = listener, 0

    def __call__(self, done: int, total: int | None) -> None:
        """So many samples are done."""
        self.samples = done
        self._listener(done, total)


def _bodies(model: ir.Model, context: JobContext) -> Made:
    """The quantized bodies of If and Loop, where they are wanted; of a job without choices, which each makes itself."""
    job = context.job
    if not wants_bodies(model, job.options):
        return Made()
    reader = samples_of(model, job.options, context.reader) if job.mode == "static" else None
    return quantize_bodies(model, replace(context, reader=reader), choose_inside)


def _adapted(model: ir.Model, plan: Plan, job: Job, reader: Any) -> Sequence[PassReport]:
    """What the target asks of scales; then they are final, and what a given plan has otherwise is told."""
    reports = adapt_and_tell(model, plan, job, reader) if job.mode == "static" else []
    tell_others(plan, job.plan)
    return reports


def _exact_lstms(model: ir.Model, plan: Plan, job: Job, reader: Any) -> list[PassReport]:
    """Which LSTMs compute in integers, by the calibration samples."""
    given = job.mode == "static" and (reader is not None or job.options.UseRandomData)
    return keep_exact(model, plan, samples_of(model, job.options, reader) if given else None, job.options)


def _refuse_nothing(plan: Plan, bodies: Made) -> None:
    inside = [body.plan for body in bodies.bodies]
    if not any(one.tensors for one in (plan, *inside)) and any(map(all_in_float, (plan, *inside))):
        _log.warning("the model stays float: every layer is faster so on CPUs (FloatWhereFaster=False quantizes)")
    elif not plan.tensors and not bodies.bodies:
        kinds = sorted({node.op_type for node in plan.nodes.values()})
        reasons = "; ".join(sorted({f"{node.op_type}: {node.reason}" for node in plan.nodes.values()})[:5])
        raise ModelError(
            f"nothing in the model can be quantized under this configuration; its operators are {kinds}. "
            f"Quantized are float32 and float16 tensors. {reasons}"
        )


def _written_out(model: ir.Model, plan: Plan, bodies: Made, prepared: Prepared) -> tuple[ir.Model, Coverage | None]:
    """The quantized graph, with bodies and explanations, and how much of it is quantized; the reports grow."""
    job = prepared.job
    install(model, bodies)
    model = MODES[job.mode].emit(model, plan, job.options)
    record(plan, bodies)
    prepared.reports.extend([*bodies.reports, *finish(model, prepared)])
    shares = as_stated(model)
    prepared.reports.extend(state(model, prepared))
    if not job.options.CryptoMode:
        attach(model, plan)
    model.producer_name, model.producer_version = "openquark", "0.13.0"
    return model, shares


def _publish(
    model: ir.Model, model_output: str | Path | None, job: Job, tried: Callable[..., str]
) -> tuple[onnx.ModelProto | None, str]:
    """Hand the model out or write it, once it has run; why it was not run, where that is so."""
    idle = ""

    def run(draft: Path | onnx.ModelProto) -> None:
        nonlocal idle
        idle = tried(draft=draft)

    if model_output is None:
        proto = files.to_proto(model)
        run(proto)
        return proto, idle
    files.save(model, Path(model_output), job.external_data, run)
    return None, idle


def _sizes(model: ir.Model, reader: Any, job: Job, idle: str) -> tuple[Feed | None, Libraries]:
    """The sample that the model was tried on, which says what its free sizes are, and the libraries to run it with."""
    feed = idle or tried_on(model, reader, job)
    return None if isinstance(feed, str) else feed, job.options.UserCustomOpLibPath


@contextmanager
def _given(progress: Progress) -> Iterator[Progress]:
    yield progress


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start
