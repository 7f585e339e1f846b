"""``quark onnx quantize``: configure, quantize, check, tell."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quark.cli.beside import preprocessing_beside
from quark.cli.extensions import with_own
from quark.cli.output import print_json, say, show, write_lines, write_page, write_text
from quark.cli.requests import Decided, Quantize
from quark.cli.settings import parse_settings
from quark.cli.source_options import SampleSource, source_words
from quark.cli.sources import WANTED, FileSamples, at, feeds, preprocessing
from quark.cli.verdicts import FAILED, Bench, Bound, Subject, advise, judge_all, parse_bound, remedies, with_typed
from quark.config.job import Job
from quark.dataclass import dataclass
from quark.errors import DataError, NoSamplesError, check_name
from quark.files.lock import turn_on
from quark.files.outputs import Output, drafts
from quark.numerics.formats import Int
from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.compare import FLOAT, QUANTIZED, TIMED, Checks, Comparison, compare
from quark.onnx.config_file import load_config, read_values, share_of
from quark.onnx.data import Feed
from quark.onnx.data_files import is_picture
from quark.onnx.data_layout import looked_at
from quark.onnx.describe import file_bytes
from quark.onnx.first_run import NAME as FIRST_RUN
from quark.onnx.flow import measured as measured_cost
from quark.onnx.graph.libraries import Libraries
from quark.onnx.graph.model import output_of
from quark.onnx.graph.report import PassReport
from quark.onnx.preprocess_file import FILE, text_of
from quark.onnx.preprocessing import Preprocessing
from quark.onnx.recipes import LIBRARIES, Choice, with_algorithms
from quark.onnx.result import Result
from quark.report import Report, Table, decibels, file_size, milliseconds
from quark.report.progress import bars
from quark.report.summary import pass_table, summary_tables
from quark.report.verdict import SAME, Line, Verdict, runtime_line
from quark.search.parts import parts_of, spread_order

if TYPE_CHECKING:
    from quark.onnx.causes import Causes

CHECKED = 16
"""Samples that the check after the quantization runs on."""
HURRY, ENOUGH = 0.15, 0.3
"""Seconds for timing, and of the processor for comparing slow models, where nobody asked for the figures."""
TARGETS = ("any", "cpu")


@dataclass(frozen=True)
class Demands:
    """What the result has to be, or the command ends with the exit code 3."""

    bound: Bound | None = None
    not_slower: bool = False

    def check_met(self, measured: bool) -> None:
        """Refuse a demand that nothing would be held against.

        Raises:
            DataError: there is one, and the models will not be compared.
        """
        name = "--fail-under" if self.bound else "--fail-slower" if self.not_slower else None
        if name is not None and not measured:
            raise DataError(f"{name} compares both models on samples: give --data or --eval-data, and no --no-check")

    def failures(self, found: Comparison | None) -> list[str]:
        """What is not met, a sentence each."""
        if found is None:
            return []
        below = [self.bound.failure(found)] if self.bound else []
        seconds = found.seconds
        ratio = seconds[FLOAT] / seconds[QUANTIZED]
        slow = self.not_slower and ratio < 1 - SAME
        return [*filter(None, below), *([f"--fail-slower: {ratio:.2f} times as fast as float here"] if slow else [])]


def demanded(fail_under: str | None, fail_slower: bool) -> Demands:
    """``--fail-under`` and ``--fail-slower`` as typed."""
    return Demands(parse_bound(fail_under) if fail_under else None, fail_slower)


@dataclass(frozen=True)
class Check:
    """What running both models on ``samples`` showed."""

    comparison: Comparison
    samples: list[Feed]
    causes: Causes | None = None
    libraries: Libraries = None


def run(request: Quantize) -> None:
    """Quantize, and tell about it on standard output; the verdict comes last.

    Raises:
        typer.Exit: with the code 3, a demand that is not met.
    """
    settings, demands = settings_of(request), demanded(request.fail_under, request.fail_slower)
    config, report = configure(request, settings), request.report
    given, pictures = request.given_plan(), _preprocessing(request.source)
    typed = vars(request.source) | {"output": request.output}
    beside = {output.path.name: output for output in preprocessing_beside(typed)}
    judged = _judged(request)
    samples = _feeds(request, config, settings)
    shown = samples if judged is None else judged
    measured = shown is not None and (request.check or report is not None)
    demands.check_met(measured)
    start = time.perf_counter()
    with ExitStack() as turn, drafts(_outputs(request) | beside) as paths:
        try:
            result = ModelQuantizer(config).run(request.model, paths["output"], looked_at(samples), plan=given)
        except NoSamplesError as error:
            raise DataError(WANTED) from error
        seconds = time.perf_counter() - start
        result.plan.preprocessing = None if pictures is None else pictures.to_dict()
        if request.plan:
            write_text(result.plan.to_json(), paths["plan"])
        if pictures is not None:  # other commands add their sections to the same file
            turn.enter_context(turn_on(beside[FILE].path))
            write_text(text_of(pictures, request.output, request.model), paths[FILE])
    with kept(request.output):  # whatever goes wrong with the judgement, or takes too long for the user
        libraries = config.global_quant_config.extra_options.get(LIBRARIES)
        hurry = judged is None and report is None and demands == Demands()
        files = request.model, request.output
        done = check_of(*files, shown, report is not None, libraries, hurry) if measured else None
        verdict = _verdict(request, settings, result, done, samples)
        if report and done:
            write_page(page(request, result, done, verdict), report)
    if request.json:
        print_json(facts(request, result, seconds, done, verdict))
    else:
        _tell(request, settings, result, done)
        say(f"Wrote {request.output} in {seconds:.1f} s." + (f" Report: {report}" if report and done else ""))
        write_lines(verdict.words())
    if failures := demands.failures(done.comparison if done else None):
        say("\n".join(failures))
        raise typer.Exit(FAILED)


@contextmanager
def kept(output: Path) -> Iterator[None]:
    """Say that the model is there, whatever ends the block: a model takes hours, and what judges it seconds."""
    try:
        yield
    except BaseException:
        say(f"{output} is written and keeps its place: what was not finished is its check")
        raise


def settings_of(request: Quantize) -> dict[str, Any]:
    """The options that were typed, one of them with a name of its own."""
    return parse_settings((*request.settings, *(("TuneSpeed=true",) if request.tune_speed else ())))


def _outputs(request: Quantize) -> dict[str, Output]:
    outputs = {"output": output_of(request.output)}
    return outputs | ({} if request.plan is None else {"plan": Output(request.plan, "--plan")})


def _preprocessing(source: SampleSource) -> Preprocessing | None:
    """What is done with files, where the samples are not arrays."""
    if source.data is None or (source.preprocess is None and not is_picture(source.data)):
        return None
    return preprocessing(source)


def _tell(request: Quantize, settings: Mapping[str, Any], result: Result, check: Check | None) -> None:
    if settings.get("PrintSummary", True):
        passes = pass_table((one.name, one.fired, one.refused) for one in result.passes)
        cost = measured_cost(result, file_bytes(request.model), request.output)
        for table in (*summary_tables(result.plan, result.weak), passes, cost):
            show(table)
    show(outcome(request, check))


def _verdict(request: Quantize, settings: dict[str, Any], result: Result, check: Check | None, samples: Any) -> Verdict:
    """The lines about what was written, and the command that helps."""
    preset = request.chosen if request.config is None else str(read_values(request.config)["preset"])
    choice = Choice(preset, settings, request.algorithms)
    words = source_words(request.source)
    found, feeds_ = (None, []) if check is None else (check.comparison, check.samples)
    judged_on = [] if request.eval_data is None else ["--eval-data", str(request.eval_data)]
    typed: dict[str, Any] = {
        "exclude": request.exclude,
        "layout": request.layout,
        "file": request.config,
        "judged_on": judged_on,
        "counted": result.counted,
        "libraries": result.libraries,
    }
    files = (request.model, request.output)
    subject = Subject(*files, choice, words, _where(request, check), result.sample, **typed)
    lines = judge_all(subject, result.plan, found)
    if check is None:
        lines.insert(0, Line("accuracy", "not measured", "no samples" if samples is None else "--no-check", bad=True))
    untried = [why.partition(": ") for one in result.passes if one.name == FIRST_RUN for why in one.refused]
    lines += [Line(FIRST_RUN, what, reason, bad=True) for what, _, reason in untried]
    if found is not None and found.moved is not None:
        lines.insert(1, runtime_line(found.moved.name, found.moved.optimized, found.moved.written))
    ways = shlex.join(words) or "--data SAMPLES"
    measure = [f"quark onnx compare {shlex.quote(str(request.model))} {shlex.quote(str(request.output))} {ways}"]
    bench = Bench(subject, samples, feeds_) if found else None
    advice = advise(bench, result, found) if bench and found else measure
    return Verdict(tuple(lines), (*advice, *remedies(subject, lines, bench)))


def _where(request: Quantize, check: Check | None) -> str:
    count = check.comparison.samples if check else 0
    if request.eval_data is not None:
        return f"on {count} samples of --eval-data"
    if request.source.random:
        return "on generated data, which says little about real data"
    return f"measured on {count} of the calibration samples; --eval-data gives others"


def configure(request: Decided, settings: dict[str, Any]) -> Config:
    """The preset or the configuration file, with the options of the command line."""
    with_own(request.algorithms)
    config = get_default_config(request.chosen) if request.config is None else load_config(request.config)
    if request.layout is not None:
        check_name("target", request.layout, TARGETS)
    config.extra_options.update({**settings, "PrintSummary": False})
    config = with_typed(config, request.exclude, request.layout)
    return Config(global_quant_config=with_algorithms(config, {}, request.algorithms))


def surely_calibrated(job: Job) -> bool:
    """Whether activations get ranges from samples, as far as a job tells; of others the engine says so."""
    spec = job.rules.default.inputs
    return job.runs_samples and spec is not None and isinstance(spec.row, Int)


def _feeds(request: Quantize, config: Config, settings: Mapping[str, Any]) -> Any:
    """The samples, or None where none are given and none are needed."""
    source = request.source
    if source.data is None and not source.random and not surely_calibrated(config.compile()):
        if request.report and request.eval_data is None:
            raise DataError("--report needs samples to run both models on: add --data PATH (or --eval-data PATH)")
        return None
    if source.random:
        say("note: calibrating on generated data; the result is for trying things out only")
    shapes, ranges = (settings.get(f"RandomDataReaderInput{what}") for what in ("Shape", "DataRange"))
    found = feeds(request.model, replace(source, shapes=shapes, ranges=ranges), first=True, judged_on=request.eval_data)
    if request.config is None or share_of(read_values(request.config)) == "all":
        return found
    half, _, _ = parts_of(len(found))
    return at(found, half)


def _judged(request: Quantize) -> Any:
    """The samples of ``--eval-data``, found before the work begins; None without it."""
    if request.eval_data is None:
        return None
    source = replace(request.source, data=request.eval_data, random=False, samples=None)
    return feeds(request.model, source, judged_on=request.source.data)


def check_of(
    first: Path,
    second: Path,
    samples: FileSamples | Sequence[Feed],
    layers: bool,
    libraries: Libraries,
    hurry: bool = False,
) -> Check:
    """Run a float model and its quantized form on some of ``samples``, spread over all, and time both on one of them.

    ``hurry``: of slow models on fewer; nobody asked for the figure.
    """
    from quark.onnx.causes import causes, with_causes

    chosen: list[Feed] = list(islice(at(samples, spread_order(len(samples))), CHECKED))
    with bars() as update:
        checks = Checks(layers, moved=True, timed=HURRY if hurry else TIMED, enough=ENOUGH if hurry else None)
        total = len(chosen)
        found = compare(first, second, chosen, checks, lambda n: update("compare", n, total), libraries)
        chosen = chosen[: found.samples]
        measured = causes(first, second, chosen, libraries=libraries) if layers else None
        found = found if measured is None else with_causes(found, measured)
    return Check(found, chosen, measured, libraries)


def outcome(request: Quantize, check: Check | None) -> Table:
    """The table that says what it cost and what it won."""
    before, after = file_bytes(request.model), file_bytes(request.output)
    rows = [("size", file_size(before), file_size(after), f"{before / after:.1f}×")]
    note = ""
    if check is not None:
        first, second = (check.comparison.seconds[name] for name in (FLOAT, QUANTIZED))
        rows.append(("latency", milliseconds(first), milliseconds(second), f"{first / second:.1f}×"))
        for name, distance in check.comparison.outputs.items():
            rows.append((f"SQNR of {name}", "", decibels(distance.sqnr), ""))
            rows.append((f"cosine of {name}", "", f"{distance.cosine:.6f}", ""))
        note = f"On {check.comparison.samples} samples, ONNX Runtime on this CPU, one sample at a time."
    return Table("Outcome", ("", "float", "quantized", "gain"), tuple(rows), note)


def facts(request: Quantize, result: Result, seconds: float, check: Check | None, verdict: Verdict) -> dict[str, Any]:
    """The same as data, for ``--json``."""
    nodes = result.plan.nodes.values()
    found: dict[str, Any] = {
        "model": request.model,
        "output": request.output,
        "preset": request.named,
        "nodes": {"total": len(nodes), "quantized": sum(node.quantized for node in nodes)},
        "bytes": {"float": file_bytes(request.model), "quantized": file_bytes(request.output)},
        "seconds": {"total": seconds, **result.seconds},
        "passes": pass_facts(result.passes),
        "proposals": result.plan.proposals,
        "verdict": verdict.facts(),
    }
    if check is not None:
        outputs = check.comparison.outputs.items()
        found["outputs"] = {name: {"sqnr": d.sqnr, "cosine": d.cosine, "l2": d.l2} for name, d in outputs}
        found["latency_seconds"] = dict(check.comparison.seconds)
        found["checked_samples"] = check.comparison.samples
    return found


def pass_facts(reports: Iterable[PassReport]) -> dict[str, Any]:
    """What each graph pass did, as data."""
    return {one.name: {"fired": one.fired, "refused": list(one.refused)} for one in reports}


def page(request: Quantize, result: Result, check: Check, verdict: Verdict) -> Report:
    """The HTML page of one quantization."""
    from quark.onnx.examples import examples
    from quark.onnx.page import model_view
    from quark.onnx.page import page as report_of

    reasons = {
        name: result.plan.explain(name) for name in (*result.plan.floats, *result.plan.nodes, *result.plan.tensors)
    }
    view = model_view(request.output.name, request.model, request.output, check.comparison, verdict, reasons)
    seen = examples(request.model, [request.output], check.samples, check.libraries)
    tables = (outcome(request, check), *summary_tables(result.plan, result.weak))
    title = f"{request.model.name} → {request.output.name}, {request.named}"
    return report_of(title, request.model, [view], [check.causes] if check.causes else [], seen, tables)
