"""What ``quark torch plan`` says that ``quantize-files`` takes, beside what it takes: memory, disk, time.

    python -m benchmarks.forecast [--shapes 0.3 0.85 1.1] [--jobs plain gptq gptaq] [--workers N] [--json FILE]

Llama shapes of random weights in bfloat16 are written to a temporary folder, one file a block. Each command runs in a
process of its own with one thread: the forecast first, then the job. The peak is the most ever resident, of several
workers what they have for themselves and what files they map, counted once, looked at 25 times a second. The seconds
are those of the processor; the forecast tries a product and a piece of a weight on the same machine just before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import measure, record
from benchmarks.measure import ROOT

#: Billions of weights -> hidden size, inner size, blocks, heads, heads of keys and values, vocabulary.
SHAPES = {
    "0.07": (1024, 2816, 4, 8, 8, 8000),
    "0.3": (1024, 2816, 24, 8, 8, 16000),
    "0.85": (1536, 4096, 28, 12, 12, 16000),
    "1.1": (2048, 5632, 22, 32, 4, 32000),
}
WINDOWS = ("--samples", "8", "--seq-len", "128", "--batch-size", "4")
JOBS: dict[str, tuple[str, ...]] = {"plain": ()}
JOBS |= {name: ("-a", name) for name in ("gptq", "gptaq", "qronos", "autoround")}


def write_checkpoint(folder: Path, shape: tuple[int, ...]) -> None:
    """A model of random weights, and token ids for windows; one block is in memory at a time."""
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = LlamaConfig(**dict(zip((*names, "vocab_size"), shape, strict=True)), architectures=["LlamaForCausalLM"])
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = LlamaForCausalLM(config).state_dict()
    files: dict[str, list[str]] = {}
    for name in state:
        block = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files.setdefault(f"model-{block}.safetensors", []).append(name)
    torch.manual_seed(0)
    for file, inside in files.items():
        values = {name: torch.randn(state[name].shape) * 0.02 for name in inside}
        ones = {name: torch.ones(state[name].shape) for name in inside if state[name].dim() == 1}
        save_file({name: one.bfloat16() for name, one in (values | ones).items()}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, inside in files.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    np.save(folder.parent / "ids.npy", np.random.default_rng(0).integers(0, shape[-1], (8, 128)))


def write_apart(folder: Path, shape: str) -> None:
    """The same in a process of its own: a child's peak begins with its parent's."""
    code = "import sys; from pathlib import Path; from benchmarks import forecast as f; "
    code += "f.write_checkpoint(Path(sys.argv[1]), f.SHAPES[sys.argv[2]])"
    subprocess.run([sys.executable, "-c", code, str(folder), shape], cwd=ROOT, check=True)


def run(words: Sequence[str]) -> tuple[str, float, int]:
    """Standard output, processor seconds and peak bytes of a command of ``quark``."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen([sys.executable, "-m", "quark", *words], stdout=said, env=environment)
        together = looked_at(child.pid)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read().decode()
    if child.returncode:
        raise RuntimeError(f"quark {' '.join(words)} ended with {child.returncode}")
    alone = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return text, used.ru_utime + used.ru_stime, max(alone, together)


def looked_at(pid: int) -> int:
    """The most bytes that a process and its children have together until it ends; 0 where a system does not tell."""
    most = 0
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        sizes = [resident(one) for one in family(pid)]
        most = max(most, sum(own for own, _ in sizes) + max((files for _, files in sizes), default=0))
        time.sleep(0.04)
    return most


def family(pid: int) -> list[int]:
    """A process and its children."""
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, file.read_text().split())
    return [pid, *(one for child in children for one in family(child))]


def resident(pid: int) -> tuple[int, int]:
    """Bytes of a process in memory: its own, and those of files that it maps."""
    with suppress(OSError, KeyError):
        lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
        found = {row[0]: 1024 * int(row[1]) for row in lines}
        return found["Anonymous:"], found["Rss:"] - found["Anonymous:"]
    return 0, 0


def measured(folder: Path, job: str, workers: int) -> dict[str, Any]:
    """A forecast and its job."""
    jobs = (*JOBS[job], "--workers", str(workers))
    given = ["torch", "plan", str(folder), "-s", "int4_wo_128", *jobs, *WINDOWS, "--json"]
    said = json.loads(run(given)[0])
    data = ("--data", str(folder.parent / "ids.npy"), *WINDOWS) if JOBS[job] else ()
    goal = folder.parent / f"out-{job}"
    words = ["torch", "quantize-files", str(folder), "-o", str(goal), "-s", "int4_wo_128", *jobs, *data, "--json"]
    start = time.perf_counter()
    _, cpu, peak = run(words)
    wall = time.perf_counter() - start
    written = sum(file.stat().st_size for file in goal.glob("*.safetensors"))
    return {
        "seconds": (said["seconds"], cpu, wall),
        "peak": (said["peak_bytes"], peak),
        "bytes": (said["bytes"]["predicted"], written),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES][1:])
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=["plain", "gptq"])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path, help=record.HELP)
    given = parser.parse_args(argv)
    found = {}
    for shape in given.shapes:
        with tempfile.TemporaryDirectory() as name:
            (folder := Path(name) / "model").mkdir()
            write_apart(folder, shape)
            found |= {
                f"{shape} B, {job}, {given.workers} at once": measured(folder, job, given.workers) for job in given.jobs
            }
    cells = [
        [
            name,
            *(f"{value / 1e6:.0f}" for value in (*row["peak"], *row["bytes"])),
            *(f"{s:.1f}" for s in row["seconds"]),
        ]
        for name, row in found.items()
    ]
    titles = ["shape, job", "memory MB, told", "measured", "result MB, told", "measured", "s, told", "CPU s", "wall s"]
    print(measure.table(titles, cells))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
