"""AdaRound and AdaQuant on few samples, with and without ``shrinkage``: the lead over nearest on other data.

    python -m benchmarks.few_samples

The perceptron has three products of 64 inputs and random weights, and is trained six times from other seeds, on inputs
that do not depend on each other ("white") and on mixtures of them ("mixed"); 1024 other rows judge. Of SqueezeNet the
samples are flowers, and 128 others judge. int8 activations (MinMax), int4 or int8 weights per channel; XINT8.
300 steps for the perceptron, 60 for SqueezeNet; AdaQuant at a rate of 1e-3.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper, parser

import quark.onnx as q
from benchmarks import models, record
from benchmarks.fidelity import LayerRuns, judge, leads, prepare
from benchmarks.onnx_algorithms import FORMATS, HELD_OUT
from benchmarks.peers.job import read_feeds

CPU = ["CPUExecutionProvider"]
WIDTH, NETS, STEPS = 64, 6, 300
TEXT = f"""<ir_version: 8, opset_import: ["": 17]> g (float[N,{WIDTH}] x) => (float[N,10] y) {{
    a = MatMul(x, w0)  b = Add(a, b0)  r = Relu(b)
    c = MatMul(r, w1)  d = Add(c, b1)  s = Relu(d)
    y = MatMul(s, w2)
}}"""
HEAD = (
    "| model | samples | format | algorithm | lead dB, shrinkage | worst | lead dB without | worst |\n"
    + 8 * "|---"
    + "|"
)
KINDS: dict[str, Any] = {"AdaRound": q.AdaRoundConfig, "AdaQuant": q.AdaQuantConfig}
RATES = {"AdaRound": 0.1, "AdaQuant": 1e-3}


def perceptron(seed: int) -> onnx.ModelProto:
    """Random weights of unit gain."""
    rng = np.random.default_rng(seed)
    sizes = {"w0": (WIDTH, WIDTH), "b0": (WIDTH,), "w1": (WIDTH, WIDTH), "b1": (WIDTH,), "w2": (WIDTH, 10)}
    model = parser.parse_model(TEXT)
    for name, size in sizes.items():
        array = rng.standard_normal(size).astype(np.float32) * (0.1 if name.startswith("b") else WIDTH**-0.5)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def rows(seed: int, count: int, mixed: bool) -> np.ndarray:
    """[count, WIDTH]."""
    mixing = np.eye(WIDTH)
    if mixed:
        spread = np.random.default_rng(100 + seed % 10).standard_normal((WIDTH, WIDTH)) * WIDTH**-0.5
        mixing = spread @ np.diag(np.linspace(0.1, 2, WIDTH)) + 0.2
    return np.asarray(np.random.default_rng(seed).standard_normal((count, WIDTH)) @ mixing, np.float32)


def signal(model: onnx.ModelProto, quantized: Any, x: np.ndarray) -> float:
    """SQNR in dB."""
    sessions = (onnxruntime.InferenceSession(one.SerializeToString(), providers=CPU) for one in (model, quantized))
    y, found = (session.run(None, {"x": x})[0] for session in sessions)
    return float(10 * np.log10(np.square(y).sum() / np.square(y - found).sum()))


def config_of(format: str, kind: str | None, steps: int, shrinkage: bool = True) -> q.QConfig:
    """Rounding to nearest, or an algorithm."""
    chosen = [] if kind is None else [KINDS[kind](num_iterations=steps, learning_rate=RATES[kind], shrinkage=shrinkage)]
    return q.QConfig(FORMATS[format], algo_config=chosen, extra_options={"PrintSummary": False})


def of_perceptron(count: int, mixed: bool, format: str, kind: str) -> list[list[float]]:
    """[with, without][net]: leads in dB."""
    found: list[list[float]] = [[], []]
    for seed in range(NETS):
        model, seen = perceptron(seed), [{"x": row[None]} for row in rows(10 + seed, count, mixed)]
        other = rows(500 + seed, 1024, mixed)
        configs = [config_of(format, None, 0), *(config_of(format, kind, STEPS, on) for on in (True, False))]
        nearest, *tuned = (
            signal(model, q.ModelQuantizer(one).quantize_model(model, None, seen), other) for one in configs
        )
        for leads_of, value in zip(found, tuned, strict=True):
            leads_of.append(value - nearest)
    return found


def of_squeezenet(bench: LayerRuns, count: int, format: str, kind: str) -> list[list[float]]:
    """The same, of one network."""
    feeds = list(read_feeds(bench.feeds))
    feeds = [feeds[k * len(feeds) // count] for k in range(count)]
    scores = []
    for config in (config_of(format, None, 0), *(config_of(format, kind, 60, on) for on in (True, False))):
        path = bench.folder / "made.onnx"
        q.ModelQuantizer(config).quantize_model(bench.example.path, path, feeds)
        scores.append(judge(bench, path, with_metrics=False))
    return [[leads(score, scores[:1])[0].decibels] for score in scores[1:]]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, line by line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help=record.HELP)
    parser.parse_args(argv)
    print(HEAD, flush=True)

    def say(name: str, count: int, format: str, kind: str, found: list[list[float]]) -> None:
        shown = " | ".join(f"{np.mean(one):+.2f} | {min(one):+.2f}" for one in found)
        print(f"| {name} | {count} | {format} | {kind} | {shown} |", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        example = next(one for one in models.real_examples() if one.name == "squeezenet11_flowers5")
        short = replace(example, held_out=lambda: islice(example.held_out(), HELD_OUT))
        bench = prepare(short, Path(folder))
        for kind, format in itertools.product(KINDS, ("W4A8", "XINT8", "A8W8")):
            for mixed, count in itertools.product((False, True), (16, 256)):
                name = "perceptron, mixed inputs" if mixed else "perceptron, white inputs"
                say(name, count, format, kind, of_perceptron(count, mixed, format, kind))
            for count in (2, 6, 32):
                say("SqueezeNet", count, format, kind, of_squeezenet(bench, count, format, kind))
    return 0


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
