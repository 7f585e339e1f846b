"""What is typed for ``quark auto``, for both flows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
import yaml

from quark.cli.beside import recipe_beside
from quark.cli.extensions import command_line
from quark.cli.output import print_json, say, show, write_lines
from quark.cli.requests import Auto
from quark.cli.source_options import source_words
from quark.cli.verdicts import FAILED
from quark.errors import ConfigError
from quark.files.ours import MARK
from quark.files.outputs import Output
from quark.measure.score import Score
from quark.report import ModelView, Report, Scatter, Table, file_size
from quark.report.verdict import Line, Verdict
from quark.search.auto import LATE, AutoTrial, Outcome
from quark.search.function import load_function, score_of

ACCEPTABLE = 0.2
"""A larger part of a metric is no tolerance that anybody means."""
OTHER_SAMPLES = "within the tolerance on the samples that chose it, outside on those that decided nothing"
"""Why a winner is not confirmed."""


def looser(request: Auto, lost: float) -> str:
    """The command with a tolerance that a loss of this part meets; its ledger is another one's."""
    return command(replace(request, drop=percent(lost), ledger=None))


def longer(request: Auto) -> str:
    """The command with more time."""
    return command(replace(request, minutes=max(10.0, 2 * request.minutes)))


def command(asked: Auto) -> str:
    """What is typed for a request whose output exists: a file is replaced, a folder gets another name."""
    folder = asked.model.is_dir()
    output = asked.output.with_name(f"{asked.output.name}-2") if folder else asked.output
    words = ["quark", "auto", str(asked.model), "-o", str(output), *source_words(asked.source)]
    told: dict[str, Any] = {"for": asked.goal, "metric": asked.metric, "labels": asked.labels, "drop": asked.drop}
    told |= {"minutes": f"{asked.minutes:g}", "ledger": asked.ledger, "custom-ops": asked.custom_ops}
    told |= {"seq-len": asked.seq_len} if folder else {"workers": asked.workers if asked.workers != 1 else None}
    words += [word for name in asked.exclude for word in ("--exclude", name)]
    words += [word for name, value in told.items() if value is not None for word in (f"--{name}", str(value))]
    return command_line(words if folder else [*words, "--overwrite"])


def percent(part: float) -> str:
    """A part as ``--drop`` reads it, rounded up to two digits."""
    digits = 1 - math.floor(math.log10(100 * part))
    return f"{math.ceil(100 * part * 10**digits - 1e-9) / 10**digits:g}%"


def parse_drop(text: str | None) -> float | None:
    """The part that may be lost.

    Raises:
        ConfigError: no number.
    """
    if text is None:
        return None
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise ConfigError(f"--drop {text!r}: write a part, as in 1% or 0.01") from error


def own_metric(text: str | None) -> Callable[[Any], Score] | None:
    """The user's function, of a path or a model, as a metric with its error.

    Raises:
        ConfigError: there is no such function.
    """
    if text is None:
        return None
    function, name = load_function(text), text.rpartition(":")[2]
    return lambda model: score_of(function(model), name)


def outputs_of(request: Auto, others: Mapping[str, Output]) -> dict[str, Output]:
    """What is written, by name: ``others``, the recipe, and the report where it is asked for."""
    page = {} if request.report is None else {"report": Output(request.report, "--report", folder=True)}
    return {**others, "recipe": next(recipe_beside(vars(request))), **page}


def recipe_text(request: Auto, values: Mapping[str, Any], words: Sequence[str]) -> str:
    """The configuration file that makes the winner again, with the command that reads it."""
    told = {"found": {"by": MARK, "model": request.model.name, "for": request.goal}}
    given = f"--config {next(recipe_beside(vars(request))).path.name} --data …"
    return f"# {MARK}\n# {command_line(words)} {given}\n" + yaml.safe_dump({**values, **told}, sort_keys=False)


def result_line(found: Outcome[Any], why: str, miss: str) -> Line:
    """Whether the winner keeps what it has to: what chose it and what decided nothing may say two things."""
    if found.solved and not found.confirmed:
        return Line("result", "not confirmed", f"{why}: {OTHER_SAMPLES}", bad=True)
    return Line("result", "solved" if found.solved else "not solved", why if found.solved else miss, not found.solved)


def again(request: Auto, found: Outcome[Any], lost: float | None, allowed: float) -> str | None:
    """The same command with more time, where that was short, or with a tolerance that the nearest miss meets.

    Args:
        request, found: what was asked, and what came of it.
        lost: the part that the nearest miss loses; None: not known.
        allowed: the part that may be lost.
    """
    if any(why == LATE for _, why in found.untried):
        return longer(request)
    return looser(request, lost) if lost is not None and allowed < lost < ACCEPTABLE else None


def trial_table(
    found: Outcome[Any], columns: Sequence[str], cells: Callable[[Any], Sequence[str]], note: str = ""
) -> Table:
    """Every trial; ``cells``: its figures under ``columns``."""
    rows = []
    for one in found.trials:
        name = f"* {one.name}" if one.name == found.winner.name else one.name
        size = file_size(one.bytes) if one.bytes else "–"
        rows.append((name, *cells(one), size, "yes" if one.passes else "no", "; ".join(one.causes)))
    told = "* the winner" if any(row[0].startswith("* ") for row in rows) else ""
    return Table("Trials", ("configuration", *columns, "size", "within", "mends"), tuple(rows), told + note)


def why_not(trial: AutoTrial, dearer: str) -> str:
    """Why a trial did not win; ``dearer``: where it is within the tolerance."""
    return (trial.error and "it could not be made") or (dearer if trial.passes else "outside the tolerance")


def why_table(found: Outcome[Any], why: Callable[[Any], str], note: str = "") -> Table:
    """Why the winner won over every other trial."""
    rows = tuple((one.name, why(one)) for one in found.trials if one.name != found.winner.name)
    return Table("Why the others lost", ("configuration", "why"), rows, note)


def untried_table(found: Outcome[Any]) -> Table:
    """What was not tried, and why."""
    return Table("Not tried", ("configuration", "why"), tuple(found.untried))


def facts_of(found: Outcome[Any], verdict: Verdict, value: str, also: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome as one JSON object; ``value``: what the value of a trial is called, ``also``: facts of the flow."""
    trials = [
        {"name": one.name, "within": one.passes, "bytes": one.bytes, value: one.value, "error": one.error}
        for one in found.trials
    ]
    told = {"winner": found.winner.name, "solved": found.solved, "confirmed": found.confirmed, **also}
    return {**told, "trials": trials, "untried": dict(found.untried), "verdict": verdict.facts()}


def page_of(
    request: Auto, found: Outcome[Any], verdict: Verdict, tables: Sequence[Table], plots: Iterable[Scatter]
) -> Report:
    """The outcome as a page."""
    view = ModelView(found.winner.name, verdict)
    title = f"auto: {request.model.name} for {request.goal}"
    return Report(title, (view,), tables=(*tables, untried_table(found)), scatters=tuple(plots))


def tell(found: Mapping[str, Any] | Table, verdict: Verdict, wrote: tuple[Path, Path], solved: bool) -> None:
    """The last words of the command: one JSON object, or the table of trials, what was written and the verdict.

    Raises:
        typer.Exit: with the code 3, where nothing solves it.
    """
    if isinstance(found, Mapping):
        print_json(found)
    else:
        show(found)
        say(f"Wrote {wrote[0]} and {wrote[1]}.")
        write_lines(verdict.words())
    if not solved:
        raise typer.Exit(FAILED)
