"""``quark auto``: model, samples and purpose in; the best quantized model out, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
import yaml

from quark.cli.auto_request import Request, parse_drop
from quark.cli.output import print_json, say, show, write_lines, write_page, write_text
from quark.cli.samples import Samples
from quark.cli.sources import feeds
from quark.cli.verdicts import FAILED
from quark.errors import ConfigError
from quark.files.ours import MARK
from quark.files.outputs import Output, check_outputs, drafts
from quark.files.private import private_folder
from quark.onnx.auto import Goal, Outcome, Split, Trial, auto, split, write_model
from quark.onnx.describe import file_bytes
from quark.onnx.graph.model import output_of
from quark.onnx.labelled import read_labels, top1
from quark.report import Point, Report, Scatter, Table, file_size, milliseconds
from quark.report.verdict import Line, Verdict, accuracy_line, size_line, speed_line
from quark.search.function import digest_of, load_function, number_of
from quark.search.parts import parts_of


def run(request: Request, report: Path | None, overwrite: bool, json: bool) -> None:
    """Try, choose, write, tell.

    Raises:
        typer.Exit: with the code 3, where nothing is within the tolerance or wins anything.
    """
    goal = _goal(request)
    recipe = Output(request.output.with_suffix(".recipe.yaml"), "the recipe")
    check_outputs([recipe], [("the float model", request.model)], overwrite)
    given = feeds(request.model, request.source)
    if request.labels is not None:
        given = replace(given, strict=True) if isinstance(given, Samples) else given
        goal = _labelled(goal, request, given)
    samples = _split(given)
    outputs = {"model": output_of(request.output), "recipe": recipe}
    outputs |= {} if report is None else {"report": Output(report, "--report", folder=True)}
    with drafts(outputs) as paths, private_folder() as folder:
        found = auto(request.model, samples, goal, folder, say)
        write_model(found.winner.path or request.model, paths["model"])
        write_text(_recipe(found, request), paths["recipe"])
        verdict = _verdict(request, found)
        if report is not None:
            write_page(_page(request, found, verdict), paths["report"])
    if json:
        print_json(_facts(found, verdict))
    else:
        show(trial_table(found))
        say(f"Wrote {request.output} and {recipe.path}.")
        write_lines(verdict.words())
    if not found.solved:
        raise typer.Exit(FAILED)


def _goal(request: Request) -> Goal:
    function = None if request.metric is None else load_function(request.metric)
    name = "" if request.metric is None else request.metric.rpartition(":")[2]
    metric = None if function is None else lambda path: number_of(function(path), name)
    return Goal(
        request.purpose,
        parse_drop(request.drop),
        metric,
        60 * request.minutes,
        None,
        request.ledger,
        digest_of(request.metric),
    )


def _labelled(goal: Goal, request: Request, samples: Any) -> Goal:
    """The goal with top-1 as its metric, on the choosing samples, and on those that decide nothing."""
    if request.metric is not None:
        raise ConfigError("give --labels or --metric, not both: each says what is measured")
    path = Path(str(request.labels))
    labels, parts = read_labels(path, len(samples)), _split(samples)
    _, choose, report = parts_of(len(labels))

    def on(feeds: Any, part: list[int]) -> Callable[[str], float]:
        return lambda model: top1(model, feeds, [labels[index] for index in part], goal.libraries)

    chosen, told = on(parts.choose, choose), on(parts.report, report)
    return replace(goal, metric=chosen, reporting=told, identity=f"top-1 of {labels}")


def _split(samples: Any) -> Split:
    """Parts that are read when they are needed."""
    count = len(samples)
    parts = parts_of(count)
    if isinstance(samples, Samples):
        lazy = [replace(samples, readers=[samples.readers[i] for i in part]) for part in parts]
        return Split(lazy[0], lazy[1], lazy[2], count)
    return split(samples)


def _recipe(found: Outcome, request: Request) -> str:
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
    if choice.layers:
        values["layers"] = dict(choice.layers)
    values["found"] = {"by": MARK, "model": request.model.name, "for": request.purpose}
    command = f"# quark onnx quantize {request.model.name} -o q.onnx --data …"
    return f"{command} --config {request.output.stem}.recipe.yaml\n" + yaml.safe_dump(values, sort_keys=False)


def trial_table(found: Outcome) -> Table:
    """Every trial with its figures."""
    rows = tuple(_row(trial, trial.name == found.winner.name) for trial in found.trials)
    columns = ("configuration", "accuracy on the choosing samples", "metric", "size", "within")
    return Table("Trials", columns, rows, "* the winner" if any(row[0].startswith("* ") for row in rows) else "")


def _row(trial: Trial, won: bool) -> tuple[str, ...]:
    said = trial.error or (trial.judged.reason if trial.judged is not None else "–")
    value = "–" if trial.value is None else f"{trial.value:.4g}"
    size = file_size(trial.bytes) if trial.bytes else "–"
    return f"* {trial.name}" if won else trial.name, said, value, size, "yes" if trial.passes else "no"


def _verdict(request: Request, found: Outcome) -> Verdict:
    winner, lines = found.winner, []
    if winner.choice is None:
        lines.append(Line("result", "float", "; ".join(found.notes) or "no trial wins anything", bad=True))
        return Verdict(tuple(lines), ("use the float model, or loosen the tolerance: --drop",))
    lines.append(Line("result", "solved" if found.solved else "not solved", _why(found), bad=not found.solved))
    lines.append(accuracy_line(found.reported, "on samples that decided nothing"))
    if found.reported_values is not None:
        after, before = found.reported_values
        said = f"{100 * after:.1f} % on samples that decided nothing (float {100 * before:.1f} %)"
        lines.append(Line("labels", "top-1", said))
    chosen = winner.judged
    if chosen is not None and found.reported is not None:
        gap = found.reported.sqnr - chosen.sqnr
        lines.append(Line("gap", "honest", f"{gap:+.1f} dB against the samples that chose it"))
    if not math.isnan(winner.seconds):
        lines.append(speed_line(found.float_seconds, winner.seconds))
    lines.append(size_line(file_bytes(request.model), winner.bytes))
    advice = () if found.solved else ("nearest miss: loosen --drop, or quark onnx search for single layers",)
    return Verdict((*lines, *(Line("note", "few samples", note) for note in found.notes)), advice)


def _why(found: Outcome) -> str:
    """The winner in words, and what its recipes mend."""
    mended = f"; mends: {'; '.join(found.winner.causes)}" if found.winner.causes else ""
    return f"{found.winner.name}, of {len(found.trials)} trials{mended}"


def _facts(found: Outcome, verdict: Verdict) -> dict[str, Any]:
    trials = [
        {"name": one.name, "within": one.passes, "bytes": one.bytes, "metric": one.value, "error": one.error}
        for one in found.trials
    ]
    return {"winner": found.winner.name, "solved": found.solved, "trials": trials, "verdict": verdict.facts()}


def _page(request: Request, found: Outcome, verdict: Verdict) -> Report:
    facts = [("winner", found.winner.name), ("trials", str(len(found.trials)))]
    if not math.isnan(found.winner.seconds):
        facts.append(("latency", milliseconds(found.winner.seconds)))
    title = f"auto: {request.model.name} for {request.purpose}"
    return Report(title, tuple(facts), (verdict.table(), trial_table(found)), scatters=tuple(_plots(request, found)))


def _plots(request: Request, found: Outcome) -> Iterator[Scatter]:
    """Accuracy by size, and by latency where it was measured."""
    judged = [one for one in found.trials if one.judged is not None]
    metric = "your metric" if found.float_value is not None else "SQNR on the choosing samples, dB"
    for cost in ("MB", "ms"):
        points = []
        for one in judged:
            x = one.bytes / 1e6 if cost == "MB" else 1e3 * found.seconds.get(one.name, math.nan)
            y = one.value if one.value is not None else one.judged.sqnr if one.judged is not None else math.nan
            points.append(Point(one.name, x, y, one.name == found.winner.name))
        if found.float_value is not None:
            x = file_bytes(request.model) / 1e6 if cost == "MB" else 1e3 * found.float_seconds
            points.append(Point("float", x, found.float_value))
        if any(math.isfinite(one.x) for one in points):
            yield Scatter(f"Accuracy by {'size' if cost == 'MB' else 'latency'}", cost, metric, tuple(points))
