"""What fake quantization costs, format by format, in units of a copy of the same array.

    python -m benchmarks.numerics                     every format, 16 M float32, NumPy and torch (and a GPU, if any)
    python -m benchmarks.numerics --device cuda       the GPU alone; an error where there is none
    python -m benchmarks.numerics --formats int8 mxfp4 --size 24 --json figures.json

A copy is the least that any function with a result of its own can cost, so the ratio says how far the arithmetic is
from memory speed on the machine at hand. Copies and formats take turns and the least time of each counts; on a busy
machine ``--cpu-time`` counts the seconds of this process instead of those on the wall. The aim: 4 times a copy for
integers and FP8, 8 times for FP6, FP4 and blocks; 3 times on a GPU. The last lines quantize 25 M weights per channel to
int8 codes, which is what the weights of a ResNet-50 cost.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure, record
from quark.numerics.affine import Coding, Grid
from quark.numerics.array import is_torch, on_gpu
from quark.numerics.formats import FORMATS, Format
from quark.numerics.granularity import Channel

WEIGHTS = (5000, 5000)  # 25 M, as many as a ResNet-50 has


def limit(row: Format, on_gpu: bool = False) -> float | None:
    """The ratio that ``row`` should not exceed; None where none is set."""
    if on_gpu:
        return 3.0
    if row.name.startswith(("int", "uint", "fp8")):
        return 4.0
    return 8.0 if row.name.startswith(("fp", "mx", "bfp", "nvfp", "amdfp")) else None


@dataclass(frozen=True)
class Watch:
    """How to time a call: the clock, how to wait for the device, how often."""

    clock: Callable[[], float]
    wait: Callable[[], None]
    repeats: int

    def seconds(self, work: Callable[[], Any]) -> float:
        """Time of one call."""
        self.wait()
        start = self.clock()
        work()
        self.wait()
        return self.clock() - start


def ratio(work: Callable[[], Any], copy: Callable[[], Any], watch: Watch) -> dict[str, float]:
    """Least times of ``work`` and ``copy``, which take turns, in milliseconds, and their ratio."""
    work()
    copy()
    pairs = [(watch.seconds(work), watch.seconds(copy)) for _ in range(watch.repeats)]
    working, copying = (1000 * min(side) for side in zip(*pairs, strict=True))
    return {"milliseconds": working, "copy_milliseconds": copying, "ratio": working / copying}


def fake(x: Any, row: Format) -> Callable[[], Any]:
    """Fake quantization of ``x`` under one scale for the tensor (block formats: along the last axis)."""
    scale, zero_point = Grid(row).parameters(-6.0, 6.0)
    return lambda: Coding(row).fake_quantize(x, scale, zero_point)


def arrays(size: int, device: str = "all") -> dict[str, Any]:
    """The same numbers for every library at hand: rows of 4096, as an activation or a weight has them.

    Raises:
        SystemExit: ``device`` is "cuda", and torch sees none.
    """
    x = np.random.default_rng(0).standard_normal((max(size // 4096, 1), 4096), np.float32)
    found: dict[str, Any] = {"NumPy": x}
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None:
        found["torch CPU"] = torch.from_numpy(x)
    if torch is not None and torch.cuda.is_available():
        found[f"torch {torch.cuda.get_device_name()}"] = torch.from_numpy(x).cuda()
    if device == "cuda" and len(found) < 3:
        raise SystemExit("--device cuda: torch sees no CUDA device here")
    return {name: array for name, array in found.items() if device == "all" or (device == "cuda") == on_gpu(array)}


def watch_for(x: Any, options: argparse.Namespace) -> Watch:
    """The watch for arrays like ``x``."""
    wait = sys.modules["torch"].cuda.synchronize if on_gpu(x) else lambda: None
    return Watch(time.process_time if options.cpu_time else time.perf_counter, wait, options.repeats)


def copy_of(x: Any) -> Callable[[], Any]:
    """How ``x`` is copied."""
    return x.clone if is_torch(x) else x.copy


def line(name: str, x: Any, row: Format, watch: Watch) -> dict[str, Any]:
    """One format in one library."""
    found, allowed = ratio(fake(x, row), copy_of(x), watch), limit(row, on_gpu(x))
    verdict = "" if allowed is None else "pass" if found["ratio"] <= allowed else f"FAIL (limit {allowed:g})"
    return {"library": name, "format": row.name, **found, "verdict": verdict}


def weight_line(name: str, like: Any, watch: Watch) -> dict[str, Any]:
    """25 M weights to int8 codes, a scale per channel."""
    w = np.random.default_rng(1).standard_normal(WEIGHTS, np.float32)
    scale, zero_point = Grid(FORMATS["int8"]).parameters(w.min(axis=1), w.max(axis=1))
    w = sys.modules["torch"].from_numpy(w).to(like.device) if is_torch(like) else w

    def work() -> Any:
        return Coding(FORMATS["int8"], Channel(0), narrow=True).quantize(w, scale, zero_point)

    return {"library": name, "format": "25 M weights to int8 codes", **ratio(work, copy_of(w), watch), "verdict": ""}


def measured(found: dict[str, Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every line, as soon as it is measured."""
    for name, x in found.items():
        watch = watch_for(x, options)
        for row in options.formats:
            yield line(name, x, FORMATS[row], watch)
        if not options.no_weights:
            yield weight_line(name, x, watch)


def cells(entry: dict[str, Any]) -> list[str]:
    """One line of the table."""
    figures = [
        f"{entry[key]:.{digits}f}" for key, digits in (("milliseconds", 1), ("copy_milliseconds", 1), ("ratio", 2))
    ]
    return [entry["library"], entry["format"], *figures, entry["verdict"]]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS), metavar="NAME")
    parser.add_argument("--device", choices=["all", "cpu", "cuda"], default="all")
    parser.add_argument("--size", type=int, default=24, help="2**SIZE values (default 24: 16 M)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds of this process, for a busy machine")
    parser.add_argument("--no-weights", action="store_true", help="leave out the lines of the 25 M weights")
    parser.add_argument("--json", type=Path, help=record.HELP)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parse(arguments)
    machine = measure.machine()
    print(measure.machine_line(machine), end="\n\n")
    lines = []
    for entry in measured(arrays(1 << options.size, options.device), options):
        lines.append(entry)
        print(" | ".join(cells(entry)), file=sys.stderr, flush=True)
    print(measure.table(["library", "format", "ms", "copy ms", "x copy", ""], map(cells, lines)))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "lines": lines}, indent=1))


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
