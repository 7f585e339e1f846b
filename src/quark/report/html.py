"""A report as one HTML file that needs nothing else: styles, program and data are inside it.

Names come from models, so from strangers: words in the page are escaped, the data are JSON in which no ``<``, ``>`` or
``&`` is left, the program writes text nodes only, and the page forbids itself to load anything.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from quark.files.ours import MARK
from quark.files.outputs import Output, write_output
from quark.report.page import ModelView, Report
from quark.report.pictures import address
from quark.report.tables import is_numeric, plain
from quark.report.values import Channels, ChartPoint, Example, LayerView, SampleAnswer, Scatter, Table, TensorView
from quark.report.verdict import Line, Verdict

#: What a page about a model shows large; a subject that nothing was measured of says so.
SUBJECTS = ("accuracy", "speed", "size", "coverage")
BARS = 64
"""Bars of a histogram."""
COLUMNS = 96
"""Columns of a plot of channels; more channels share one."""


def write_html(report: Report, path: str | Path) -> Path:
    """Write ``report`` to ``path`` (folders are made) and return the path.

    Raises:
        OutputError: the file cannot be written; what was there is there still.
    """
    path = Path(path)
    write_output(Output(path, "the report", folder=True), render(report))
    return path


def render(report: Report) -> str:
    """The page as text."""
    named = [(model.name if len(report.models) > 1 else "", model) for model in report.models]
    parts = {
        "MARK": MARK,
        "TITLE": _words(report.title),
        "STYLE": _asset("report.css"),
        "VERDICTS": _verdict("", report.verdict) + "".join(_verdict(name, one.verdict) for name, one in named),
        "TABLES": "".join(_table(table) for table in report.tables if table.rows or table.note),
        "DATA": _embed(data_of(report)),
        "SCRIPT": "\n".join(_asset(name) for name in ("plots.js", "tree.js", "report.js")),
    }
    before, *pieces = _asset("report.html").split("{{")
    return before + "".join(parts[name] + rest for name, rest in (piece.split("}}", 1) for piece in pieces))


def data_of(report: Report) -> dict[str, Any]:
    """The figures of the page as plain values."""
    words = _Words()
    reasons = [{name: words.of(why) for name, why in model.reasons.items()} for model in report.models]
    return {
        "models": [model.name for model in report.models],
        "measure": vars(report.measure),
        "notes": list(report.notes),
        "layers": _layers(report),
        "tensors": _tensors(report.models),
        "reasons": reasons,
        "words": words.all,
        "examples": [_example(one) for one in report.examples],
        "scatters": [_scatter(one) for one in report.scatters],
    }


class _Words:
    """Sentences that occur often, each kept once."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._places: dict[str, int] = {}

    def of(self, sentence: str) -> int:
        if sentence not in self._places:
            self._places[sentence] = len(self.all)
            self.all.append(sentence)
        return self._places[sentence]


def _asset(name: str) -> str:
    return resources.files("quark.report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _words(text: str) -> str:
    """Text that may stand anywhere in the page; what no file can hold (half a surrogate pair) is a question mark."""
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"))


def _embed(data: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or begin another."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _verdict(name: str, verdict: Verdict) -> str:
    """Four figures with their words, what else there is to say, and the next command; other figures where none of them
    was measured."""
    lines = {line.subject: line for line in verdict.lines}
    shown = [line for line in verdict.lines if line.figure and line.subject not in SUBJECTS]
    if any(subject in lines for subject in SUBJECTS):
        shown = [lines.get(subject) or Line(subject, "not measured", "") for subject in SUBJECTS]
    tiles = "".join(map(_tile, shown))
    rest = [line for line in verdict.lines if line not in shown]
    said = "".join(f"<li><b>{_words(one.subject)}</b> {_words(one.word)}: {_words(one.reason)}</li>" for one in rest)
    said += "".join(f"<li><b>next</b> <code>{_words(one)}</code></li>" for one in verdict.advice)
    head = f"<h2>{_words(name)}</h2>" if name else ""
    tiles = f"<div class='tiles'>{tiles}</div>" if tiles else ""
    said = f"<ul class='said'>{said}</ul>" if said else ""
    return f"<div class='verdict'>{head}{tiles}{said}</div>" if tiles or said else ""


#: Words that are not good, where the line is not bad: slower here, of a preset for another device.
_NEUTRAL = ("not measured", "same", "slower", "larger")


def _tile(line: Line) -> str:
    level = "bad" if line.word == "lost" else "doubtful" if line.bad else "none" if line.word in _NEUTRAL else "good"
    figure = f"<b>{_words(line.figure or '–')}</b>"
    chip = f"<i class='chip {level}'>{_words(line.word)}</i>"
    return f"<div class='tile'><span>{_words(line.subject)}</span>{figure}{chip}<p>{_words(line.reason)}</p></div>"


def _table(table: Table) -> str:
    side = ["number" if is_numeric(table, index) else "words" for index in range(len(table.columns))]
    rows = "".join(_row(row, side, "td") for row in table.rows)
    note = f"<p class='note'>{_words(table.note)}</p>" if table.note else ""
    filled = f"<table>{_row(table.columns, side, 'th')}{rows}</table>" if table.rows else ""
    title = f"<summary>{_words(table.title)} <span class='note'>{len(table.rows)}</span></summary>"
    return f"<details>{title}<div class='scroll'>{filled}</div>{note}</details>"


def _row(cells: tuple[str, ...], side: list[str], tag: str) -> str:
    filled = (f"<{tag} class='{kind}'>{_words(cell)}</{tag}>" for kind, cell in zip(side, cells, strict=True))
    return f"<tr>{''.join(filled)}</tr>"


def _layers(report: Report) -> list[dict[str, Any]]:
    """One row a tensor that layers of any model make, in the order of the first model that has it."""
    rows: dict[str, dict[str, Any]] = {}
    for index, model in enumerate(report.models):
        for layer in model.layers:
            first = {"n": layer.name or layer.tensor, "o": layer.op_type, "t": layer.tensor}
            row = rows.setdefault(layer.tensor, {**first, "m": [None] * len(report.models)})
            row["m"][index] = _figures(layer)
            if layer.name in model.weights:
                row["w"] = model.weights[layer.name]
    for name, row in rows.items():
        if name in report.links:
            row |= {"r": list(report.links[name].reads), "f": list(report.links[name].feeds)}
    return list(rows.values())


def _figures(layer: LayerView) -> list[Any]:
    """Alone, own, accumulated, cosine, and 1 where the tensor is rescaled."""
    found = (layer.alone, layer.own, layer.sqnr)
    return [*(None if one is None else plain(round(one, 2)) for one in found), plain(round(layer.cosine, 6))] + (
        [1] if layer.rescaled else []
    )


def _tensors(models: Iterable[ModelView]) -> dict[str, list[Any]]:
    """By name, an entry a model; a histogram that is that of the model before is left out."""
    found: dict[str, list[Any]] = {}
    held = [{view.name: view for view in model.tensors} for model in models]
    for name in dict.fromkeys(name for views in held for name in views):
        before: Mapping[str, Any] = {}
        for views in held:
            entry = None if name not in views else _tensor(views[name])
            found.setdefault(name, []).append(
                entry and {key: entry[key] for key in entry if key in _OWN or entry[key] != before.get(key)}
            )
            before = entry or before
    return found


#: Of a tensor, what every model has to say for itself.
_OWN = ("format", "low", "high", "clipped")


def _tensor(tensor: TensorView) -> dict[str, Any]:
    counts = _summed(tensor.counts, BARS)
    found: dict[str, Any] = {
        "format": tensor.format,
        "low": _short(tensor.low),
        "high": _short(tensor.high),
        "clipped": plain(tensor.clipped),
        "counts": [int(count) for count in counts],
        "span": [_short(tensor.edges[0]), _short(tensor.edges[-1])],
    }
    if tensor.channels is not None:
        found["channels"] = _channels(tensor.channels)
    if tensor.note:
        found["note"] = tensor.note
    return found


def _channels(channels: Channels) -> dict[str, Any]:
    sides = {"lowest": np.minimum, "highest": np.maximum, "low": np.maximum, "high": np.minimum}
    groups = -(-len(channels.lowest) // COLUMNS)
    found: dict[str, Any] = {"each": groups, "of": len(channels.lowest)}
    for name, join in sides.items():
        values = getattr(channels, name)
        if values is not None:
            found[name] = [_short(join.reduce(values[k : k + groups])) for k in range(0, len(values), groups)]
    return found


def _summed(counts: np.ndarray, bars: int) -> np.ndarray:
    """Fewer bins of one width."""
    each = -(-len(counts) // bars)
    return np.add.reduceat(counts, np.arange(0, len(counts), each)) if len(counts) % each == 0 else counts


def _short(value: float) -> float | str:
    """Six digits."""
    return plain(float(f"{float(value):.6g}"))


def _example(one: Example) -> dict[str, Any]:
    found: dict[str, Any] = {"output": one.output, "kind": one.kind, "sample": one.sample}
    found["answers"] = [_answer(answer) for answer in one.answers]
    return found if one.picture is None else {**found, "picture": address(one.picture)}


def _answer(answer: SampleAnswer) -> dict[str, Any]:
    if answer.picture is not None:
        return {"picture": address(answer.picture)}
    boxes = [[*(round(float(x), 4) for x in box.corners), round(box.score, 3), box.kind] for box in answer.boxes]
    return {"classes": [[kind, round(score, 4)] for kind, score in answer.classes], "boxes": boxes}


def _scatter(scatter: Scatter) -> dict[str, Any]:
    def dots(points: tuple[ChartPoint, ...]) -> list[dict[str, Any]]:
        shown = (one for one in points if math.isfinite(one.x) and math.isfinite(one.y))
        return [{"name": one.name, "x": one.x, "y": one.y, "chosen": one.chosen} for one in shown]

    axes = {"title": scatter.title, "cost": scatter.cost, "metric": scatter.metric}
    return {**axes, "points": dots(scatter.points), "front": dots(scatter.front)}
