"""What fake quantization costs, format by format, in units of a copy of the same array.

    python -m benchmarks.numerics                     every format, 16 M float32, NumPy and torch (and a GPU, if any)
    python -m benchmarks.numerics --formats int8 mxfp4 --size 24 --json figures.json

A copy is the least that any function with a result of its own can cost, so the ratio says how far the arithmetic is from
memory speed on the machine at hand. Copies and formats take turns and the medians count. The aim: 4 times a copy for
integers and FP8, 8 times for FP6, FP4 and blocks. The last lines quantize 25 M weights per channel to int8 codes, which
is what the weights of a ResNet-50 cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from quark.numerics.affine import Grid, fake_quantize, quantize
from quark.numerics.array import is_torch
from quark.numerics.formats import FORMATS, Format
from quark.numerics.granularity import Channel

WEIGHTS = (5000, 5000)  # 25 M, as many as a ResNet-50 has


def limit(row: Format) -> float | None:
    """The ratio that ``row`` should not exceed; None where none is set."""
    if row.name.startswith(("int", "uint", "fp8")):
        return 4.0 if row.bits <= 16 else None
    return 8.0 if row.name.startswith(("fp", "mx", "bfp", "nvfp", "amdfp")) else None


def seconds(work: Callable[[], Any], wait: Callable[[], None]) -> float:
    """Wall time of one call."""
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def ratio(work: Callable[[], Any], copy: Callable[[], Any], wait: Callable[[], None], repeats: int) -> dict[str, float]:
    """Medians of ``work`` and ``copy``, which take turns, in milliseconds, and their ratio."""
    work()
    copy()
    pairs = [(seconds(work, wait), seconds(copy, wait)) for _ in range(repeats)]
    working, copying = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
    return {"milliseconds": working, "copy_milliseconds": copying, "ratio": working / copying}


def fake(x: Any, row: Format) -> Callable[[], Any]:
    """Fake quantization of ``x`` under one scale for the tensor (block formats: along the last axis)."""
    scale, zero_point = Grid(row).parameters(-6.0, 6.0)
    return lambda: fake_quantize(x, scale, zero_point, row)


def arrays(size: int) -> dict[str, Any]:
    """The same numbers for every library at hand: rows of 4096, as an activation or a weight has them."""
    x = np.random.default_rng(0).standard_normal((max(size // 4096, 1), 4096), np.float32)
    found: dict[str, Any] = {"NumPy": x}
    try:
        import torch
    except ImportError:
        return found
    found["torch CPU"] = torch.from_numpy(x)
    if torch.cuda.is_available():
        found["torch GPU"] = torch.from_numpy(x).cuda()
    return found


def tools(x: Any) -> tuple[Callable[[], Any], Callable[[], None]]:
    """How ``x`` is copied, and how one waits until its device is done."""
    if not is_torch(x):
        return x.copy, lambda: None
    synchronize = sys.modules["torch"].cuda.synchronize if x.is_cuda else lambda: None
    return x.clone, synchronize


def line(name: str, x: Any, row: Format, repeats: int) -> dict[str, Any]:
    """One format in one library."""
    copy, wait = tools(x)
    found = ratio(fake(x, row), copy, wait, repeats)
    allowed = limit(row)
    verdict = "" if allowed is None else "pass" if found["ratio"] <= allowed else f"FAIL (limit {allowed:g})"
    return {"library": name, "format": row.name, **found, "verdict": verdict}


def weight_line(name: str, like: Any, repeats: int) -> dict[str, Any]:
    """25 M weights to int8 codes, a scale per channel."""
    w = np.random.default_rng(1).standard_normal(WEIGHTS, np.float32)
    scale, zero_point = Grid(FORMATS["int8"]).parameters(w.min(axis=1), w.max(axis=1))
    w = sys.modules["torch"].from_numpy(w).to(like.device) if is_torch(like) else w
    copy, wait = tools(w)
    work = lambda: quantize(w, scale, zero_point, FORMATS["int8"], Channel(0), narrow=True)  # noqa: E731
    return {"library": name, "format": "25 M weights to int8 codes", **ratio(work, copy, wait, repeats), "verdict": ""}


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
    parser.add_argument("--size", type=int, default=24, help="2**SIZE values (default 24: 16 M)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parse(arguments)
    found = arrays(1 << options.size)
    lines = []
    for name, x in found.items():
        lines += [line(name, x, FORMATS[row], options.repeats) for row in options.formats]
        lines.append(weight_line(name, x, options.repeats))
    machine = measure.machine()
    print(measure.machine_line(machine), end="\n\n")
    print(measure.table(["library", "format", "ms", "copy ms", "x copy", ""], map(cells, lines)))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "lines": lines}, indent=1))


if __name__ == "__main__":
    main()
