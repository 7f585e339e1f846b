"""Sensitivities and plans as tables, charts and plain data, for both flows."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any

from quark.cli.common import Wanted
from quark.report import LayerView, Measure, ModelView, Table, file_size, milliseconds
from quark.report.verdict import Line, Verdict
from quark.search.plan_file import loss_words
from quark.search.trials import shown
from quark.search.values import FLOAT, Found, Study, Trial

#: Seconds below which a latency is told in microseconds.
SHORT = 1e-4


def layer_table(study: Study) -> Table:
    """One row a layer, that which loses most first (by its worst candidate)."""
    names, columns = dict.fromkeys(trial.layer for trial in study.ranked()), study.candidates
    rows = []
    for name in names:
        trials = [study.of(name, candidate) for candidate in columns]
        kind = next(trial.kind for trial in trials if trial is not None)
        rows.append((name, kind, *("–" if trial is None else loss_words(trial, study.metric) for trial in trials)))
    heads = tuple(f"{column}: {shown(study.metric)}" for column in columns)
    note = f"Each layer quantized alone, on {study.samples} samples."
    return Table("Sensitivity, worst first", ("layer", "kind", *heads), tuple(rows), note)


def views(study: Study) -> tuple[ModelView, ...]:
    """What each candidate costs in each layer, for a page."""
    found: list[ModelView] = []
    for candidate in study.candidates:
        trials = (trial for name in study.layers if (trial := study.of(name, candidate)) is not None)
        layers = tuple(LayerView(t.layer, t.kind, t.layer, nan, nan, alone=_alone(t, study.metric)) for t in trials)
        found.append(ModelView(candidate, layers=layers))
    return tuple(found)


def measure_of(study: Study) -> Measure:
    """What the page shows of a layer: decibels, or what another metric loses."""
    return Measure() if study.metric == "sqnr" else Measure(f"loss of {shown(study.metric)}", "", more=False)


def _alone(trial: Trial, metric: str) -> float:
    return trial.metrics["sqnr"] if metric == "sqnr" else trial.loss


def found_table(found: Found, target: str | None) -> Table:
    """The plan beside uniform data types."""
    budgets = [name for name in ("size", "bits", "latency", "energy") if name in found.costs]
    rows = [("the plan", f"{found.value:.6g}", *(cost_words(name, found.costs[name]) for name in budgets))]
    for name, (value, costs) in found.uniform.items():
        rows.append((f"all {name}", f"{value:.6g}", *(cost_words(key, costs[key]) for key in budgets)))
    counts = ", ".join(f"{count} × {name}" for name, count in found.counts().items())
    note = f"{counts}. {found.measured} plans were quantized and measured{f' for {target}' if target else ''}."
    return Table("Mixed precision", ("", found.metric, *budgets), tuple(rows), note)


def cost_words(name: str, value: float) -> str:
    """A cost with its unit."""
    if name == "size":
        return file_size(value)
    if name == "latency":
        return milliseconds(value) if value >= SHORT else f"{value * 1e6:.3g} µs"
    return f"{value:,.0f}"


def plan_verdict(
    found: Found, wanted: Wanted, following: str, judged: Sequence[Line] = (), again: Sequence[str] = ()
) -> Verdict:
    """Whether the plan is what was wanted, how far its figures can be trusted, and the next command.

    Args:
        found: the plan.
        wanted: what was asked for.
        following: the command that uses the plan.
        judged: lines about the model that it makes, the same as ``quantize`` prints.
        again: what to ask for instead, where that model is not good though the plan is what was wanted.
    """
    asked = wanted.target or f"{wanted.budget} <= {wanted.limit:g}"
    missing = "" if found.met else f", {_missing(found, wanted)}"
    lines = [
        Line("result", "reached" if found.met else "missed", f"{asked}{missing}", bad=not found.met),
        Line(
            "chosen by",
            found.metric,
            f"{found.value:.6g} on the samples that chose the plan",
            figure=f"{found.value:.4g}",
        ),
    ]
    if found.reported is not None:
        gap = f"{found.reported - found.value if found.reported != found.value else 0.0:+.3g}"
        lines.append(
            Line("reported", found.metric, f"{found.reported:.6g} on samples that decided nothing (gap {gap})")
        )
    lines += [Line("note", "samples", note) for note in found.notes]
    lines += judged
    remedy = f"more precise candidates (-c float is the last resort), or a looser target; this plan: {following}"
    if set(found.layers.values()) == {FLOAT}:
        return Verdict(tuple(lines), ("stay with the float model, or ask for less: nothing may be quantized",))
    return Verdict(tuple(lines), (following, *again) if found.met else (remedy,))


def _missing(found: Found, wanted: Wanted) -> str:
    """What the best plan lacks."""
    if wanted.target is None:
        name = next((key for key in (str(wanted.budget), "energy") if key in found.costs), "size")
        return f"no plan that was measured is within it: the cheapest has {cost_words(name, found.costs[name])}"
    bound = float(str(wanted.target).replace("<=", ">=").partition(">=")[2])
    return f"out of reach of {', '.join(found.study.candidates)}: the nearest plan lacks {abs(bound - found.value):.3g}"


def found_facts(found: Found) -> dict[str, Any]:
    """A plan as data."""
    uniform = {name: {found.metric: value, **costs} for name, (value, costs) in found.uniform.items()}
    return {
        "metric": found.metric,
        "value": found.value,
        "costs": dict(found.costs),
        "counts": found.counts(),
        "met": found.met,
        "reported": found.reported,
        "notes": list(found.notes),
        "plans_measured": found.measured,
        "layers": dict(found.layers),
        "uniform": uniform,
        "sensitivity": found.study.to_dict(),
    }
