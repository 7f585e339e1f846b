"""What is typed for ``quark auto``, for both flows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quark.cli.source_options import Source
from quark.errors import ConfigError


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
