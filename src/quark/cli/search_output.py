"""What `sensitivity` and `search` tell at their end, the same for ONNX and PyTorch: tables, a page, or JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from quark.cli.common import Wanted
from quark.cli.output import print_json, say, show, write_lines, write_page
from quark.cli.search_tables import found_facts, found_table, layer_table, measure_of, views
from quark.cli.verdicts import FAILED
from quark.files.outputs import Output, drafts
from quark.report import Report
from quark.report.verdict import Verdict
from quark.search.values import Found, Study


def tell_study(found: Study, model: Path, unit: str, facts: Mapping[str, Any], report: Path | None, json: bool) -> None:
    """Show the ranked layers; ``unit``: what the data consist of, ``facts``: more entries of the JSON."""
    table = layer_table(found)
    if report:
        note = f"{len(found.layers)} layers, each quantized alone, on {found.samples} {unit}."
        title = f"{model.name}, layer by layer"
        write_page(Report(title, views(found), tables=(table,), notes=(note,), measure=measure_of(found)), report)
        say(f"Report: {report}")
    if json:
        print_json({"model": model, **facts, **found.to_dict()})
        return
    show(table)


def tell_plan(found: Found, wanted: Wanted, model: Path, verdict: Verdict, failures: Sequence[str] = ()) -> None:
    """Show a plan that is written; ``failures``: what the model that it makes lacks, a sentence each.

    Raises:
        typer.Exit: with the code 3, where the plan misses the target, or for failures.
    """
    if wanted.report:
        say(f"Report: {wanted.report}")
    if wanted.json:
        print_json({"model": model, "output": wanted.output, **found_facts(found), "verdict": verdict.facts()})
    else:
        show(found_table(found, wanted.target))
        say(f"Wrote {wanted.output}.")
        write_lines(verdict.words())
    if failures:
        say("\n".join(failures))
    if failures or not found.met:
        raise typer.Exit(FAILED)


def write_both(found: Found, wanted: Wanted, model: Path, verdict: Verdict, write_plan: Callable[[Path], None]) -> None:
    """The plan, by ``write_plan``, and the page that ``--report`` asks for: both of them or neither."""
    outputs = {"plan": Output(wanted.output, "--output")}
    outputs |= {} if wanted.report is None else {"report": Output(wanted.report, "--report", folder=True)}
    with drafts(outputs) as paths:
        write_plan(paths["plan"])
        if wanted.report is not None:
            write_page(_page(found, wanted, model, verdict), paths["report"])


def _page(found: Found, wanted: Wanted, model: Path, verdict: Verdict) -> Report:
    study = found.study
    note = f"Each of {len(study.layers)} layers quantized alone, on {study.samples} samples."
    tables = found_table(found, wanted.target), layer_table(study)
    title = f"{model.name}, mixed precision"
    return Report(title, views(study), tables=tables, notes=(note,), measure=measure_of(study), verdict=verdict)
