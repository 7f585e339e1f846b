"""How fast the quantized models run on ONNX Runtime, and which kernels they run on.

Each variant is one of ours; the models take turns in one process, one sample each, and the median counts. The kernels
are the operators of the graph as the session optimized it: integer kernels (QLinearConv …) instead of float ones
between QuantizeLinear and DequantizeLinear pairs.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from benchmarks import measure, models
from benchmarks.peers.job import write_feeds

INT8 = {"spec": "Int8Spec", "calibration_method": "MinMax"}
UINT8 = {"spec": "UInt8Spec", "calibration_method": "MinMax"}
CHANNEL = {**INT8, "quant_granularity": "Channel"}
VARIANTS: dict[str, dict[str, Any]] = {
    "A8W8: int8 activations, int8 weights": {"inputs": INT8, "weight": INT8},
    "uint8 activations, int8 weights per channel": {"inputs": UINT8, "weight": CHANNEL},
    "int8 as shifted uint8: target cpu": {"inputs": INT8, "weight": INT8, "target": "cpu"},
    "preset A8W8_CPU": {"preset": "A8W8_CPU"},
}


def kernels(path: Path) -> dict[str, int]:
    """Operator types of the graph that a default session really runs, by count."""
    optimized = path.with_suffix(".optimized.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(optimized)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    counts = Counter(node.op_type for node in onnx.load(optimized, load_external_data=False).graph.node)
    return dict(counts.most_common())


def latency_report(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Quantize each variant, print latencies and kernels, and return everything as plain values."""
    shape = models.TOY if arguments.toy else models.Shape()
    model, feeds = folder / "model.onnx", folder / "feeds.npz"
    onnx.save(models.resnet(shape), model)
    write_feeds(feeds, models.random_images(shape.image, arguments.samples, seed=1))
    paths, lines = {"float": model}, []
    for k, (name, values) in enumerate(VARIANTS.items()):
        output = folder / f"variant{k}.onnx"
        print(f"quantizing: {name}", file=sys.stderr)
        outcome = measure.run_job(
            "quark_job", {"model": str(model), "output": str(output), "feeds": str(feeds), **values}
        )
        if outcome.ok:
            paths[name] = output
        else:
            lines.append({"tool": "ours", "variant": name, "verdict": f"fails: {outcome.error}"})
    return {"lines": lines + timed_lines(paths, feeds, arguments.repeats)}


def timed_lines(paths: dict[str, Path], feeds: Path, repeats: int) -> list[dict[str, Any]]:
    """Time the models side by side and print the table."""
    job = {"models": {name: str(path) for name, path in paths.items()}, "feeds": str(feeds), "rounds": repeats}
    outcome = measure.run_job("float_job", job)
    if outcome.result is None:
        raise SystemExit(f"the inference failed: {outcome.error}")
    times = outcome.result["milliseconds"]
    lines = [
        {"tool": "ours", "variant": name, "milliseconds": times[name], "megabytes": path.stat().st_size / 1e6,
         "speedup": times["float"] / times[name], "kernels": kernels(path), "verdict": ""}
        for name, path in paths.items()
    ]  # fmt: skip
    print(measure.table(["model", "ms", "x faster", "MB", "kernels of the optimized graph"], map(line_cells, lines)))
    return lines


def line_cells(line: dict[str, Any]) -> list[str]:
    """One line of the table."""
    listed = ", ".join(f"{name} {count}" for name, count in line["kernels"].items())
    figures = [f"{line['milliseconds']:.2f}", f"{line['speedup']:.2f}", f"{line['megabytes']:.2f}"]
    return [line["variant"], *figures, listed]
