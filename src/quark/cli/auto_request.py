"""What is typed for ``quark auto``, for both flows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from quark.cli.output import print_json, say, show, write_lines
from quark.cli.source_options import Source
from quark.cli.verdicts import FAILED
from quark.errors import ConfigError
from quark.report import Table
from quark.report.verdict import Verdict


@dataclass(frozen=True)
class Request:
    """What was typed."""

    model: Path
    output: Path
    source: Source
    purpose: str
    metric: str | None
    drop: str | None
    minutes: float
    ledger: Path | None = None
    seq_len: int = 512
    labels: Path | None = None
    workers: int = 1


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
