"""``quark onnx compare``: a float model and its quantized form on the same samples."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from quark.cli.output import print_json, say, show, write_lines, write_page
from quark.cli.source_options import Source, source_words
from quark.cli.sources import feeds
from quark.cli.verdicts import FAILED, Bound, Subject, judge_all, verdict_of
from quark.onnx.compare import Comparison, compare
from quark.onnx.evaluation import layer_table
from quark.report import Report, Table, decibels
from quark.report.progress import bars
from quark.report.verdict import Verdict


@dataclass(frozen=True)
class Request:
    """What was typed."""

    model: Path
    quantized: Path
    source: Source


def run(request: Request, report: Path | None, json: bool, bound: Bound | None = None) -> None:
    """Compare, and tell on standard output; the verdict comes last.

    Raises:
        typer.Exit: with the code 3, a bound that is not met.
    """
    samples = feeds(request.model, request.source, made=request.quantized)
    with bars() as update:
        found = compare(
            request.model, request.quantized, samples, progress=lambda done: update("compare", done, len(samples))
        )
    if report:
        write_page(page(request, found), report)
        say(f"Report: {report}")
    verdict = _verdict(request, found)
    if json:
        print_json({**facts(found), "verdict": verdict.facts()})
    else:
        show(output_table(found))
        show(layer_table(found))
        write_lines(verdict.words())
    if bound is not None and (failure := bound.failure(found)):
        say(failure)
        raise typer.Exit(FAILED)


def _verdict(request: Request, found: Comparison) -> Verdict:
    """The lines about the quantized model; how fast it is, `quantize` tells."""
    source = request.source
    where = "on generated data, which says little" if source.random else f"on {found.samples} samples"
    subject = Subject(request.model, request.quantized, None, source_words(source), (), where)
    return verdict_of(judge_all(subject, None, found, {}), [])


def output_table(found: Comparison) -> Table:
    """End to end, one row an output."""
    outputs = found.outputs.items()
    rows = tuple((name, decibels(d.sqnr), f"{d.cosine:.6f}", f"{d.l2:.4g}", decibels(d.psnr)) for name, d in outputs)
    note = f"Over {found.samples} samples."
    return Table("End to end", ("output", "SQNR", "cosine", "L2", "PSNR"), rows, note)


def facts(found: Comparison) -> dict[str, object]:
    """The same as data, for ``--json``; layers in the order of the graph."""
    outputs = {
        name: {"sqnr": d.sqnr, "cosine": d.cosine, "l2": d.l2, "psnr": d.psnr} for name, d in found.outputs.items()
    }
    clipped = {tensor.name: tensor.clipped for tensor in found.tensors}
    layers = [{**asdict(layer), "clipped": clipped.get(layer.tensor)} for layer in found.layers]
    return {"samples": found.samples, "outputs": outputs, "layers": layers}


def page(request: Request, found: Comparison) -> Report:
    """The HTML page of one comparison."""
    headline = tuple((f"SQNR of {name}", decibels(distance.sqnr)) for name, distance in list(found.outputs.items())[:4])
    title = f"{request.quantized.name} against {request.model.name}"
    return Report(title, headline, (output_table(found), layer_table(found)), found.layers, found.tensors)
