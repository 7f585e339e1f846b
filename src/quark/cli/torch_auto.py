"""``quark auto`` for the folder of a torch model: the smallest form that one program reads and that keeps a metric."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.cli.auto_request import (
    again,
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
from quark.cli.torch_refusals import check_data, check_output
from quark.cli.torch_verdict import MEASURES, cache_lines
from quark.errors import ConfigError
from quark.files.outputs import drafts
from quark.report import ChartPoint, Report, Scatter, Table
from quark.report.verdict import Line, Verdict, size_line
from quark.search.auto import LATE
from quark.search.function import digest_of
from quark.search.values import FLOAT

if TYPE_CHECKING:
    from quark.torch.auto import TorchGoal, TorchOutcome, TorchTrial

WINDOWS = 32
Facts = Mapping[str, Any]
TASK = "task.py:score"  # for models without a perplexity: a function of the user's, (model, tokenizer) → number


def run(request: Auto) -> None:
    """Try, choose, write, tell.

    Raises:
        typer.Exit: with the code 3, where nothing is within the tolerance.
    """
    data, start, output = _data(request), time.perf_counter(), request.output
    check_output(output)
    from quark.files.folder import new_folder
    from quark.torch.files.prequantized import as_float

    goal = _goal(request)
    outputs = outputs_of(request, {})
    with as_float(request.model, output, loaded=True) as folder:
        found, samples, model = _found(request, data, goal, folder, start)
        with new_folder(output) as work:  # last, so that it is there where all is
            facts = _write(request, found, samples, model, folder, work)
            verdict = _verdict(request, found, facts)
            with drafts(outputs) as paths:
                write_text(_recipe(found, request), paths["recipe"])
                if request.report is not None:
                    write_page(_page(request, found, verdict), paths["report"])
    told = _facts(found, verdict) if request.json else _trials(found)
    tell(told, verdict, (output, outputs["recipe"].path), found.solved)


def _data(request: Auto) -> Path:
    """Where samples come from; refused is what is for ONNX models, and samples that are not there.

    Raises:
        ConfigError: an option of ONNX models, or nobody says where.
        DataError: the file is not there.
    """
    if request.labels is not None:
        raise ConfigError("--labels is for ONNX models; for a torch model write a function: --metric FILE.py:FUNCTION")
    other = source_words(replace(request.source, data=None, samples=None))
    other += ["--workers"] if request.workers != 1 else []
    other += ["--exclude"] if request.exclude else []
    other += ["--custom-ops"] if request.custom_ops is not None else []
    if other:
        raise ConfigError(
            f"{other[0]} is for ONNX models; a folder takes --data (a text, token ids), --samples, --seq-len"
        )
    if request.source.data is None:
        raise ConfigError("give a text or token ids with --data FILE")
    check_data(request.model, request.source.data)
    return request.source.data


def _goal(request: Auto) -> TorchGoal:
    from quark.torch.auto import TorchGoal

    own = None if request.metric == "perplexity" else request.metric
    if own is not None and ":" not in own:
        raise ConfigError(f"--metric {own!r}: for a torch model write perplexity or FILE.py:FUNCTION")
    seconds, drop = 60 * request.minutes, parse_drop(request.drop)
    return TorchGoal(request.goal, drop, own_metric(own), seconds, request.ledger, digest_of(own))


def _found(
    request: Auto, data: Path, goal: TorchGoal, folder: Path, start: float
) -> tuple[TorchOutcome, list[Any], Any]:
    """The trials, the samples and the float model; what reading took since ``start`` is no time for trials."""
    from quark.torch.auto import auto
    from quark.torch.language import calibration_samples, check_ids, load_model, load_tokenizer, read_ids

    rows = read_ids(data, partial(load_tokenizer, folder))
    samples = calibration_samples(rows, request.seq_len, request.source.samples or WINDOWS)
    model = load_model(folder)
    check_ids(model, [sample["input_ids"][0] for sample in samples])
    goal = replace(goal, seconds=goal.seconds - (time.perf_counter() - start))
    return auto(model, samples, goal, say, folder), samples, model


def _write(request: Auto, found: TorchOutcome, samples: list[Any], model: Any, folder: Path, work: Path) -> Facts:
    """The winner in the format that the program reads, with its card, into ``work``, which will be the output.

    Returns:
        Facts of the folder, as bytes before and after: a format may hold more than the trial that was counted.
    """
    from quark.cli import torch_quantize, torch_request
    from quark.search.parts import split

    source = torch_request.TextSource(request.source.data, request.source.samples or WINDOWS, request.seq_len)
    job = torch_request.FolderJob(
        model=folder,
        output=work,
        source=source,
        config=Path(f"{work.name}.recipe.yaml"),
        format=found.format,
        program=found_program(request),
    )
    model = model.float() if found.format == "onnx" else model
    config = torch_quantize.decided(model, job, dict(found.winner.values), found.format)
    facts = torch_quantize.quantized(model, job, config, split(samples).fit, found.format)
    told = replace(job, model=request.model)  # not the folder that it was decoded to
    facts = {**facts, **torch_quantize.facts_of(told, found.format, work)}
    torch_quantize.describe(told, facts, work)
    return facts


def found_program(request: Auto) -> str:
    """The program in the words of the table of formats."""
    from quark.torch.auto import PURPOSES

    return PURPOSES[request.goal]


def _recipe(found: TorchOutcome, request: Auto) -> str:
    """The configuration file that makes the winner again."""
    values = {key: value for key, value in found.winner.values.items() if value}
    words = ["quark", "torch", "quantize", request.model.name, "-o", "OUT", "--for", found_program(request)]
    return recipe_text(request, values, [*words, "--format", found.format])


def _trials(found: TorchOutcome) -> Table:
    """Every trial with its figures."""

    def cells(trial: TorchTrial) -> tuple[str]:
        give = "" if math.isnan(trial.chance) else f" ± {trial.chance:.2g}"
        return (trial.error or f"{trial.value:.6g}{give}",)

    late = [name for name, why in found.untried if why == LATE]
    return trial_table(found, (found.target.metric,), cells, f". No time for: {', '.join(late)}" if late else "")


def _verdict(request: Auto, found: TorchOutcome, facts: Facts) -> Verdict:
    winner, target = found.winner, found.target
    why = f"{winner.name} for {request.goal} ({found.format}), the smallest of {found.count} within {target}"
    miss = f"nothing reaches {target}; {winner.name} comes nearest of {found.count}"
    lines = [Line("chosen by", target.metric, f"{winner.value:.6g} (float {found.float_value:.6g})")]
    if found.reported is not None:
        after, before = found.reported
        give = "" if math.isnan(found.chance) else f", ± {found.chance:.2g} by chance"
        said = f"{after:.6g} on samples that decided nothing (float {before:.6g}{give})"
        lines.append(Line("reported", target.metric, said))
    if math.isfinite(found.gap):
        lines.append(Line("gap", "honest", f"{_gap(found)} against the samples that chose it"))
    lines.append(size_line(facts["bytes_before"], facts["bytes_after"]))
    lines += cache_lines(facts)
    lines += [Line("note", "of this run", note) for note in found.notes]
    lines.append(result_line(found, why, miss))
    return Verdict(tuple(lines), (_next(request, found),))


def _gap(found: TorchOutcome) -> str:
    """How much better or worse the winner does on samples that decided nothing."""
    if found.target.metric == "sqnr":
        return f"{found.gap:+.1f} dB"
    return f"{found.gap:+.2g}" if found.target.metric == "cosine" else f"{100 * found.gap:+.2g} %"


def _next(request: Auto, found: TorchOutcome) -> str:
    """The command that makes sense now."""
    data, target = ["--data", str(request.source.data)], found.target
    if found.solved and found.confirmed and found.format in MEASURES:
        return f"{request.output / 'README.md'} says how {found_program(request)} loads it"
    if found.solved and found.confirmed:
        measured = [*data, "--seq-len", str(request.seq_len)] if target.metric == "perplexity" else ["--metric", TASK]
        return command_line(["quark", "torch", "evaluate", str(request.output), *measured])
    lost = abs(found.winner.value - found.float_value) / abs(found.float_value) if found.float_value else math.nan
    known = not found.solved and target.metric in ("perplexity", "metric")
    if told := again(request, found, lost if known else None, 0.0):
        return told
    asked = f"{target.metric}{'>=' if target.least else '<='}{target.value:.6g}"
    words = ["quark", "torch", "search", str(request.model), *data, "--target", asked, "-o", "plan.yaml"]
    words += ["--for", found_program(request), "-c", found.winner.values["scheme"], "-c", FLOAT]
    return f"find the layers that need more bits: {command_line(words)}"


def _facts(found: TorchOutcome, verdict: Verdict) -> Mapping[str, Any]:
    also = {"format": found.format, "reported": found.reported, "chance": found.chance}
    return facts_of(found, verdict, "value", also)


def _page(request: Auto, found: TorchOutcome, verdict: Verdict) -> Report:
    tried = [one for one in found.trials if not one.error]
    points = tuple(ChartPoint(one.name, one.bytes / 1e6, one.value, one is found.winner) for one in tried)
    points = (*points, ChartPoint("float", found.float_bytes / 1e6, found.float_value))
    plot = Scatter("Size and accuracy", "MB", found.target.metric, points, found.target.least)
    tables = _trials(found), why_table(found, partial(why_not, dearer="larger, or as large and less accurate"))
    return page_of(request, found, verdict, tables, [plot])
