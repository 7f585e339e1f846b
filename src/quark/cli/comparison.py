"""``quark onnx compare``: a float model and its quantized forms on the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from quark.cli.extensions import command_line
from quark.cli.output import print_json, say, show, write_lines, write_page
from quark.cli.quantization import demanded
from quark.cli.requests import Compare
from quark.cli.source_options import source_words
from quark.cli.sources import as_made, feeds
from quark.cli.verdicts import FAILED, Subject, judge_all, remedies
from quark.dataclass import dataclass
from quark.onnx.causes import SAMPLES, Causes, causes, with_causes
from quark.onnx.compare import TIMED, Checks, Comparison, compare, relaid
from quark.onnx.evaluation import layer_table
from quark.onnx.examples import examples
from quark.onnx.graph.model import load
from quark.onnx.graph.run import Feed
from quark.onnx.page import model_view
from quark.onnx.page import page as report_of
from quark.report import Report, Table, decibels
from quark.report.progress import bars
from quark.report.verdict import Verdict


@dataclass(frozen=True)
class ComparedModel:
    """One quantized model: how far it is, what its layers cause where a page is wanted, and the verdict."""

    path: Path
    comparison: Comparison
    verdict: Verdict
    causes: Causes | None = None


def run(request: Compare) -> None:
    """Compare, and tell on standard output; the verdict comes last.

    Raises:
        typer.Exit: with the code 3, a demand that is not met.
    """
    demands, report = demanded(request.fail_under, request.fail_slower), request.report
    request = replace(request, source=as_made(request.source, request.quantized[0]))
    samples = feeds(request.model, request.source)
    found = [_compared(request, path, samples, report is not None) for path in request.quantized]
    if report:
        write_page(page(request, found, samples), report)
        say(f"Report: {report}")
    several = len(found) > 1
    if request.json:
        told = [{**facts(one.comparison), "verdict": one.verdict.facts()} for one in found]
        print_json(
            {"models": {str(one.path): fact for one, fact in zip(found, told, strict=True)}} if several else told[0]
        )
    for one in () if request.json else found:
        if several:
            write_lines([f"\n{one.path}"])
        show(output_table(one.comparison))
        show(layer_table(one.comparison))
        write_lines(one.verdict.words())
    missed = [(one, failure) for one in found for failure in demands.failures(one.comparison)]
    for one, failure in missed:
        say(f"{one.path}: {failure}" if several else failure)
    if missed:
        raise typer.Exit(FAILED)


def _compared(request: Compare, path: Path, samples: Any, causing: bool) -> ComparedModel:
    with bars() as update:
        found = compare(
            request.model,
            path,
            samples,
            Checks(timed=TIMED),
            progress=lambda done: update("compare", done, len(samples)),
            libraries=request.libraries,
        )
        measured = None
        if causing:
            measured = causes(
                request.model,
                path,
                samples,
                progress=lambda done: update("causes", done, SAMPLES),
                libraries=request.libraries,
            )
            found = with_causes(found, measured)
    taken = relaid(load(request.model), load(path)).taken(next(iter(samples)))
    return ComparedModel(path, found, _verdict(request, path, found, taken), measured)


def _verdict(request: Compare, path: Path, found: Comparison, feed: Feed) -> Verdict:
    """The lines about one quantized model; ``feed``: a sample as it takes them."""
    source = request.source
    where = "on generated data, which says little" if source.random else f"on {found.samples} samples"
    subject = Subject(request.model, path, None, source_words(source), where, feed, libraries=request.libraries)
    lines = judge_all(subject, None, found)
    lost = any(line.bad and line.subject == "accuracy" for line in lines)
    words = ["quark", "auto", str(request.model), *subject.source, "-o", str(path.with_name(f"{path.stem}_best.onnx"))]
    advice = [f"what an expert would try, not tried: {command_line(words)}"] if lost else []
    return Verdict(tuple(lines), (*advice, *remedies(subject, lines)))


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


def page(request: Compare, found: Sequence[ComparedModel], samples: Any) -> Report:
    """The HTML page of one model or several."""
    views = [model_view(one.path.name, request.model, one.path, one.comparison, one.verdict) for one in found]
    measured = [one.causes for one in found if one.causes is not None]
    tables = [table for one in found for table in _tables(one, len(found) > 1)]
    title = f"{' and '.join(one.path.name for one in found)} against {request.model.name}"
    seen = examples(request.model, request.quantized, samples, request.libraries)
    return report_of(title, request.model, views, measured, seen, tables)


def _tables(one: ComparedModel, several: bool) -> list[Table]:
    tables = [output_table(one.comparison), layer_table(one.comparison)]
    return [replace(table, title=f"{one.path.name}: {table.title}") for table in tables] if several else tables
