"""A report as one HTML file that needs nothing else: plotly.js, the data and the styles are inside it."""

from __future__ import annotations

import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from quark.files.ours import MARK
from quark.files.outputs import Output, write_output
from quark.report.tables import is_numeric, plain
from quark.report.values import Chart, Layer, Point, Report, Scatter, Table, TensorView


def write_html(report: Report, path: str | Path) -> Path:
    """Write ``report`` to ``path`` (folders are made) and return the path.

    The file is about 5 MB: it carries plotly.js so that it opens without a network.

    Raises:
        OutputError: the file cannot be written; what was there is there still.
    """
    path = Path(path)
    write_output(Output(path, "the report", folder=True), render(report))
    return path


def render(report: Report) -> str:
    """The page as text."""
    parts = {
        "MARK": MARK,
        "TITLE": html.escape(report.title),
        "STYLE": _asset("report.css"),
        "FACTS": "".join(_fact(label, value) for label, value in report.facts),
        "TABLES": "".join(_table(table) for table in report.tables),
        "DATA": _embed(
            {
                "layers": [_layer(x) for x in report.layers],
                "tensors": [_tensor(x) for x in report.tensors],
                "charts": [_chart(x) for x in report.charts],
                "scatters": [_scatter(x) for x in report.scatters],
            }
        ),
        "SCRIPT": _asset("report.js"),
        "PLOTLY": get_plotlyjs(),
    }
    before, *pieces = _asset("report.html").split("{{")
    return before + "".join(parts[name] + rest for name, rest in (piece.split("}}", 1) for piece in pieces))


def _asset(name: str) -> str:
    return resources.files("quark.report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _embed(data: Any) -> str:
    """JSON that may stand inside a script element: no ``</`` can end the element early."""
    return json.dumps(data, separators=(",", ":")).replace("</", "<\\/")


def _fact(label: str, value: str) -> str:
    return f"<div class='fact'><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>"


def _table(table: Table) -> str:
    side = ["number" if is_numeric(table, index) else "words" for index in range(len(table.columns))]
    rows = "".join(_row(row, side, "td") for row in table.rows)
    note = f"<p class='note'>{html.escape(table.note)}</p>" if table.note else ""
    filled = f"<table>{_row(table.columns, side, 'th')}{rows}</table>"
    return f"<section><h2>{html.escape(table.title)}</h2><div class='scroll'>{filled}</div>{note}</section>"


def _row(cells: tuple[str, ...], side: list[str], tag: str) -> str:
    filled = (f"<{tag} class='{kind}'>{html.escape(cell)}</{tag}>" for kind, cell in zip(side, cells, strict=True))
    return f"<tr>{''.join(filled)}</tr>"


def _layer(layer: Layer) -> dict[str, Any]:
    return {
        "name": layer.name or layer.tensor,
        "op": layer.op_type,
        "tensor": layer.tensor,
        "sqnr": plain(round(layer.sqnr, 2)),
        "cosine": plain(round(layer.cosine, 6)),
    }


def _chart(chart: Chart) -> dict[str, Any]:
    series = [{"label": label, "values": [plain(float(v)) for v in values]} for label, values in chart.series]
    return {"title": chart.title, "axis": chart.axis, "names": list(chart.names), "series": series, "note": chart.note}


def _scatter(scatter: Scatter) -> dict[str, Any]:
    def dots(points: tuple[Point, ...]) -> list[dict[str, Any]]:
        return [{"name": one.name, "x": plain(one.x), "y": plain(one.y), "chosen": one.chosen} for one in points]

    axes = {"title": scatter.title, "cost": scatter.cost, "metric": scatter.metric}
    return {**axes, "points": dots(scatter.points), "front": dots(scatter.front)}


def _tensor(tensor: TensorView) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "format": tensor.format,
        "low": plain(float(tensor.low)),
        "high": plain(float(tensor.high)),
        "clipped": tensor.clipped,
        "counts": [int(count) for count in tensor.counts],
        "edges": [float(f"{edge:.6g}") for edge in tensor.edges],
    }
