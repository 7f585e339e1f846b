"""Time and peak memory of quantizing a ResNet-50, ours beside two peers, in one run on one machine.

    python -m benchmarks.onnx_ptq [--peer-python PATH] [--methods minmax percentile mse entropy] [--repeats 3]
    python -m benchmarks.onnx_ptq --latency      how fast the quantized models run, and on which kernels

Limits for ours: MinMax within 1.5 times the bare inference of the same samples plus 1 s, histogram methods within 1.8
times plus 1 s, 0.6 GB for all. The measured call goes from file to file and, where a package imports its engine
late, includes that import. Every job is a process of its own; repeats are interleaved and the median counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from benchmarks import measure, models, record
from benchmarks.measure import Outcome
from benchmarks.peers.job import write_feeds
from benchmarks.resnet_latency import latency_report

MEMORY_LIMIT_GB = 0.6
EXTRA_SECONDS = 1.0
OURS, ONNXRUNTIME, QUARK, BARE = "ours", "onnxruntime", "AMD Quark", "bare inference"


@dataclass(frozen=True)
class Method:
    """One calibration method in the terms of each package.

    Attributes:
        spec: the tensor spec for activations and weights in the `quark` interface.
        onnxruntime: the method's name there; None where it has none.
        factor: our limit in bare inferences of the calibration samples.
    """

    spec: dict[str, str]
    onnxruntime: str | None
    factor: float


METHODS = {
    "minmax": Method({"spec": "Int8Spec", "calibration_method": "MinMax"}, "MinMax", 1.5),
    "percentile": Method({"spec": "Int8Spec", "calibration_method": "Percentile"}, "Percentile", 1.8),
    "mse": Method({"spec": "XInt8Spec", "calibration_method": "MinMSE"}, None, 1.8),
    "entropy": Method({"spec": "Int8Spec", "calibration_method": "Entropy"}, "Entropy", 1.8),
}


@dataclass(frozen=True)
class Job:
    """What to run for one line of the table, and how often it came out how."""

    tool: str
    method: str
    module: str
    values: dict[str, Any]
    python: str = sys.executable


def plan_jobs(files: dict[str, str], methods: Sequence[str], peer_python: str | None) -> list[Job]:
    """Every job of one round: bare inference first, then each method with each tool."""
    bare = {"models": {"float": files["model"]}, "feeds": files["feeds"], "rounds": 3}
    jobs = [Job(BARE, "float", "float_job", bare)]
    for name in methods:
        method = METHODS[name]
        layer = {**files, "inputs": method.spec, "weight": method.spec}
        jobs.append(Job(OURS, name, "quark_job", layer))
        if method.onnxruntime:
            types = {"method": method.onnxruntime, "activation": "QInt8", "weight": "QInt8", "symmetric": True}
            jobs.append(Job(ONNXRUNTIME, name, "onnxruntime_job", {**files, **types}))
        if peer_python:
            jobs.append(Job(QUARK, name, "quark_job", layer, peer_python))
    return jobs


def run_rounds(jobs: Sequence[Job], repeats: int) -> list[Outcome]:
    """Run the whole list `repeats` times, so that each tool meets the same moods of the machine."""
    rounds = [[run_one(job) for job in jobs] for _ in range(repeats)]
    return [measure.middle(outcomes) for outcomes in zip(*rounds, strict=True)]


def run_one(job: Job) -> Outcome:
    """Run a job without what an earlier one wrote."""
    if "output" in job.values:
        Path(job.values["output"]).unlink(missing_ok=True)
    print(f"running: {job.tool} {job.method}", file=sys.stderr)
    return measure.run_job(job.module, job.values, job.python)


def verdict(job: Job, outcome: Outcome, bare_seconds: float) -> str:
    """How ours stands against its limits; rivals have none."""
    if not outcome.ok or job.tool != OURS:
        return "" if outcome.ok else "fails"
    limit = METHODS[job.method].factor * bare_seconds + EXTRA_SECONDS
    passed = outcome.seconds <= limit and outcome.peak_gb <= MEMORY_LIMIT_GB
    return f"{'pass' if passed else 'FAIL'} (limit {limit:.2f} s, {MEMORY_LIMIT_GB} GB)"


def row(job: Job, outcome: Outcome, bare_seconds: float) -> list[str]:
    """One line of the table."""
    if not outcome.ok:
        return [job.method, job.tool, "-", "-", "-", "-", "-", f"fails: {outcome.error}"]
    seconds = bare_seconds if job.tool == BARE else outcome.seconds
    processor = "" if job.tool == BARE else f"{outcome.cpu_seconds:.2f}"
    cells = [f"{seconds:.2f}", f"{seconds / bare_seconds:.2f}", processor, f"{outcome.process_seconds:.2f}"]
    return [job.method, job.tool, *cells, f"{outcome.peak_gb:.2f}", verdict(job, outcome, bare_seconds)]


def time_report(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure, print the table, and return everything as plain values."""
    shape = models.TOY if arguments.toy else models.Shape()
    files = {"model": str(folder / "model.onnx"), "feeds": str(folder / "feeds.npz")}
    onnx.save(models.resnet(shape), files["model"])
    write_feeds(Path(files["feeds"]), models.random_images(shape.image, arguments.samples, seed=1))
    jobs = plan_jobs({**files, "output": str(folder / "quantized.onnx")}, arguments.methods, arguments.peer_python)
    outcomes = run_rounds(jobs, arguments.repeats)
    if outcomes[0].result is None:
        raise SystemExit(f"the bare inference failed: {outcomes[0].error}")
    bare = outcomes[0].result["pass_seconds"]["float"]
    headers = ["method", "tool", "call s", "x bare", "CPU s", "process s", "peak GB", "verdict"]
    print(measure.table(headers, [row(job, outcome, bare) for job, outcome in zip(jobs, outcomes, strict=True)]))
    lines = [
        {"tool": job.tool, "method": job.method, **measure.as_json(outcome), "verdict": verdict(job, outcome, bare)}
        for job, outcome in zip(jobs, outcomes, strict=True)
    ]
    return {"bare_seconds": bare, "samples": arguments.samples, "repeats": arguments.repeats, "lines": lines}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.onnx_ptq", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--peer-python", help="interpreter of an environment that holds AMD Quark")
    parser.add_argument("--samples", type=int, default=16, help="calibration samples")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["minmax", "percentile", "mse"])
    parser.add_argument("--repeats", type=int, default=3, help="interleaved rounds; the median counts")
    parser.add_argument("--toy", action="store_true", help="a network of two blocks instead, to try the benchmark")
    parser.add_argument("--latency", action="store_true", help="time the quantized models instead of the quantization")
    parser.add_argument("--json", type=Path, help=record.HELP)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0 when ours is within its limits, 1 when it is not."""
    arguments = parse(argv)
    machine = measure.machine()
    print(measure.machine_line(machine), end="\n\n")
    with tempfile.TemporaryDirectory() as folder:
        report = (latency_report if arguments.latency else time_report)(arguments, Path(folder))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, **report}, indent=1))
    missed = [
        line for line in report["lines"] if line["tool"] == OURS and line["verdict"].startswith(("FAIL", "fails"))
    ]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
