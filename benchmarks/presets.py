"""Presets on the real models, ours beside the peer's of the same name, from the same calibration data.

    python -m benchmarks.presets [--peer-python PATH] [--peer-operators PATH] [--models NAME ...] [--presets NAME ...]
        [--every 4] [--json FILE [--table]]

Signal-to-noise ratio of each output over held-out samples and the model's task metric, ours on stock ONNX Runtime, and
wall time, processor time and peak memory of the quantization in a process of its own (package import not in the times,
but in the memory). The peer gets a second chance, the model lifted to opset 13, where its first file is unusable. A
peer's file that needs its compiled operators runs only where `--peer-operators` names their library (it is linked to
torch, which is imported first); otherwise that is said, and no figure is made up. Rows that the JSON file already has
are not measured again; `--table` prints those it has, both tools in one line, and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import onnxruntime

from benchmarks import measure, models, record
from benchmarks.fidelity import OURS, QUARK, LayerRuns, Score, judge, leads, prepare
from benchmarks.formats import flowers_top1
from benchmarks.models import Example

PRESETS = ("XINT8", "A8W8", "A16W8", "U8S8_AAWS", "BF16", "BFP16")
HEAD = "| model | preset | tool | metrics | SQNR dB | our lead dB | seconds | CPU s | peak GB |\n" + 9 * "|---" + "|"
TABLE_HEAD = (
    "| model | preset | ours | AMD Quark | SQNR dB, ours | AMD Quark | lead dB ± standard error | CPU s | peak GB |\n"
    + 9 * "|---"
    + "|"
)
MODELS = ("squeezenet11_flowers5", "yolox_nano", "ultraface_rfb320", "silero_vad", "gtcrn", "stories260K")


@dataclass(frozen=True)
class Row:
    """One preset on one model with one tool.

    Attributes:
        seconds: wall time of the quantization.
        cpu_seconds: processor time of all its threads.
        peak_gb: most memory resident, imports included.
    """

    model: str
    preset: str
    tool: str
    score: Score
    seconds: float
    cpu_seconds: float
    peak_gb: float


@contextmanager
def registered(library: Path | None) -> Iterator[None]:
    """Let every session of the block know the operators of a library."""
    if library is None:
        yield
        return
    importlib.import_module("torch")
    original = onnxruntime.InferenceSession

    def opened(path: Any, options: onnxruntime.SessionOptions, **rest: Any) -> onnxruntime.InferenceSession:
        options.register_custom_ops_library(str(library))
        return original(path, options, **rest)

    onnxruntime.InferenceSession = opened
    try:
        yield
    finally:
        onnxruntime.InferenceSession = original


def run_one(bench: LayerRuns, preset: str, tool: str, run: argparse.Namespace) -> Row:
    """Quantize with one tool and judge the file; the peer's second chance is the lifted model."""
    python = run.peer_python if tool == QUARK else sys.executable
    chances = list(bench.models().values()) if tool == QUARK else [bench.example.path]
    rows = []
    for number, path in enumerate(chances):
        output = bench.folder / f"{bench.example.name}__{preset}__{tool.replace(' ', '_')}_{number}.onnx"
        output.unlink(missing_ok=True)
        job = {"model": str(path), "output": str(output), "feeds": str(bench.feeds), "preset": preset}
        outcome = measure.run_job("quark_job", job, python, run.timeout)
        with registered(run.peer_operators if tool == QUARK else None):
            found = judged(bench, output) if outcome.ok else Score(error=outcome.error)
        times = outcome.seconds, outcome.cpu_seconds
        rows.append(Row(bench.example.name, preset, tool, found, *times, outcome.peak_gb))
        output.unlink(missing_ok=True)
        if found.error is None:
            break
    return max(rows, key=lambda row: row.score.mean_sqnr)


def judged(bench: LayerRuns, output: Path) -> Score:
    """The score of a file; one that does not load or run is a result too."""
    try:
        return judge(bench, output, with_metrics=True)
    except Exception as error:  # noqa: BLE001  (a file that does not load or run is a finding, not an end)
        return Score(error=f"unusable file: {str(error)[:200]}")


def cells(row: Row, ours: Score | None) -> list[str]:
    """One line of the table; the peer's says by how much ours leads on each output."""
    found = row.score
    if found.error is not None:
        return [row.model, row.preset, row.tool, found.error[:90], "", "", "", "", ""]
    lead = "" if ours is None else ", ".join(f"{one.decibels:+.1f} {one.verdict}" for one in leads(ours, [found]))
    return [
        row.model,
        row.preset,
        row.tool,
        ", ".join(f"{name} {value:.4g}" for name, value in found.metrics.items()),
        ", ".join(f"{value:.2f}" for value in found.sqnr.values()),
        lead,
        f"{row.seconds:.1f}",
        f"{row.cpu_seconds:.1f}",
        f"{row.peak_gb:.2f}",
    ]


def thinned(example: Example, run: argparse.Namespace) -> Example:
    """SqueezeNet on every so many-th of its images, which are many; the other models as they are."""
    if run.every == 1 or not example.name.startswith("squeezenet"):
        return example
    loaders, all_held_out = models.load_examples(run.data), example.held_out
    return replace(
        example,
        held_out=lambda: islice(all_held_out(), 0, None, run.every),
        metrics=lambda path: flowers_top1(loaders, path, run.every),
    )


def beside(ours: Row, peer: Row | None) -> list[str]:
    """Both tools' figures on one preset in one line."""

    def pair(digits: int, one: float, other: float | None) -> str:
        return f"{one:.{digits}f} / " + ("–" if other is None or other != other else f"{other:.{digits}f}")

    def said(row: Row | None) -> tuple[str, str]:
        if row is None:
            return "not measured", ""
        if row.score.error:
            return f"fails: {row.score.error[:60]}", ""
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in row.score.metrics.items())
        return metrics, " / ".join(f"{value:.2f}" for value in row.score.sqnr.values())

    found = leads(ours.score, [peer.score]) if peer is not None else []
    return [
        *(ours.model, ours.preset, said(ours)[0], said(peer)[0], said(ours)[1], said(peer)[1]),
        " / ".join(f"{lead.decibels:+.2f} ± {lead.error:.2f}" for lead in found),
        pair(1, ours.cpu_seconds, None if peer is None else peer.cpu_seconds),
        pair(2, ours.peak_gb, None if peer is None else peer.peak_gb),
    ]


def print_table(rows: dict[tuple[str, str, str], Row], run: argparse.Namespace) -> None:
    """The rows of the JSON file, sorted by model and preset."""
    print(TABLE_HEAD)
    for model in run.models:
        for preset in run.presets:
            ours = rows.get((model, preset, OURS))
            if ours is not None:
                print("| " + " | ".join(beside(ours, rows.get((model, preset, QUARK)))) + " |")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.presets", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--peer-python", help="interpreter of an environment that holds AMD Quark")
    parser.add_argument("--peer-operators", type=Path, help="library of its compiled operators, to run its files with")
    parser.add_argument("--data", type=Path, default=models.DATA, help="folder of the real models")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), metavar="NAME")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for one quantization")
    parser.add_argument("--every", type=int, default=1, help="SqueezeNet on every so many-th of its images only")
    parser.add_argument("--json", type=Path, help="write the figures to this file too, and go on from it")
    parser.add_argument("--table", action="store_true", help="print the rows of the JSON file and measure nothing")
    return parser.parse_args(argv)


def stored(path: Path | None) -> dict[tuple[str, str, str], Row]:
    """(model, preset, tool) -> the rows that a JSON file has."""
    rows = json.loads(path.read_text())["rows"] if path is not None and path.exists() else []
    found = [Row(**{**row, "score": Score(**row["score"])}) for row in rows]
    return {(row.model, row.preset, row.tool): row for row in found}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table line by line; 0 when ours never fails and is never worse."""
    run, machine = parse(argv), measure.machine()
    rows = stored(run.json)
    if run.table:
        print_table(rows, run)
        return 0
    print(measure.machine_line(machine), end="\n\n")
    print(HEAD)
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for example in models.real_examples(run.data):
            bench = prepare(thinned(example, run), Path(folder)) if example.name in run.models else None
            for preset in run.presets if bench is not None else ():
                good &= compare(bench, preset, run, rows)  # type: ignore[arg-type]
                if run.json:
                    kept = [asdict(row) for row in rows.values()]
                    run.json.write_text(json.dumps({"machine": machine, "rows": kept}, indent=1))
    return 0 if good else 1


def compare(bench: LayerRuns, preset: str, run: argparse.Namespace, rows: dict[tuple[str, str, str], Row]) -> bool:
    """Print the lines of both tools; whether ours is there and never worse."""
    ours: Score | None = None
    good = True
    for tool in (OURS, QUARK) if run.peer_python else (OURS,):
        key = (bench.example.name, preset, tool)
        if key not in rows:
            rows[key] = run_one(bench, preset, tool, run)
        row = rows[key]
        print("| " + " | ".join(cells(row, ours)) + " |", flush=True)
        good &= tool == QUARK or row.score.error is None
        good &= ours is None or all(lead.verdict != "WORSE" for lead in leads(ours, [row.score]))
        ours = row.score
    return good


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
