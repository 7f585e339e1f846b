"""AdaRound on a ResNet-50: time, memory and the objective that is reached, ours beside AMD Quark, in one run.

    python -m benchmarks.adaround [--peer-python PATH] [--samples 8] [--iterations 20] [--toy]

53 convolutions and a linear layer, int8 by MinMax, the peer's default batch size of 1. The objective is AdaRound's own:
the error of every layer's result (behind its activation function) against the float model's, with the quantized model's
input, relative to the result and averaged over the layers. It is measured on the written models, by ONNX Runtime, on
the calibration samples and on as many others; rounding to nearest is the same job without the algorithm. The peer's
objective is that of the paper, which ours has without its ``shrinkage``.

Limits for ours on two idle cores: 35 s and 1.0 GB with it, an objective no larger than the peer's without it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from benchmarks import measure, models, record
from benchmarks.measure import Outcome
from benchmarks.peers.job import read_feeds, write_feeds

LAYERS = ("Conv", "Gemm")
SPEC = {"spec": "Int8Spec", "calibration_method": "MinMax"}
SECONDS, MEMORY_GB = 35.0, 1.0
NAN = float("nan")
PAPER = "ours, AdaRound without shrinkage"


def results_of(model: onnx.ModelProto) -> list[str]:
    """The tensors that layers and the Relu behind them write; the same names in every tool's output."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    made = []
    for node in model.graph.node:
        if node.op_type in LAYERS:
            behind = readers.get(node.output[0], [])
            relu = len(behind) == 1 and behind[0].op_type == "Relu"
            made.append(behind[0].output[0] if relu else node.output[0])
    return made


def fetched(path: str, names: Sequence[str], feeds: str) -> list[list[np.ndarray]]:
    """The named tensors of every sample, with the runtime's fusions off so that all of them exist."""
    model = onnx.load(path)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [session.run(list(names), feed) for feed in read_feeds(feeds)]


def objective(float_path: str, path: str, feeds: str) -> float:
    """The mean over layers of (error / result)^2, over all samples."""
    names = results_of(onnx.load(float_path))
    known = {name for node in onnx.load(path).graph.node for name in node.output}
    missing = [name for name in names if name not in known]
    names = [name for name in names if name in known]
    if missing:
        print(f"note: {len(missing)} layers of {path} have results of another name and are left out", file=sys.stderr)
    noise, signal = np.zeros(len(names)), np.zeros(len(names))
    for x, y in zip(fetched(float_path, names, feeds), fetched(path, names, feeds), strict=True):
        noise += [float(np.square(a - b, dtype=np.float64).sum()) for a, b in zip(x, y, strict=True)]
        signal += [float(np.square(a, dtype=np.float64).sum()) for a in x]
    return float(np.mean(noise / signal))


def jobs(files: dict[str, str], arguments: argparse.Namespace) -> dict[str, tuple[dict[str, Any], str]]:
    """Name -> (job, interpreter)."""
    here = sys.executable
    layer = {**files, "inputs": SPEC, "weight": SPEC}
    config = {"class": "AdaRoundConfig", "num_iterations": arguments.iterations, "batch_size": 1}
    tuned = {**layer, "algorithms": [{**config, "data_size": arguments.samples}]}
    paper = {**layer, "algorithms": [{**config, "data_size": arguments.samples, "shrinkage": False}]}
    found = {"ours, to nearest": (layer, here), "ours, AdaRound": (tuned, here), PAPER: (paper, here)}
    if arguments.peer_python:
        found |= {
            "AMD Quark, to nearest": (layer, arguments.peer_python),
            "AMD Quark, AdaRound": (tuned, arguments.peer_python),
        }
    return found


def row(name: str, outcome: Outcome, error: float, elsewhere: float) -> list[str]:
    """One line of the table."""
    if not outcome.ok:
        return [name, "-", "-", "-", f"fails: {outcome.error}", "-"]
    cost = [f"{outcome.seconds:.1f}", f"{outcome.cpu_seconds:.1f}", f"{outcome.peak_gb:.2f}"]
    return [name, *cost, f"{error:.6f}", f"{elsewhere:.6f}"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adaround", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--peer-python", help="interpreter of an environment that holds AMD Quark")
    parser.add_argument("--samples", type=int, default=8, help="calibration samples")
    parser.add_argument("--iterations", type=int, default=20, help="steps per layer")
    parser.add_argument("--toy", action="store_true", help="a network of two blocks instead, to try the benchmark")
    parser.add_argument("--json", type=Path, help=record.HELP)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where ours fails or misses a limit."""
    arguments = parse(argv)
    print(measure.machine_line(measure.machine()), end="\n\n")
    with tempfile.TemporaryDirectory() as folder:
        shape = models.TOY if arguments.toy else models.Shape()
        files = {"model": str(Path(folder) / "model.onnx"), "feeds": str(Path(folder) / "feeds.npz")}
        onnx.save(models.resnet(shape), files["model"])
        other = str(Path(folder) / "held_out.npz")
        for seed, path in enumerate((files["feeds"], other), start=1):
            write_feeds(Path(path), models.random_images(shape.image, arguments.samples, seed=seed))
        rows, reached = [], {}
        for number, (name, (job, python)) in enumerate(jobs(files, arguments).items()):
            print(f"running: {name}", file=sys.stderr)
            output = str(Path(folder) / f"{number}.onnx")
            outcome = measure.run_job("quark_job", {**job, "output": output}, python)
            seen = [files["feeds"], other] if outcome.ok else []
            error, elsewhere = [objective(files["model"], output, feeds) for feeds in seen] or (NAN, NAN)
            reached[name] = (outcome, error)
            rows.append(row(name, outcome, error, elsewhere))
            print(" ".join(rows[-1]), file=sys.stderr)
    print(measure.table(["job", "call s", "CPU s", "peak GB", "objective", "held-out"], rows))
    ours, error = reached["ours, AdaRound"][0], reached[PAPER][1]
    peer = reached.get("AMD Quark, AdaRound", (None, float("inf")))[1]
    good = ours.ok and ours.seconds <= SECONDS and ours.peak_gb <= MEMORY_GB and not error > peer
    print(f"\nlimits: {SECONDS:.0f} s, {MEMORY_GB} GB, the peer's objective: {'pass' if good else 'FAIL'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
