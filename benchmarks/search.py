"""Mixed precision that a search finds, against one data type for all layers at the same size.

    python -m benchmarks.search [--models squeezenet stories]

SqueezeNet-flowers (ONNX): 4 images for calibration and trials; SQNR of the logits on 24
others. stories260K
(PyTorch): 8 windows of 128 tokens; mean KL divergence to the float logits on 8 other windows. For each
uniform data type the search gets its size as the limit.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record

SHARED = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"
ONNX = ("uint8/int3", "uint8/int4", "uint8/int8@channel", "uint16/int8@channel")
TORCH = ("mxfp4_weight_only", "mxfp4_weight_only+gptq", "int8_wo_per_channel", "bfp16")


def helper(name: str) -> Any:
    """A module of the shared data."""
    sys.path.insert(0, str(SHARED))
    spec = importlib.util.spec_from_file_location(name, SHARED / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(*cells: object) -> None:
    """One line of a Markdown table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def squeezenet() -> None:
    """ONNX."""
    from quark.onnx.search import search
    from quark.search.target import SearchGoal
    from quark.search.trials import Trying

    data = helper("load_examples")
    path = SHARED / "models" / "squeezenet11_flowers5.onnx"
    samples = list(data.calib_flowers5(28))
    trials = samples[:4]

    start = time.perf_counter()
    keeping = Trying(ledger=Path(tempfile.mkdtemp()) / "l.json")
    first = search(
        str(path), "A8W8_CPU", trials, ONNX, SearchGoal(evaluation=samples[4:], limit=1e12, compare=True), keeping
    )
    print(f"{len(first.study.trials)} trials in {time.perf_counter() - start:.1f} s")
    row("plan", "kB", "SQNR dB")
    for kind, (value, costs) in first.uniform.items():
        row(f"all {kind}", f"{costs['size'] / 1e3:.0f}", f"{value:.2f}")
        found = search(
            str(path), "A8W8_CPU", trials, ONNX, SearchGoal(evaluation=samples[4:], limit=costs["size"]), keeping
        )
        counts = ", ".join(f"{count} × {key}" for key, count in found.counts().items())
        row(f"found ({counts})", f"{found.costs['size'] / 1e3:.0f}", f"{found.value:.2f}")


def stories() -> None:
    """PyTorch."""
    import torch

    from quark.search.target import SearchGoal
    from quark.search.trials import Trying
    from quark.torch.search import search

    data, models = helper("load_examples"), helper("torch_models")
    model = models.load_llama(SHARED / "models" / "stories260K.bin")
    ids = np.atleast_2d(data.token_ids())
    parts = [{"ids": torch.from_numpy(row_[None, :128].astype(np.int64))} for row_ in ids[:16]]
    config = {"scheme": TORCH[0], "exclude": ["output"]}
    start = time.perf_counter()
    keeping = Trying(ledger=Path(tempfile.mkdtemp()) / "l.json")
    first = search(model, parts[:8], TORCH, SearchGoal(limit=1e12, evaluation=parts[8:], compare=True), config, keeping)
    print(f"{len(first.study.trials)} trials in {time.perf_counter() - start:.1f} s")
    row("plan", "kB", "KL, 1e-3 nats")
    for kind, (value, costs) in first.uniform.items():
        row(f"all {kind}", f"{costs['size'] / 1e3:.0f}", f"{value * 1e3:.3f}")
    for limit in sorted({costs["size"] for _, costs in first.uniform.values()} | {150e3, 180e3}):
        found = search(model, parts[:8], TORCH, SearchGoal(limit=limit, evaluation=parts[8:]), config, keeping)
        counts = ", ".join(f"{count} × {key}" for key, count in found.counts().items())
        row(f"found ({counts})", f"{found.costs['size'] / 1e3:.0f}", f"{found.value * 1e3:.3f}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["squeezenet", "stories"])
    parser.add_argument("--json", type=Path, help=record.HELP)
    for chosen in parser.parse_args().models:
        {"squeezenet": squeezenet, "stories": stories}[chosen]()


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
