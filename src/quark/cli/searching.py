"""``quark onnx sensitivity`` and ``quark onnx search``: layers tried alone, and plans of mixed precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quark.cli.search_output import tell_plan, tell_study, write_both
from quark.cli.search_tables import Wanted
from quark.cli.settings import parse_settings
from quark.cli.source_options import Source
from quark.cli.sources import feeds
from quark.onnx.config_file import config_of, read_values
from quark.onnx.search import save_plan, search
from quark.onnx.sensitivity import sensitivity
from quark.report.progress import bars
from quark.search.plan_file import check_kind

#: Candidates of a search where none are given: the preset, more bits for activations, none.
USUAL = ("A16W8", "float")


@dataclass(frozen=True)
class Request:
    """What was typed; ``chosen``: settings, layout, excluded nodes."""

    model: Path
    preset: str
    config: Path | None
    candidates: tuple[str, ...]
    source: Source
    chosen: tuple[tuple[str, ...], str | None, tuple[str, ...]]
    workers: int
    ledger: Path | None


def values_of(request: Request) -> dict[str, Any]:
    """The configuration as keys and values of a file, with what the command line adds."""
    values: dict[str, Any] = {"preset": request.preset} if request.config is None else read_values(request.config)
    settings, layout, exclude = request.chosen
    options = {**(values.get("options") or {}), **parse_settings(settings)}
    added: Mapping[str, Any] = {
        "target": layout or values.get("target"),
        "options": options,
        "exclude": [*(values.get("exclude") or []), *exclude],
    }
    values |= {key: value for key, value in added.items() if value}
    config_of(values)  # mistakes are told before the samples are read
    return values


def run_sensitivity(request: Request, metric: str, report: Path | None, json: bool) -> None:
    """Rank the layers, on standard output."""
    values = values_of(request)
    samples = feeds(request.model, request.source)
    candidates = request.candidates or (values["preset"],)
    with bars() as update:
        found = sensitivity(
            request.model,
            values,
            samples,
            candidates,
            metric,
            request.workers,
            request.ledger,
            lambda done, total: update("layers", done, total),
        )
    tell_study(found, request.model, "samples", {"config": values}, report, json)


def run_search(request: Request, wanted: Wanted, report: Path | None, json: bool) -> None:
    """Find a plan, write it, and tell on standard output."""
    values = values_of(request)
    usual = "latency" if wanted.target is not None and config_of(values).target == "cpu" else "size"
    wanted = replace(wanted, budget=wanted.budget or usual)
    check_kind(wanted.output, "--output")
    samples = feeds(request.model, request.source)
    source = request.source
    held_out = (
        None
        if wanted.eval_data is None
        else feeds(request.model, replace(source, data=wanted.eval_data, random=False, samples=None))
    )
    candidates = request.candidates or tuple(dict.fromkeys((values["preset"], *USUAL)))
    with bars() as update:
        found = search(
            request.model,
            values,
            samples,
            candidates,
            wanted.target,
            wanted.budget,
            wanted.limit,
            wanted.metric,
            held_out,
            request.workers,
            request.ledger,
            wanted.rounds,
            wanted.compare,
            lambda done, total: update("layers", done, total),
            wanted.estimate,
        )
    write = partial(save_plan, config=values, found=found, target=wanted.target, budget=wanted.budget)
    write_both(found, wanted, request.model, report, write)
    following = f"quark onnx quantize {request.model} -o OUT --config {wanted.output} --data ..."
    tell_plan(found, wanted, request.model, following, report, json)
