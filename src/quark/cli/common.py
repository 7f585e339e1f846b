"""Options that commands of both flows have, with one spelling and one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark.cli.paths import Writes

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]
LedgerPath = Annotated[
    Path | None,
    Writes("state"),
    typer.Option("--ledger", help="A .json file that finished layers are kept in; run again, it goes on from there."),
]
ChartReport = Annotated[
    Path | None, Writes(folder=True), typer.Option("--report", help="Also write an HTML page with the layers plotted.")
]
PlanOutput = Annotated[
    Path, Writes(), typer.Option("--output", "-o", help="The plan, a .yaml or .json file to edit and use.")
]
Limit = Annotated[
    float | None, typer.Option(help="In the place of a target: the most of the budget (bytes, bits or seconds).")
]
Compare = Annotated[bool, typer.Option(help="Also measure every candidate for all layers.")]
Rounds = Annotated[int, typer.Option(min=1, help="Whole plans that are quantized and measured, at most.")]
