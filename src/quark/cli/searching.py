"""``quark onnx sensitivity`` and ``quark onnx search``: layers tried alone, and plans of mixed precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from quark.cli.common import Wanted
from quark.cli.extensions import command_line
from quark.cli.quantization import CHECKED, Check, check_of, demanded
from quark.cli.requests import Rank, SearchRequest, Tried
from quark.cli.search_output import tell_plan, tell_study, write_both
from quark.cli.search_tables import plan_verdict
from quark.cli.settings import parse_settings
from quark.cli.source_options import source_words
from quark.cli.sources import feeds
from quark.cli.verdicts import Subject, judge_all
from quark.config.job import repeating
from quark.files.private import private_folder
from quark.onnx import Config, ModelQuantizer
from quark.onnx.bodies import wants_bodies
from quark.onnx.config_file import config_of, read_values
from quark.onnx.data import Feed, samples_of
from quark.onnx.data_layout import looked_at
from quark.onnx.graph import model as files
from quark.onnx.recipes import LIBRARIES, Choice
from quark.onnx.search import ASKED, save_plan, search, split_of
from quark.onnx.sensitivity import sensitivity
from quark.report.progress import bars
from quark.report.verdict import Line
from quark.search.parts import Split
from quark.search.plan_file import check_kind
from quark.search.target import SearchGoal, parse_target
from quark.search.trials import Trying
from quark.search.values import FLOAT, Found

#: Candidates of a search where none are given: the preset, more bits for activations, none.
USUAL = ("A16W8", "float")
#: dB by which a target is raised where what meets it is not good.
STEP = 10.0


def values_of(request: Tried) -> dict[str, Any]:
    """The configuration as keys and values of a file, with what the command line adds."""
    values: dict[str, Any] = {"preset": request.chosen} if request.config is None else read_values(request.config)
    options = {**(values.get("options") or {}), **parse_settings(request.settings)}
    added: Mapping[str, Any] = {
        "target": request.layout or values.get("target"),
        "options": options,
        "exclude": [*(values.get("exclude") or []), *request.exclude],
    }
    values |= {key: value for key, value in added.items() if value}
    config_of(values)  # mistakes are told before the samples are read
    return values


def run_sensitivity(request: Rank) -> None:
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
            request.metric,
            Trying(request.workers, request.ledger, partial(update, "layers")),
        )
    tell_study(found, request.model, "samples", {"config": values}, request.report, request.json)


def run_search(request: SearchRequest) -> None:
    """Find a plan, write it, and tell on standard output; the verdict about the model that it makes comes last.

    Raises:
        typer.Exit: with the code 3, where the plan misses the target, or its model a demand.
    """
    values, wanted = values_of(request), request.wanted
    demands = demanded(request.fail_under, request.fail_slower)
    check_kind(wanted.output, "--output")
    timed = wanted.budget != "latency" and _times_layers(request, values)
    usual = "latency" if timed and wanted.target is not None and config_of(values).target == "cpu" else "size"
    wanted = replace(wanted, budget=wanted.budget or usual)
    samples = feeds(request.model, request.source, judged_on=wanted.eval_data)
    source = request.source
    held_out = (
        None
        if wanted.eval_data is None
        else feeds(
            request.model, replace(source, data=wanted.eval_data, random=False, samples=None), judged_on=source.data
        )
    )
    candidates = request.candidates or tuple(dict.fromkeys((values["preset"], *USUAL)))
    with bars() as update:
        found = search(
            request.model,
            values,
            samples,
            candidates,
            SearchGoal(evaluation=held_out, **wanted.asked()),
            Trying(request.workers, request.ledger, partial(update, "layers")),
        )
    parts = split_of(samples, held_out, wanted.metric is not None)
    shown = _shown(parts, samples if held_out is None else held_out)
    lines, check, settings = _judged(request, values, found, parts.fit, shown)
    found = replace(found, settings={**found.settings, **settings})
    again = _again(request, wanted, lines, timed and wanted.budget != "latency")
    verdict = plan_verdict(found, wanted, _following(request, wanted), lines, again)
    write = partial(save_plan, config=values, found=found, target=wanted.target, budget=wanted.budget)
    write_both(found, wanted, request.model, verdict, write)
    tell_plan(found, wanted, request.model, verdict, demands.failures(check.comparison if check else None))


def _times_layers(request: SearchRequest, values: Mapping[str, Any]) -> bool:
    """Whether every layer's time can be told apart: that of layers in bodies of If and Loop cannot."""
    return not wants_bodies(files.load(request.model), Config(config_of(dict(values))).compile().options)


def _following(request: SearchRequest, wanted: Wanted) -> str:
    """The command that makes a model by the plan."""
    output = wanted.output.with_name(f"{request.model.stem}_mixed.onnx")
    judged_on = [] if wanted.eval_data is None else ["--eval-data", str(wanted.eval_data)]
    words = ["quark", "onnx", "quantize", str(request.model), "-o", str(output), "--config", str(wanted.output)]
    return command_line([*words, *source_words(request.source), *judged_on])


def _again(request: SearchRequest, wanted: Wanted, lines: Sequence[Line], timed: bool) -> list[str]:
    """The search that asks for what a model by the plan lacks; not run. ``timed``: time may be asked for."""
    bad = {line.subject: line.word for line in lines if line.bad}
    goal = parse_target(wanted.target, ASKED.metrics, wanted.metric is not None) if wanted.target else None
    decibels = goal is not None and wanted.metric is None and goal.metric in ("sqnr", "psnr")
    raised, slow = decibels and "accuracy" in bad, timed and bad.get("speed") == "slower"
    if goal is None or not (raised or slow):
        return []
    target = f"{goal.metric}>={goal.value + STEP:g}" if raised else str(wanted.target)
    words = ["quark", "onnx", "search", str(request.model), "-o", str(wanted.output), "--target", target]
    words += ["--config", str(request.config)] if request.config else ["--preset", request.chosen]
    words += [word for name in request.candidates for word in ("-c", name)]
    words += ["--budget", "latency" if slow else wanted.budget, *source_words(request.source)]
    return [f"not good enough? not tried: {command_line(words)}"]


def _shown(parts: Split, whole: Any) -> tuple[list[Feed], str]:
    """The samples of the verdict, in words too: those that decided nothing, if they are as many as ``quantize`` looks
    at; otherwise what it looks at, since few samples have too few answers to tell, and both commands say the same."""
    apart = [] if parts.report is None else list(islice(samples_of(parts.report), CHECKED))
    if len(apart) == CHECKED:
        return apart, f"{CHECKED} samples that decided nothing"
    seen = list(islice(samples_of(whole), CHECKED))
    told = f"{len(seen)} samples, of which {len(apart)} decided nothing"
    return seen, told if apart else f"{len(seen)} samples that also decided"


def _judged(
    request: SearchRequest, values: Mapping[str, Any], found: Found, fit: Any, shown: tuple[list[Feed], str]
) -> tuple[list[Line], Check | None, Mapping[str, Any]]:
    """The lines of ``quantize`` about the model that a plan makes; the options that making it decided.

    Args:
        request, values, found: what was asked for, the configuration, and the plan.
        fit: the samples that calibrate.
        shown: those that are judged on, and what they are called.
    """
    pinned = values.get("layers") or {}
    if set(found.layers.values()) == {FLOAT} and not pinned:
        return [Line("speed", "same", "every layer stays in float: there is nothing to win", bad=True)], None, {}
    config = Config(config_of({**values, "layers": {**found.layers, **pinned}}))
    config.global_quant_config.extra_options |= {"PrintSummary": False, **found.settings}
    libraries = config.global_quant_config.extra_options.get(LIBRARIES)
    with private_folder() as folder:
        made = folder / "mixed.onnx"
        result = ModelQuantizer(config).run(request.model, made, looked_at(fit))
        check = check_of(request.model, made, shown[0], False, libraries)
        where = "on generated data, which says little" if request.source.random else f"on {shown[1]}"
        choice = None if request.config else Choice(request.chosen)
        subject = Subject(request.model, made, choice, (), where, result.sample, libraries=libraries)
        lines = judge_all(subject, result.plan, check.comparison)
        return lines, check, repeating(result.plan)
