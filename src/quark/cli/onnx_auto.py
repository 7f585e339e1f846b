"""``quark auto``: model, samples and purpose in; the best quantized model out, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import yaml

from quark.cli.auto_request import (
    again,
    command,
    facts_of,
    outputs_of,
    own_metric,
    page_of,
    parse_drop,
    recipe_text,
    result_line,
    tell,
    trial_table,
    why_not,
    why_table,
)
from quark.cli.extensions import command_line
from quark.cli.output import say, write_page, write_text
from quark.cli.requests import Auto
from quark.cli.source_options import source_words
from quark.cli.sources import FileSamples, feeds, preprocessing
from quark.errors import ConfigError
from quark.files.ours import MARK
from quark.files.outputs import drafts
from quark.files.private import private_folder
from quark.measure.score import error
from quark.onnx.auto import auto
from quark.onnx.data_files import file_of
from quark.onnx.describe import file_bytes
from quark.onnx.graph.model import output_of
from quark.onnx.labelled import is_name, metric_of, metrics_on, said
from quark.onnx.labels import LabelSource
from quark.onnx.labels import digest_of as labels_digest
from quark.onnx.recipes import LIBRARIES
from quark.onnx.trial_files import write_model
from quark.onnx.trials import OnnxGoal, OnnxOutcome, OnnxTrial
from quark.report import ChartPoint, Scatter, Table
from quark.report.verdict import LEVELS, Line, Verdict, accuracy_line, size_line, speed_line
from quark.search.auto import DROP
from quark.search.function import digest_of
from quark.search.parts import Split, parts_of, split


def run(request: Auto) -> None:
    """Try, choose, write, tell.

    Raises:
        typer.Exit: with the code 3, where nothing is within the tolerance or wins anything.
    """
    if request.seq_len != Auto.seq_len:
        raise ConfigError("--seq-len is for the folders of torch models; an ONNX model takes samples as they are")
    goal, name = _goal(request), _named(request)
    outputs = outputs_of(request, {"model": output_of(request.output)})
    given = feeds(request.model, request.source)
    if name is not None:
        given = replace(given, strict=True) if isinstance(given, FileSamples) else given
        goal = _labelled(goal, request, name, given)
    samples = _split(given)
    with drafts(outputs) as paths, private_folder() as folder:
        found = auto(request.model, samples, goal, folder, say)
        write_model(found.winner.path or request.model, paths["model"])
        write_text(_recipe(found, request), paths["recipe"])
        verdict = _verdict(request, found)
        if request.report is not None:
            tables = _trials(found), why_table(found, partial(_why_not, request), _why(found))
            write_page(page_of(request, found, verdict, tables, _plots(request, found)), paths["report"])
    tell(
        facts_of(found, verdict, "metric", {}) if request.json else _trials(found),
        verdict,
        (request.output, outputs["recipe"].path),
        found.solved,
    )


def _named(request: Auto) -> str | None:
    """The built-in metric; labels alone are classes. None: a function of the user's, or the agreement with float."""
    if request.metric is None or is_name(request.metric):
        name = request.metric or (None if request.labels is None else "top1")
        _ = name and metric_of(name)
        return name
    if request.labels is not None:
        raise ConfigError("--labels goes with a metric by its name, as --metric top1; a function has its own labels")
    return None


def _goal(request: Auto) -> OnnxGoal:
    own = None if request.metric is None or is_name(request.metric) else request.metric
    seconds, drop = 60 * request.minutes, parse_drop(request.drop)
    kept = OnnxGoal(request.goal, drop, own_metric(own), seconds, request.ledger, digest_of(own))
    return replace(kept, workers=request.workers, libraries=request.libraries, exclude=request.exclude)


def _labelled(goal: OnnxGoal, request: Auto, name: str, samples: Any) -> OnnxGoal:
    """The goal with a built-in metric, on the samples that choose, and on those that decide nothing."""
    files = [file_of(read) for read in samples.readers] if isinstance(samples, FileSamples) else [None] * len(samples)
    given = LabelSource(request.model, request.labels, files, preprocessing(request.source))
    parts, (_, choose, report) = _split(samples), parts_of(len(samples))
    asked = [(parts.choose, choose), *([] if parts.report is None else [(parts.report, report)])]
    metric, *reporting = metrics_on(name, request.model, given, asked, request.libraries)
    identity = f"{name} by {labels_digest(request.labels)}"
    return replace(goal, metric=metric, reporting=next(iter(reporting), None), identity=identity)


def _split(samples: Any) -> Split:
    """Parts that are read when they are needed."""
    if isinstance(samples, FileSamples):
        return split(samples, lambda part: replace(samples, readers=[samples.readers[k] for k in part]))
    return split(samples)


def _recipe(found: OnnxOutcome, request: Auto) -> str:
    """The configuration file that makes the winner again; for the float model, words."""
    choice = found.winner.choice
    if choice is None:
        return "# the float model won: there is nothing to reproduce\n" + yaml.safe_dump({"found": {"by": MARK}})
    config = choice.config()
    values: dict[str, Any] = {"preset": choice.preset}
    if choice.options:
        values["options"] = dict(choice.options)
    if config.algorithms:
        values["algorithms"] = [one.to_dict() for one in config.algorithms]
    if choice.exclude:
        values["exclude"] = list(choice.exclude)
    if choice.layers:
        values["layers"] = dict(choice.layers)
    values["calibrate"] = "half"
    return recipe_text(request, values, ["quark", "onnx", "quantize", request.model.name, "-o", "q.onnx"])


def _trials(found: OnnxOutcome) -> Table:
    """Every trial with its figures."""

    def cells(trial: OnnxTrial) -> tuple[str, str]:
        said = trial.error or (trial.judged.reason if trial.judged is not None else "–")
        return said, "–" if trial.value is None else f"{trial.value:.4g}"

    return trial_table(found, ("accuracy on the choosing samples", "metric"), cells)


def _why_not(request: Auto, trial: OnnxTrial) -> str:
    """Why a trial did not win."""
    said = {"cpu": "slower", "npu": "a costlier type for an NPU, or less accurate", "size": "larger"}[request.goal]
    return f"the same model as {trial.same}" if trial.same else why_not(trial, said)


def _verdict(request: Auto, found: OnnxOutcome) -> Verdict:
    """What is known of the winner, the result last: with the next command it is what the last lines show."""
    winner, lines = found.winner, []
    notes = [Line("note", "of this run", note) for note in found.notes]
    if winner.choice is None:
        return Verdict((*notes, Line("result", "float", _float_stays(found), bad=True)), _next(request, found))
    seen = winner.judged if found.reported is None else found.reported
    lines.append(accuracy_line(seen, f"on samples that {'chose it' if found.reported is None else 'decided nothing'}"))
    if found.reported_values is not None:
        after, before = found.reported_values
        name, chance = _named(request) or "the metric", error(after, before)
        give = "" if math.isnan(chance) else f", ± {said(name, math.copysign(chance, after.value))} by chance"
        words = f"{said(name, after.value)} on samples that decided nothing (float {said(name, before.value)}{give})"
        lines.append(Line("labels", name, words))
    chosen = winner.judged
    gap = math.nan if chosen is None or found.reported is None else found.reported.sqnr - chosen.sqnr
    if not math.isnan(gap):  # equal infinities, or text, have none
        lines.append(Line("gap", "honest", f"{gap:+.1f} dB against the samples that chose it"))
    if not math.isnan(winner.seconds):
        lines.append(speed_line(found.float_seconds, winner.seconds))
    lines += [size_line(file_bytes(request.model), winner.bytes), *notes]
    if not found.solved:
        lines.append(Line("missing", "nearest", _missing(request, found), bad=True))
    lines.append(result_line(found, _why(found), _why(found)))
    return Verdict(tuple(lines), _next(request, found))


def _float_stays(found: OnnxOutcome) -> str:
    return found.notes[-1] if found.notes else "no trial wins anything"


def _missing(request: Auto, found: OnnxOutcome) -> str:
    """What the nearest miss costs, against what was allowed."""
    lost, winner = _lost(found), found.winner
    drop = parse_drop(request.drop)
    if lost is None or found.float_value is None or winner.value is None:
        reason = "nothing to compare" if winner.judged is None else winner.judged.reason
        return f"{reason}; {'a good verdict' if drop is None else f'a loss of {100 * drop:g} % at most'} was asked for"
    name, chance = _named(request), winner.chance
    show: Callable[[float], str] = "{:.4g}".format if name is None else partial(said, name)
    give = "" if math.isnan(chance) else f", ± {show(math.copysign(chance, winner.value))} by chance"
    words = f"{show(winner.value)} of {show(found.float_value)}{give} on the choosing samples"
    asked = f"{100 * (DROP if drop is None else drop):g} %"
    level = LEVELS[0 if winner.judged is None else winner.judged.level]
    if lost <= (DROP if drop is None else drop):
        return f"{words}; so few labels cannot show {asked}, and the verdict is {level}"
    return f"{words}: {100 * lost:.3g} % lost, {asked} may be"


def _lost(found: OnnxOutcome) -> float | None:
    """The part of the metric, or of the float model's answers, that the nearest miss loses; None where it has none."""
    winner = found.winner
    if winner.value is not None and found.float_value:
        return (found.float_value - winner.value) / abs(found.float_value)
    if winner.value is None and winner.judged is not None and winner.judged.value != winner.judged.sqnr:
        return 1 - winner.judged.value
    return None


def _next(request: Auto, found: OnnxOutcome) -> tuple[str, ...]:
    """The commands that make sense now, the likeliest first."""
    model, samples, own = str(request.model), source_words(request.source), request.libraries
    if found.solved and found.confirmed:
        operators = [] if own is None else ["--custom-ops", own]
        return (command_line(["quark", "onnx", "compare", model, str(request.output), *samples, *operators]),)
    if found.winner.choice is None:
        return (command(replace(request, purpose="size")),) if request.goal != "size" else ("use the float model",)
    if told := again(request, found, _lost(found), parse_drop(request.drop) or DROP):
        return (told,)
    words = ["quark", "onnx", "search", model, *samples, "--target", "sqnr>=20", "-o", "plan.yaml"]
    words += [word for name in request.exclude for word in ("--exclude", name)]
    words += [] if own is None else ["--set", f"{LIBRARIES}={own}"]
    return (f"find the layers that need more bits: {command_line(words)}",)


def _why(found: OnnxOutcome) -> str:
    """The winner in words, and what its recipes mend."""
    mended = f"; mends: {'; '.join(found.winner.causes)}" if found.winner.causes else ""
    return f"{found.winner.name}, of {found.count}{mended}"


def _plots(request: Auto, found: OnnxOutcome) -> Iterator[Scatter]:
    """Accuracy by size, and by latency where it was measured."""
    judged = [one for one in found.trials if one.judged is not None]
    metric = "the metric" if found.float_value is not None else "SQNR on the choosing samples, dB"
    for cost in ("MB", "ms"):
        points = []
        for one in judged:
            x = one.bytes / 1e6 if cost == "MB" else 1e3 * found.seconds.get(one.name, math.nan)
            y = one.value if one.value is not None else one.judged.sqnr if one.judged is not None else math.nan
            points.append(ChartPoint(one.name, x, y, one.name == found.winner.name))
        if found.float_value is not None:
            x = file_bytes(request.model) / 1e6 if cost == "MB" else 1e3 * found.float_seconds
            points.append(ChartPoint("float", x, found.float_value))
        if any(math.isfinite(one.x) for one in points):
            yield Scatter(f"Accuracy by {'size' if cost == 'MB' else 'latency'}", cost, metric, tuple(points))
